"""Reports: plain data in, text or JSON out. No torch, no pytest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.core.report.entry import Entry
from pytest_trainloop.core.report.section import section

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_trainloop.core.finding import Result


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all checks on all loops; ``str()`` is the closing section.

    >>> report = check_loop(make_loop, raises=False)
    >>> failed = [result.check for result in report.results if result.outcome == "failed"]
    """

    entries: tuple[Entry, ...]
    """One for each loop and check, with ``loop``, ``nodeid`` (the test) and ``result``."""

    @classmethod
    def of(cls, loop: str, results: Iterable[Result]) -> Report:
        """The report on one loop."""
        return cls(tuple(Entry(loop=loop, nodeid=f"{loop}[{r.check}]", result=r) for r in results))

    @property
    def ok(self) -> bool:
        """Whether no check failed and none met an error."""
        return not any(entry.result.outcome in ("failed", "error") for entry in self.entries)

    @property
    def results(self) -> tuple[Result, ...]:
        """The results of all entries, in their order."""
        return tuple(entry.result for entry in self.entries)

    def in_causal_order(self, checks: Sequence[str]) -> Report:
        """The same report with loops by name, and checks in the given order: the same on every run."""
        rank = {name: i for i, name in enumerate(checks)}

        def key(entry: Entry) -> tuple[str, int, str]:
            return entry.loop, rank.get(entry.result.check, len(rank)), entry.nodeid

        return Report(tuple(sorted(self.entries, key=key)))

    def __str__(self) -> str:
        return "\n".join(line.text for line in section(self.entries))
