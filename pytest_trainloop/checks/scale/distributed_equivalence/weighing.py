"""How much each rank's rows weigh in the gradients that the ranks read, and what the pattern says. Plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

CLOSE = 1e-6
"""How near a factor must come to another: weights are good to 1e-8, and one token in a million changes 1e-6."""

Pattern = Literal["own", "last_own", "one_rank", "scaled", "means", "clipped", "other"]
"""``own``: each rank reads the gradient of its own rows alone; ``last_own``: of the last micro-batches it reads its own
alone, and all of the others; ``one_rank``: all read the gradient of one rank's rows; ``scaled``: all ranks weigh what
they do in one process times one factor; ``means``: they weigh the same, and in one process they do not; ``clipped``:
each weighs one over the length of its own gradient."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """Gradients as weighted sums of the shares' own gradients.

    A share is one micro-batch of one rank; they are in the order of ranks, and of micro-batches within each.
    """

    one: tuple[float, ...] | None
    """In the gradient of one process with all rows; None where that is none of their sums."""
    ranks: tuple[tuple[float, ...], ...]
    """In the gradient that each rank's step reads."""
    lengths: tuple[float, ...]
    """The lengths of the shares' own gradients."""

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def window(self) -> int:
        """Micro-batches of one rank."""
        return len(self.lengths) // self.world

    @property
    def alike(self) -> bool:
        """Whether all ranks read the same gradient."""
        return all(_equal(self.ranks[0], other) for other in self.ranks[1:])

    @property
    def factor(self) -> float:
        """The sum of a rank's weights over that of one process."""
        return sum(self.ranks[0]) / sum(self.one) if self.one else float("nan")

    @property
    def pattern(self) -> Pattern:
        if all(_only(weights, self.own(rank)) for rank, weights in enumerate(self.ranks)):
            return "own"
        if self.window > 1 and all(self._last_is_own(rank) for rank in range(self.world)):
            return "last_own"
        if not self.alike:
            return "other"
        got = self.ranks[0]
        if any(_only(got, self.own(rank)) for rank in range(self.world)):
            return "one_rank"
        if self.one is not None:
            if all_equal([g / w for g, w in zip(got, self.one, strict=True)]):
                return "scaled"
            if all_equal(got) and abs(self.factor - 1) < CLOSE:
                return "means"
        if all_equal([w * n for w, n in zip(got, self.lengths, strict=True)]) and not all_equal(self.lengths):
            return "clipped"
        return "other"

    def own(self, rank: int) -> range:
        """The places of a rank's own shares."""
        return range(rank * self.window, (rank + 1) * self.window)

    def _last_is_own(self, rank: int) -> bool:
        """Whether a rank reads its own last micro-batch, those of no other, and all earlier ones."""
        got = self.ranks[rank]
        last = [r * self.window + self.window - 1 for r in range(self.world)]
        present = [abs(w) > CLOSE * max(map(abs, got)) for w in got]
        return all(present[i] == (i == last[rank] or i not in last) for i in range(len(got)))


def _only(weights: Sequence[float], places: range) -> bool:
    largest = max(map(abs, weights))
    return all((abs(w) > CLOSE * largest) == (i in places) for i, w in enumerate(weights))


def _equal(a: Sequence[float], b: Sequence[float]) -> bool:
    largest = max(*map(abs, a), *map(abs, b))
    return all(abs(x - y) <= CLOSE * largest for x, y in zip(a, b, strict=True))


def all_equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= CLOSE * max(map(abs, values))


def listed(weights: Sequence[float]) -> str:
    largest = max(map(abs, weights))
    return "[" + ", ".join(f"{w:.3g}" if abs(w) > CLOSE * largest else "0" for w in weights) + "]"
