"""By how much the whole run would shrink weights that decay and get no gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups
    from pytest_trainloop.runs.evidence import Evidence

least_worth_saying = 0.05
"""A shrinkage that training does not notice: gains and biases move by more than that of their own."""


def shrinkage(evidence: Evidence, groups: DecayGroups) -> float | None:
    """The largest share over the groups whose norms, biases or tables decay, ``1 - exp(-sum of rate * decay)`` over
    ``steps=``; None where the plan is not declared.

    Rates are the highest that the watched run shows of a group: an upper bound for a schedule that decays from there.
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
        if group.decay > 0 and group.members.keys() - {"matrix"}:
            shares.append(1 - math.exp(-steps * highest * group.decay))
    return max(shares, default=None)
