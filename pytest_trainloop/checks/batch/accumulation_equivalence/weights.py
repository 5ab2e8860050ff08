"""The weights of micro-batches in a gradient, and what their pattern says. Plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.gradients.vectors import Combination

CLOSE = 1e-6
"""How near a factor must come to a whole one: weights are good to 1e-8, and one token in a million changes 1e-6."""

Pattern = Literal[
    "last_absent",
    "absent",
    "scaled",
    "divided_again",
    "divided_by_position",
    "means",
    "scaled_means",
    "scaled_again",
    "other",
]


@dataclass(frozen=True, slots=True)
class Weighing:
    """The one-batch gradient and the accumulated one as weighted sums of the micro-batches' own. ``by_counts``: in the
    former the micro-batches weigh as their numbers of valid targets do."""

    one_batch: Combination
    accumulated: Combination
    by_counts: bool = False

    @property
    def factor(self) -> float:
        """The sum of the accumulated weights over that of the one batch's."""
        return sum(self.accumulated.weights) / sum(self.one_batch.weights)

    @property
    def absent(self) -> list[int]:
        """Micro-batches that weigh nothing."""
        got = self.accumulated.weights
        return [i for i, w in enumerate(got) if abs(w) < CLOSE * max(map(abs, got))]

    @property
    def factor_to_next(self) -> float:
        """What the last micro-batch but one is multiplied by, where the last one counts as it should."""
        full, got = self.one_batch.weights, self.accumulated.weights
        return got[-2] / full[-2] * full[-1] / got[-1]

    def decays_by(self, factor: float) -> bool:
        """Whether the last micro-batch weighs what it does in one batch, and each before it ``factor`` times the
        next."""
        full, got = self.one_batch.weights, self.accumulated.weights
        due = [w * factor ** (len(full) - 1 - i) for i, w in enumerate(full)]
        return all(abs(g - d) < CLOSE * max(map(abs, got)) for g, d in zip(got, due, strict=True))

    @property
    def pattern(self) -> Pattern:
        full, got = self.one_batch.weights, self.accumulated.weights
        k, factor = len(got), self.factor
        if self.absent:
            return "last_absent" if self.absent[-1] == k - 1 else "absent"
        factors = [g / w for g, w in zip(got, full, strict=True)]
        if all_equal(factors):
            return "scaled"
        if all_equal([f * k ** (k - 1 - i) for i, f in enumerate(factors)]):
            return "divided_again"
        if all_equal([f * (i + 1) for i, f in enumerate(factors)]):
            return "divided_by_position"
        if all_equal(got) and abs(factor - 1) < CLOSE:
            return "means"
        if all_equal(got) and (abs(factor - k) < CLOSE * k or abs(factor * k - 1) < CLOSE):
            return "scaled_means"
        if self.decays_by(self.factor_to_next):
            return "scaled_again"
        return "other"


def all_equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= CLOSE * max(map(abs, values))
