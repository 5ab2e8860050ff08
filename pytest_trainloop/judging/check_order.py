"""Which checks of a loop go first where time is short, and how long those to come will take.

Both are estimates from what the checks say they cost, in bare steps, and from what these steps took so far. No verdict
follows from them: only the order of the checks, and so which of them are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pytest_trainloop.core.registry import Check

WATCHED = 15
"""Bare steps that the watched run takes, which nearly every check needs."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, and the loop's own optimizer steps."""

    seconds: float = 0.0
    steps: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.steps + other.steps)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.seconds - other.seconds, self.steps - other.steps)


class Waiting:
    """The checks of one loop that are to come, with their options, and what was done so far."""

    def __init__(self) -> None:
        self._options: dict[str, Mapping[str, Any]] = {}
        self._done = 0

    def announce(self, checks: Mapping[str, Mapping[str, Any]]) -> None:
        """These checks will be asked for, with these options."""
        self._options = dict(checks)

    def drop(self, name: str) -> None:
        """This check will not be asked for any more."""
        self._options.pop(name, None)

    def note(self, steps: int) -> None:
        """So many bare steps' worth was done."""
        self._done += steps

    def worth_more(
        self, than: Check, known: Mapping[str, Check], offers: Collection[str]
    ) -> list[tuple[Check, Mapping[str, Any]]]:
        """The checks to come that name more causes for their time than this one, and their options; the best first."""
        better = [c for c in self._to_come(known, offers) if c.worth > than.worth]
        return [(c, self._options[c.name]) for c in sorted(better, key=lambda c: -c.worth)]

    def seconds(self, spent: float, known: Mapping[str, Check], offers: Collection[str]) -> float:
        """What the checks to come will take, where the watched run and those so far took ``spent`` seconds."""
        return spent / (WATCHED + self._done) * sum(check.steps for check in self._to_come(known, offers))

    def listeners(self, known: Mapping[str, Check]) -> list[str]:
        """Those of the checks to come."""
        return [known[name].listener for name in self._options if name in known and known[name].listener]

    def _to_come(self, known: Mapping[str, Check], offers: Collection[str]) -> list[Check]:
        checks = [known[name] for name in self._options if name in known]
        return [check for check in checks if check.needs <= set(offers)]
