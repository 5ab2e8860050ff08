"""The names that a contract of a project gives: parameters of its function, attributes of its module."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare.knobs import nearest

if TYPE_CHECKING:
    from types import CodeType

    from pytest_trainloop.declare.callcontract import CallContract

_SET_BY_NAME = frozenset({"setattr", "__dict__", "__getattr__", "__getattribute__", "vars"})
"""What makes attributes whose names do not occur in the code."""


def require_names(function: Any, code: CodeType, contract: CallContract) -> None:
    """Raise ``UsageError`` for a parameter or a flag that the function, or its module, does not have."""
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    own = [name for name in parameters if name != "self"]
    owner = getattr(function, "__qualname__", type(function).__name__).rpartition(".")[2]
    takes = f"{owner} takes {', '.join(own) or 'nothing'}"
    for name in contract.arguments:
        if name not in own:
            hint = f"; {nearest(name, own)}" if own else ""
            raise UsageError(f"CallContract.arguments names {name!r}; {takes}{hint}")
    attributes = _attributes(function, parameters)
    if attributes is None:
        return
    flags = [("when", name) for name in contract.when]
    flags += [(f, v) for f in ("ignore_index", "value_range") if isinstance(v := getattr(contract, f), str)]
    for field, name in flags:
        if name not in own and name not in attributes:
            known = sorted({*own, *(a for a in attributes if not a.startswith("_"))} - {*contract.arguments})
            which = "parameter or attribute" if attributes else "parameter"
            hint = f"; {nearest(name, known)}" if known else ""
            raise UsageError(f"CallContract.{field} names {name!r}, which is no {which} of {owner}{hint}")


def _attributes(function: Any, parameters: tuple[str, ...]) -> frozenset[str] | None:
    """The attributes that the flags of a call may be read from; None where they cannot be known beforehand."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        return _of_class(function)
    holder = function if hasattr(function, "forward") else getattr(function, "__self__", None)
    if holder is not None:
        return None if _made_by_name(type(holder)) else frozenset(dir(holder)) - frozenset(dir(nn.Module))
    return None if "self" in parameters else frozenset()


def _of_class(kind: type) -> frozenset[str] | None:
    """What the methods of a class, and of those that it extends, name, also as a string (register_buffer)."""
    if _made_by_name(kind):
        return None
    found = {*dir(kind)}
    for code in _codes(kind):
        found |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())}
    return frozenset(found) - frozenset(dir(nn.Module))


def _made_by_name(kind: type) -> bool:
    return any(_SET_BY_NAME & {*code.co_names, code.co_name} for code in _codes(kind))


def _codes(kind: type) -> list[CodeType]:
    """The code of every method, but for those of torch's Module."""
    members = [m for base in kind.__mro__ if base not in (nn.Module, object) for m in vars(base).values()]
    return [m.__code__ for m in members if inspect.isfunction(m)]
