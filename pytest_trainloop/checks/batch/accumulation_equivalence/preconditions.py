"""Where windows of micro-batches and one batch are not to be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.compare import window_sizes

if TYPE_CHECKING:
    from pytest_trainloop.checks.batch.accumulation_equivalence.runs import Accumulation, Split
    from pytest_trainloop.runs.evidence import Evidence


def require_windows_of_one_size(evidence: Evidence, window: int) -> None:
    """Windows that grow step by step up to the knob are meant (a warm-up of the batch size)."""
    sizes = window_sizes(evidence.run(accumulate=window))[:-1]  # the last may be what is left of the data
    if sizes == sorted(sizes) and len(set(sizes)) > 2:
        shown = ", ".join(map(str, sizes))
        raise CannotDecide(f"windows grow during training ({shown} backward passes a step): no two runs are comparable")


def require_divisor_by_rows(made: Accumulation, split: Split, factor: float) -> None:
    """A loss that is divided by a constant (the batch size of the settings, an expected length) is right for
    micro-batches of that size, and parts of the example batch have another."""
    if factor < 1 and made.by_a_constant(split):
        raise CannotDecide(
            f"the loss is divided by a constant: {split.accumulate} whole batches a window give the gradient of one, "
            "and parts of it give less, having fewer rows; give split_batch= where micro-batches of a fixed "
            "size are due"
        )
