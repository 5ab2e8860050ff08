"""Schedules that are called once a micro-batch, and built for as many calls: the same schedule in other units.

No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation
    from pytest_trainloop.checks.batch.accumulation_equivalence.split import Split
    from pytest_trainloop.runs.evidence import Evidence

BETWEEN = 1e-6
"""Of the way from one step's rate to the next one's: rounding of a rate is less, and the last micro-batch of a window
lies at half of the way or beyond, at a quarter where a cosine turns."""


def in_other_units(evidence: Evidence, made: Accumulation, split: Split, *, inside: bool) -> bool:
    """Whether the rates differ because the whole schedule counts in another unit with accumulation, its length as well
    as its calls. ``inside``: they move inside a window."""
    from pytest_trainloop.gradients.compare import learning_rates
    from pytest_trainloop.runs.progress import Progress

    one, many = (learning_rates(r, split.optimizer, split.steps) for r in (made.one(split), made.many(split)))
    if inside and between_steps(one, many):
        return True
    return evidence.shared(Progress.of).in_other_units(split.optimizer)


def between_steps(one: Sequence[tuple[float, ...]], many: Sequence[tuple[float, ...]]) -> bool:
    """Whether every rate of an accumulating run lies between those of the same step and the next one in the run over
    whole batches.

    A schedule of the same length is (k - 1) / k of a step ahead at the end of a window. One that runs k times as fast
    has come to the next step's rate there, or beyond it.
    """
    shares = set()
    for now, after, got in zip(one, one[1:], many, strict=False):
        for a, b, rate in zip(now, after, got, strict=False):
            if a == b == rate:
                continue
            if a == b:
                return False
            shares.add((rate - a) / (b - a))
    return bool(shares) and all(BETWEEN < share < 1 - BETWEEN for share in shares)
