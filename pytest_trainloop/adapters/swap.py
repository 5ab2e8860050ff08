"""Attributes of the user's object set for a while."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def swapped(subject: Any, **values: Any) -> Iterator[None]:
    """Set attributes of one object and give the old ones back, also after an exception.

    One that came from the class (a method) is uncovered again, not copied onto the object.
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
