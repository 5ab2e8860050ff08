"""Two gradients of the same rows, with padding and with less of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.gradients.tolerances import ROUNDING

if TYPE_CHECKING:
    from pytest_trainloop.checks.batch.padding_invariance.slices import BatchSlice
    from pytest_trainloop.gradients.compare import Agreement

BOUNDS = {d: ROUNDING * torch.finfo(getattr(torch, d)).eps for d in ("float64", "float32")}
"""Within which two orders of summation agree, by the precision that a loop is run in."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The gradients that the first step consumes, with padding and without."""

    full: BatchSlice
    trimmed: BatchSlice
    agreement: Agreement
    losses: tuple[float, float]
    """With padding and without."""
    parameters: int
    precision: str = "float64"
    statistics: bool = False
    """Whether batch norms took their statistics from the batch, as in training."""

    @property
    def within_float32(self) -> bool:
        """Whether rounding to float32 somewhere may be all that differs: in a table of angles that numpy made, say."""
        return self.agreement.difference <= BOUNDS["float32"]

    @property
    def equal(self) -> bool:
        return self.agreement.difference <= BOUNDS[self.precision]

    @property
    def factor(self) -> float:
        """The share of real positions, where the gradient with padding is exactly this share of the one without; of all
        positions, or of all but one (targets that are shifted). 0 otherwise."""
        total, real = self.full.stop - self.full.start, self.trimmed.stop - self.trimmed.start
        shares = [real / total, (real - 1) / (total - 1)] if real > 1 else [real / total]
        bound = BOUNDS[self.precision]
        parallel = self.agreement.cosine > 1 - bound
        return next((s for s in shares if parallel and abs(self.agreement.ratio / s - 1) <= bound), 0.0)
