"""Windows of micro-batches against one batch of the same rows: what was seen of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.batches import totals

if TYPE_CHECKING:
    from pytest_trainloop.compositions.composition import Composition
    from pytest_trainloop.gradients.compare import Agreement
    from pytest_trainloop.nested import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Windows of micro-batches against one batch of the same rows."""

    composition: Composition
    """The micro-batches of one window."""
    loop_splits: bool
    """Whether the loop splits each whole batch by itself."""
    optimizer: int
    steps: int
    """Steps of that optimizer over the micro-batches."""
    steps_expected: int
    """Its steps over the whole batches."""
    first_window: int
    """Micro-batches before its first step."""
    backwards: int
    """How many of these had their backward pass."""
    windows: tuple[Agreement, ...]
    """The gradients that the steps consumed, compared with those of the one batch."""
    updates: float
    """The difference of the weights at the end, over how far they moved."""
    lr_differs: bool
    bound: float
    """By how much the gradients may differ from rounding."""
    parameters: int
    precision: str
    place: str
    """The line of the first backward pass."""
    library: str
    """The framework whose code calls backward, if any."""
    step_place: str
    step_library: str
    """The framework whose code steps, if any."""

    @property
    def accumulate(self) -> int:
        """The number of micro-batches in a window."""
        return len(self.composition.parts)

    @property
    def equal(self) -> bool:
        """Whether every step came when it should and consumed what it should."""
        return self.steps == self.steps_expected and all(w.difference <= self.bound for w in self.windows)

    @property
    def steps_too_early(self) -> bool:
        return self.steps > self.steps_expected or self.first_window < self.accumulate


@dataclass(frozen=True, slots=True)
class Doubled:
    """A batch in which these numbers are doubled."""

    rows: int
    paths: tuple[Path, ...]

    def __str__(self) -> str:
        return f"{', '.join('.'.join(map(str, path)) for path in self.paths)} doubled"

    def apply(self, batch: Any) -> Any:
        return totals.doubled(batch, self.rows, self.paths)
