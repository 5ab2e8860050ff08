"""The parts of the page of one loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.views.htmlreport.excerpts import Excerpt
    from pytest_trainloop.views.htmlreport.shown import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fault, error, piece of advice or note."""

    anchor: str
    check: str
    kind: str
    """"failed", "error", "xfailed", "advice" or "note"."""
    summary: str
    cause: str = ""
    place: str = ""
    """The line to change, or else where the fault was seen."""
    fields: Mapping[str, str]
    excerpts: Sequence[Excerpt] = ()
    pictures: Sequence[Shown] = ()
    traceback: str = ""
    rerun: str = ""
    """The command that runs this check on this loop."""
    follows: Sequence[Block] = ()
    """The failures that follow from this one."""
    of_the_loop: bool = False
    """Whether it is an error for which no check could judge, not only this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check that gave nothing to repair, in a table; or several that say the same why."""

    checks: Sequence[str]
    text: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    nodeid: str
    anchor: str
    status: str
    """"failed", "advice", "passed" or "nothing"."""
    counts: str
    at: str
    """File and line of its test; empty where that is not known."""
    card: Sequence[Mapping[str, Any]]
    card_file: str
    card_changes: Sequence[str] | None
    failures: Sequence[Block]
    xfailed: Sequence[Block]
    advice: Sequence[Block]
    notes: Sequence[Block]
    pictures: Sequence[Shown]
    passed: Sequence[Row]
    undecided: Sequence[Row]
    elsewhere: Sequence[Row]
    wide_open: bool
    """Whether its card and its pictures are open from the start."""

    @property
    def marked(self) -> int:
        """Lines of the card that differ from the common."""
        return sum(bool(line["odd"]) for line in self.card)

    @property
    def file(self) -> str:
        return self.nodeid.partition("::")[0]

    @property
    def name(self) -> str:
        return self.nodeid.partition("::")[2] or self.nodeid
