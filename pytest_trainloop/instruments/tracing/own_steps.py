"""What the ``step`` of an optimizer of the project's own does, also in a method that it calls: the statement that
writes to a parameter, reads an option or counts the steps."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from pytest_trainloop.instruments.tracing.call_expressions import called_name
from pytest_trainloop.instruments.tracing.syntax import FUNCTIONS, assignment_of, base_of, statement_at

if TYPE_CHECKING:
    from collections.abc import Callable

_WEIGHTS = ("p", "param", "parameter", "data")
_WRITES = ("add_", "sub_", "addcdiv_", "copy_", "lerp_")


def update_in(step: str, method: Callable[[str], str]) -> str:
    """The only statement of an optimizer's ``step`` that writes to a parameter; where none does, what the method does
    that it gives the parameter to; its first line where several do. ``method`` gives the line of the optimizer's
    method of a name."""
    found = statement_at(step)
    if found is None or not isinstance(found[1], FUNCTIONS):
        return step
    calls = [n for n in ast.walk(found[1]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    own = {n: n for n in calls if _own(n) and any(getattr(a, "id", "") in _WEIGHTS for a in n.args)}
    writes = [
        n for n in calls if n.func.attr in _WRITES and (n.func.value in own or  # type: ignore[attr-defined]
        getattr(base_of(n.func.value), "id", getattr(n.func.value, "attr", "")) in _WEIGHTS)  # type: ignore[attr-defined]
    ]  # fmt: skip
    if not writes and len(own) == 1 and (inside := _begins(method(called_name(next(iter(own)))))):
        return inside
    return found[0].text(writes[0]) if len(writes) == 1 else step


def read_in(step: str, key: str, method: Callable[[str], str]) -> str:
    """The only statement of an optimizer's ``step`` that reads an option of the group, or, for ``**``, that makes what
    a beta is raised to: what the method does that makes it."""
    found = statement_at(step)
    for node in ast.walk(found[1]) if found is not None else ():
        read: Any = node if isinstance(node, ast.Subscript) and getattr(node.slice, "value", None) == key else None
        if key == "**" and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and found is not None:
            name = node.right
            made = assignment_of(found[0], name) if isinstance(name, ast.Name) else None
            read = getattr(made, "value", None)
        call = next((n for n in found[0].above(read) if _own(n)), None) if read is not None and found else None
        if read is not None and found is not None:
            return _begins(method(called_name(call))) if isinstance(call, ast.Call) else found[0].text(read)
    return ""


def _own(node: ast.AST) -> bool:
    """Whether this calls a method of ``self``."""
    return isinstance(node, ast.Call) and getattr(getattr(node.func, "value", None), "id", "") == "self"


def _begins(function: str) -> str:
    """The first statement of the function that begins at a line."""
    found = statement_at(function)
    body = found[1].body if found is not None and isinstance(found[1], FUNCTIONS) else []
    body = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return found[0].text(body[0]) if found is not None and body else ""
