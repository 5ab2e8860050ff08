"""Loops from public threads, written by someone who knew the documentation only.

What is left of larger collections: the faults whose cause hardly another loop here has, and the correct loops that were
once accused. A correct one is an odd loop of the corpus; a faulty one has no repaired twin, and its author says which
check should name it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.helpers.discovery import Corpus
from tests.loops.odd import odd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.loops.odd import Make


@dataclass(frozen=True, slots=True)
class Fault:
    """One faulty loop; ``check`` must name its fault."""

    name: str
    make: Make
    check: str
    what: str
    thread: str
    """The public thread that it was made from."""
    place: str = ""
    """A piece of the line that the author holds to be the fault; the line that is named is in tests/verdicts.tsv."""


FAULTS: Corpus[Fault] = Corpus("tests.loops.corpus")


def fault(subject: str, what: str, *, thread: str, check: str, place: str = "") -> Callable[[Make], Make]:
    """Register a faulty loop."""

    def register(make: Make) -> Make:
        name = f"{subject}_{make.__name__}"
        if name in FAULTS:
            raise ValueError(f"two faulty loops are named {name!r}")
        FAULTS[name] = Fault(name, make, check, what, thread, place)
        return make

    return register


def right(subject: str, what: str, *, thread: str) -> Callable[[Make], Make]:
    """Register a correct loop that looks odd."""
    return odd(notes=f"{what} ({thread})", name=f"{subject}_{{}}")
