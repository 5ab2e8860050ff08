"""Whether a schedule's length and its calls grow alike with the knob ``accumulate``: u_k = u_1, where u is the share of
the schedule that the training gets through, calls / horizon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.runs.projection import ACCUMULATE, FEW_AHEAD, SIZES, ShortRun, Sized, unit_of

if TYPE_CHECKING:
    from pytest_trainloop.runs.evidence import Evidence

SAME = 0.02
"""By which two shares may differ: whole calls are counted, and no window changes a share by less than half."""

LEAST_END = 3
"""Calls from which on a schedule that is built for one call less or more is not one of a quarter of the length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """A schedule in a run at one value of the knob."""

    horizon: int
    calls: int
    planned: int | None = None
    """Calls in the declared training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """For each optimizer whose schedule ends: its length without accumulation and with it."""

    lengths: dict[int, tuple[Length, Length]]

    @classmethod
    def of(cls, evidence: Evidence) -> Progress:
        """Two runs of a few steps; without an entry for an optimizer whose schedule cannot be projected."""
        try:
            one = ShortRun(evidence, 1, SIZES[0], FEW_AHEAD, accumulate=1)
            ahead = ACCUMULATE * max([FEW_AHEAD, *(s.horizon or 0 for s in map(one.sized, one.driven))])
            many = ShortRun(evidence, ACCUMULATE, SIZES[0], ahead, accumulate=ACCUMULATE)
        except CannotDecide:
            return cls(lengths={})
        before, after = _lengths(one), _lengths(many)
        return cls(lengths={o: (before[o], after[o]) for o in before.keys() & after.keys()})

    def in_other_units(self, optimizer: int) -> bool:
        """Whether the schedule is as far on after the same training, with accumulation and without."""
        if optimizer not in self.lengths:
            return False
        one, many = self.lengths[optimizer]
        pairs = [(one.calls, many.calls)]
        if one.planned and many.planned:
            pairs.append((one.planned, many.planned))
        off = max(SAME * one.horizon, float(one.horizon >= LEAST_END))
        return any(abs(many.horizon * before / after - one.horizon) <= off for before, after in pairs)


def _lengths(run: ShortRun) -> dict[int, Length]:
    found = {}
    for driven in run.driven:
        size: Sized = run.sized(driven)
        unit = unit_of((size,))
        if size.horizon and size.calls:
            planned = None if unit is None else run.declared.of(unit)
            found[driven.optimizer] = Length(horizon=size.horizon, calls=size.calls, planned=planned)
    return found
