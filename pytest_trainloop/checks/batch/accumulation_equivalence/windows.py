"""The windows of two runs, counted and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.compare import Agreement, agreement, optimizers, step_count, window_sizes
from pytest_trainloop.gradients.vectors import consumed, vectors

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

WINDOWS = 2


def require_windows_of_one_size(evidence: Evidence, window: int) -> None:
    """Windows that grow step by step up to the knob are a warm-up of the batch size: raises ``CannotDecide``."""
    sizes = window_sizes(evidence.run(accumulate=window))[:-1]  # the last may be what is left of the data
    if sizes == sorted(sizes) and len(set(sizes)) > 2:
        shown = ", ".join(map(str, sizes))
        raise CannotDecide(f"windows grow during training ({shown} backward passes a step): no two runs are comparable")


def require_steps(one: Record, many: Record, k: int, windows: int) -> None:
    made, expected = many.steps, one.steps
    if not any(step_count(one, o) >= windows for o in optimizers(one)):
        raise CannotDecide(
            f"with accumulate=1 the loop made {expected} steps over {windows} batches, where {windows} are due"
        )
    if made < expected:
        raise CannotDecide(
            f"with accumulate={k} the loop made {made} steps over {windows * k} micro-batches, where {expected} "
            "are due: it counts its windows in another way, or collects more batches before it steps"
        )


def agreements(one: Record, many: Record, optimizer: int, windows: int) -> list[Agreement]:
    pairs = [(consumed(one, optimizer, n), consumed(many, optimizer, n)) for n in range(windows)]
    return [agreement(*vectors([a, b])) for a, b in pairs if a is not None and b is not None]


def worst(one: Record, many: Record, optimizer: int, windows: int) -> float:
    """How far the windows differ; infinite where the optimizer stepped another number of times."""
    if step_count(one, optimizer) != step_count(many, optimizer):
        return float("inf")
    return max((a.difference for a in agreements(one, many, optimizer, windows)), default=0.0)
