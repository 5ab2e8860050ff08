"""A few rows of the example batch: a number of them that no other axis has, so that the size identifies an axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches import segments
from pytest_trainloop.instruments.batches.row_axis import drawn_by_a_loader, rows_known
from pytest_trainloop.runs.batch_stream import first_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.declare.loop import TrainLoop

COUNTS = (3, 5, 7, 2, 4, 6, 9, 11, 13)
"""Numbers of rows, in the order in which they are tried: odd primes are seldom the size of anything else."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """A batch of ``rows`` rows along ``axis``."""

    batch: Any
    rows: int
    axis: int
    rows_known: bool
    """Whether the axis is one of rows for sure, and not of positions."""
    whole: int = 0
    """The rows of the batch that these were taken from."""


def few_rows(loop: TrainLoop, sizes: Sequence[int], counts: Sequence[int] = COUNTS) -> FewRows:
    """The first rows of a fresh loop's first batch: as many as the first of ``counts`` that is none of ``sizes`` nor
    the length of another axis, or all. Raises ``CannotDecide`` where there are no two rows."""
    batch = first_batch(loop)
    found = segments.read(batch)
    if found is not None and found.ids.dim() == 1:
        raise CannotDecide(
            f"the batch holds the {found.entry}s of {found.count} {found.kind}s behind each other, and no rows: "
            f"whether {found.kind}s meet is for segment_independence"
        )
    count, rows, axis, known = _chosen(batch, loop.batch_dim, sizes, counts)
    known = known or (axis == 0 and loop.batch is None and drawn_by_a_loader(loop.batches))
    try:
        few = nested.copy(batch) if rows == count else nested.take(batch, range(rows), axis)
    except (RuntimeError, NotImplementedError, TypeError, IndexError) as error:
        reraise_raised(error)
        raise CannotDecide(f"rows cannot be taken from {nested.describe(batch)} ({type(error).__name__})") from error
    return FewRows(few, rows, axis, known, count)


def few_rows_of_call(
    arguments: Any, batch_dim: Any, sizes: Sequence[int], counts: Sequence[int] = COUNTS
) -> FewRows | None:
    """The same of what a model is called with, where what has a history keeps it; None where it has no two rows, or
    none can be taken."""
    try:
        count, rows, axis, known = _chosen(arguments, batch_dim, sizes, counts)
    except CannotDecide:
        return None

    def few(_path: nested.Path, tensor: torch.Tensor) -> torch.Tensor:
        has_rows = not tensor.is_nested and tensor.dim() > axis and tensor.shape[axis] == count
        return tensor.narrow(axis, 0, rows) if has_rows and rows < count else tensor

    try:
        few_arguments = nested.mapped(arguments, few, lambda value: isinstance(value, torch.Tensor))
    except RuntimeError as error:  # of a sparse tensor (the adjacency of a graph) no rows are a view
        reraise_raised(error)
        return None
    return FewRows(few_arguments, rows, axis, known)


def _chosen(batch: Any, batch_dim: Any, sizes: Sequence[int], counts: Sequence[int]) -> tuple[int, int, int, bool]:
    """How many rows there are and how many of them are taken, along which axis, and whether that is one of rows."""
    axis = batch_dim if isinstance(batch_dim, int) else 0
    count = nested.rows(batch, axis)
    if count < 2 and (why := nested.without_tensors(batch)):
        raise CannotDecide(why, needs="a batch of tensors")
    if count < 2:
        raise CannotDecide(
            f"the batch ({nested.describe(batch)}) has {count} rows along axis {axis}: at least 2 are needed to see "
            "whether they interact; give a larger one, or batch_dim=",
            needs="a larger batch",
        )
    plain = [tensor for tensor in nested.tensors(batch) if not tensor.is_nested]
    taken = {*sizes, *(size for tensor in plain for d, size in enumerate(tensor.shape) if d != axis)}
    rows = next((n for n in counts if n <= count and n not in taken), count)
    return count, rows, axis, isinstance(batch_dim, int) or rows_known(batch, axis)
