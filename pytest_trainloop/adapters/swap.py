"""Attributes of the user's object, set for the length of a block."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def swapped(subject: Any, **values: Any) -> Iterator[None]:
    """Set attributes of one object and restore the old ones, also after an exception.

    The attribute of an object that inherits it from its class (a method) is deleted again.
    """
    old = {name: getattr(subject, name) for name in values}
    uncover = {name for name in values if name not in vars(subject) and not _is_property(subject, name)}
    try:
        for name, value in values.items():
            setattr(subject, name, value)
        yield
    finally:
        for name, value in old.items():
            if name not in uncover:
                setattr(subject, name, value)
            elif name in vars(subject):
                delattr(subject, name)


def _is_property(subject: Any, name: str) -> bool:
    return isinstance(getattr(type(subject), name, None), property)
