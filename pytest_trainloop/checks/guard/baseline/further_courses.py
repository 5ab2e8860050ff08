"""Further courses of the loop as it is, with last digits of the weights moved, from which bounds are derived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pytest_trainloop.baselines.capture import course
from pytest_trainloop.checks.guard.baseline.bounds import Nudged
from pytest_trainloop.checks.guard.baseline.judging import restless
from pytest_trainloop.errors import CannotDecide

if TYPE_CHECKING:
    from pytest_trainloop.baselines.trajectory import Trajectory
    from pytest_trainloop.runs.evidence import Evidence

SEEDS = (1, 2)
"""Of the draws that move each weight up or down."""


class FurtherCourses:
    """The courses in either precision, made when they are asked for."""

    def __init__(self, evidence: Evidence, now: Trajectory) -> None:
        self._evidence, self._now = evidence, now

    def of(self, precision: Literal["float64", "own"]) -> list[Nudged]:
        """Two with each weight moved by one unit in the last place; where some gradients are rounding alone, one in
        which their weights are moved as far as a step moves them: by another machine they are."""
        double = precision == "float64"
        mine = self._now.double if double else self._now.own
        try:
            moved = [course(self._evidence, self._now.made, double=double, nudge=seed) for seed in SEEDS]
            found = [Nudged(other) for other in moved]
            if mine is not None and (sizes := restless(mine, moved)):
                thrown = course(self._evidence, self._now.made, double=double, nudge=sizes)
                found.append(Nudged(thrown, later=1))
        except CannotDecide as reason:
            raise CannotDecide(f"how far rounding reaches cannot be derived: {reason}") from None
        return found
