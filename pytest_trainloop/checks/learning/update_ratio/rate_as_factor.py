"""A lambda that returns the learning rate itself, where a factor on it is meant."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from pytest_trainloop.errors import BrokenRun, CannotDecide
from pytest_trainloop.runs.projection import Projections

if TYPE_CHECKING:
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.projection import Projected


def rate_as_factor(evidence: Evidence) -> tuple[Projected, float, float] | None:
    """The schedule of a LambdaLR whose largest factor equals the base rate of its group and is not 1, with that rate
    and the largest product of the two."""
    with contextlib.suppress(CannotDecide, BrokenRun):
        optimizers = evidence.run().optimizers
        for projected in evidence.shared(Projections.of).schedulers:
            if "LambdaLR" not in projected.kind or projected.optimizer >= len(optimizers):
                continue
            bases = optimizers[projected.optimizer].peak_lrs
            for group, base in enumerate(bases[: len(projected.curve.rates[0])]):
                peak = max(projected.curve.group(group))
                if base > 0 and base != 1 and math.isclose(peak, base * base, rel_tol=1e-6):
                    return projected, base, peak
    return None
