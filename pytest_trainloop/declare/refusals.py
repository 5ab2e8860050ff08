"""What is said of the fields of a declaration that cannot be judged. Standard library only."""

from __future__ import annotations

import functools
import re
import traceback
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_trainloop.core import places
from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare.knobs import OF_THE_MARKER, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

Declaration = TypeVar("Declaration")

_MARKERS = {"TrainLoop": "@pytest.mark.trainloop", "LossContract": "@pytest.mark.trainloop_loss"}


def refusing_slips(required: Mapping[str, str]) -> Callable[[type[Declaration]], type[Declaration]]:
    """Let a dataclass say what Python refuses of its call as a ``UsageError``. ``required`` says of each field without
    a default what is needed."""

    def wrapped(kind: type[Declaration]) -> type[Declaration]:
        plain: Callable[..., None] = vars(kind)["__init__"]

        @functools.wraps(plain)
        def init(self: Any, *args: Any, **given: Any) -> None:
            try:
                plain(self, *args, **given)
            except TypeError as error:
                if slip := slip_in_the_call(error, kind, required):
                    raise slip from None
                raise

        type.__setattr__(kind, "__init__", init)
        return kind

    return wrapped


def slip_in_the_call(error: BaseException, kind: type, required: Mapping[str, str]) -> UsageError | None:
    """The refusal of a call of ``kind``, a dataclass, that Python refuses: a field that it does not have or that is not
    given, or fields by position. None for any other exception."""
    raised, name = str(error), kind.__name__
    if not isinstance(error, TypeError) or f"{name}.__init__()" not in raised:
        return None
    named = re.findall(r"'(\w+)'", raised)
    if "unexpected keyword" in raised:
        known = nearest(named[0], [f.name for f in fields(kind) if f.init])
        hint = (
            f"give it to the marker: {_MARKERS[name]}({named[0]}=...)"
            if named[0] in OF_THE_MARKER and name in _MARKERS
            else known
        )
        message = f"{name} has no field {named[0]!r}; {hint}"
    elif "missing" in raised and named:
        message = f"{name}.{named[0]} is not given; {required.get(named[0], 'a value is needed')}"
    else:
        message = f"{name} takes its fields by keyword only, as in {name}({', '.join(f'{f}=...' for f in required)})"
    last = traceback.extract_tb(error.__traceback__)[-1]
    here = (last.filename, last.lineno or 0)
    return UsageError(message, place=places.shown(*(places.caller() if places.is_ours(last.filename) else here)))


def validated(contract: Declaration, validate: Callable[[Declaration], None]) -> None:
    """Let a ``UsageError`` about one of its fields name the user's line in which that field is given."""
    kind = type(contract).__name__
    try:
        validate(contract)
    except UsageError as error:
        named = re.match(rf"{kind}\.(\w+)", str(error))
        place = places.of_keyword(*places.caller(), kind, named[1] if named else "")
        raise UsageError(str(error), place=place) from None


def refused(kind: str, field: str, given: str, needed: str) -> UsageError:
    """The refusal of one field."""
    return UsageError(f"{kind}.{field} is {given}; {needed} is needed")


def one_of(kind: str, field: str, given: Any, known: Collection[str]) -> None:
    """Raise ``UsageError`` unless it is one of these words."""
    if isinstance(given, str) and given in known:
        return
    hint = f"; {nearest(given, known)}" if isinstance(given, str) else ""
    shown = repr(given) if isinstance(given, str) else an(given)
    raise UsageError(f"{kind}.{field} is {shown}; one of {', '.join(known)} is needed{hint}")


def is_whole(value: Any, least: int | None = None) -> bool:
    """Whether it is a whole number, from ``least`` on."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_range(value: Any) -> bool:
    """Whether it is a pair of numbers, the smaller one first."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return all(isinstance(n, (int, float)) for n in value) and bool(value[0] < value[1])


def an(value: Any) -> str:
    """A value in words: itself where it is short and plain, else its type."""
    plain = (bool, int, float, str, type(None))
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if all(isinstance(part, plain) for part in parts) and len(repr(value)) <= _SHORT:
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


_SHORT = 60
"""The most characters of a value that are shown."""
