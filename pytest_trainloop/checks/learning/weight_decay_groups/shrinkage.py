"""By how much the whole run would shrink weights that decay and get no gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide, TrainLoopError
from pytest_trainloop.runs.projection import Projections

if TYPE_CHECKING:
    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups, Group
    from pytest_trainloop.runs.evidence import Evidence

least_worth_saying = 0.05
"""A shrinkage that training does not notice: gains and biases move by more than that of their own."""


def shrinkage(evidence: Evidence, groups: DecayGroups) -> float | None:
    """The largest share over the groups whose norms, biases or tables decay, ``1 - exp(-sum of rate * decay)`` over
    ``steps=``; None where the plan is not declared.

    Rates are those of the projected schedule. Where none is projected it is the highest that the watched run shows of a
    group: an upper bound for one that decays from there.
    """
    steps = evidence.declared("steps")
    if not isinstance(steps, int):
        return None
    record = evidence.run()
    shares = []
    for group in groups.groups:
        seen = [s.lrs[group.number] for s in record.innermost_steps() if s.optimizer == group.optimizer]
        peak = record.optimizers[group.optimizer].peak_lrs[group.number]
        highest = max([rate for rate in (*seen, peak) if math.isfinite(rate)], default=0.0)
        mean = _mean_rate(evidence, group)
        highest = highest if mean is None else mean
        if group.decay > 0 and group.members.keys() - {"matrix"}:
            shares.append(1 - math.exp(-steps * highest * group.decay))
    return max(shares, default=None)


SAMPLED = 200
"""Calls of a schedule at which its rates are read."""


def _mean_rate(evidence: Evidence, group: Group) -> float | None:
    """The mean learning rate of a group over the plan; None where its schedule, or the plan's calls, are not known."""
    try:
        schedulers = evidence.shared(Projections.of).schedulers
    except (CannotDecide, TrainLoopError):
        return None
    for projected in schedulers:
        if projected.optimizer == group.optimizer and projected.planned and projected.raises_at is None:
            calls = [projected.planned * i // SAMPLED for i in range(SAMPLED)]
            rates = [projected.rate(call) for call in calls]
            if all(group.number < len(each) for each in rates):
                return sum(float(each[group.number]) for each in rates) / SAMPLED
    return None
