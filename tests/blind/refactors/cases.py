"""Refactors of training code: loops from before and after, some that keep the mathematics and some that do not.

They were written from public threads by someone who knew the documentation only. Each ``before`` and ``after`` returns
a fresh ``TrainLoop``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop import TrainLoop

    Make = Callable[[], TrainLoop]

FIRSTS = ("data", "weights", "output", "loss", "gradient", "rate", "update", "group", "calls", "buffers")


@dataclass(frozen=True, slots=True)
class Keeps:
    """A refactor after which the loop has the same losses and the same weights."""

    name: str
    subject: str
    what: str
    thread: str
    """The public thread that it was made from."""
    before: Make
    after: Make
    renamed: dict[str, str] = field(default_factory=dict)
    """Modules or parameters, old name to new. Where several have one new name, it holds them one behind the other."""


@dataclass(frozen=True, slots=True)
class Breaks:
    """A refactor after which something differs."""

    name: str
    subject: str
    what: str
    thread: str
    before: Make
    after: Make
    first: str
    """The first thing that differs, in the order of the run: one of ``FIRSTS``."""
    place: str
    """The module, parameter, group option or call, as ``after`` names it; empty for the model or its loss."""


KEEPS: list[Keeps] = []
BREAKS: list[Breaks] = []


def keeps(subject: str, what: str, *, thread: str, renamed: dict[str, str] | None = None) -> Callable[[type], type]:
    """Register a class with ``before`` and ``after`` that train alike."""

    def register(pair: type) -> type:
        name = _name(subject, pair)
        KEEPS.append(Keeps(name, subject, what, thread, pair.before, pair.after, dict(renamed or {})))
        return pair

    return register


def breaks(subject: str, what: str, *, first: str, place: str, thread: str) -> Callable[[type], type]:
    """Register a class with ``before`` and ``after`` that do not."""
    if first not in FIRSTS:
        raise ValueError(f"{first!r} is not one of {FIRSTS}")

    def register(pair: type) -> type:
        name = _name(subject, pair)
        BREAKS.append(Breaks(name, subject, what, thread, pair.before, pair.after, first, place))
        return pair

    return register


def _name(subject: str, pair: type) -> str:
    name = f"{subject}/{pair.__name__}"
    if any(case.name == name for case in (*KEEPS, *BREAKS)):
        raise ValueError(f"two refactors are named {name!r}")
    return name
