"""Loops written by someone who knew the documentation only, from public threads: faulty ones, and right ones that look
odd.

They are judged by ``scripts/blind.py`` and are no tests: the first figures on them, before any mending, say how often a
fault that nobody tuned for is found, and how often a right loop is accused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.loop import TrainLoop

    Make = Callable[..., TrainLoop]


@dataclass(frozen=True, slots=True)
class Case:
    """One loop; ``check`` is the check that should name the fault, and empty for a right loop."""

    name: str
    make: Make
    subject: str
    what: str
    """What is wrong, or why it is right although it looks odd."""
    thread: str
    """The public thread that it was made from."""
    check: str = ""
    place: str = ""
    """A piece of the line at which the fault stands, where the author gave one."""


CASES: dict[str, Case] = {}


def fault(subject: str, what: str, *, thread: str, check: str, place: str = "") -> Callable[[Make], Make]:
    """Register a faulty loop."""
    return _registered(subject, what, thread, check, place)


def right(subject: str, what: str, *, thread: str) -> Callable[[Make], Make]:
    """Register a correct loop."""
    return _registered(subject, what, thread, "", "")


def _registered(subject: str, what: str, thread: str, check: str, place: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        folder = make.__module__.rpartition(".")[0].rpartition(".")[2]
        name = f"{folder}/{subject}/{make.__name__}{'' if check else ' (right)'}"
        if name in CASES:
            raise ValueError(f"two cases are named {name!r}")
        CASES[name] = Case(name, make, subject, what, thread, check, place)
        return make

    return register
