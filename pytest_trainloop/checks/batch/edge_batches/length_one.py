"""A row of length one, alone and cut to its length, as a collate function that pads to the longest row gives it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop import nested
from pytest_trainloop.batches.padding import Proof, padding_ids, read_paddings

if TYPE_CHECKING:
    import torch

    from pytest_trainloop.checks.batch.edge_batches.runs import Compose, Edges, Outcome
    from pytest_trainloop.loop import TrainLoop


@dataclass(frozen=True, slots=True)
class Short:
    """What became of a row of length one."""

    outcome: Outcome
    row: int


def shortest(edges: Edges) -> Short | None:
    """None where no row has length one, where all batches are equally wide, or where the loop does not take a row of
    another length cut so either."""
    lengths, full = edges.lengths, edges.full
    longer = sorted((n, row) for row, n in enumerate(lengths) if 1 < n < full)
    if not edges.cuts or 1 not in lengths or max(lengths) < full or not longer:
        return None
    n, other = longer[0]
    if not edges.among_full(f"row {other} alone, cut to {n}", _cut(edges, other, n)).fine:
        return None
    row = lengths.index(1)
    return Short(edges.among_full(f"row {row} alone, of length 1", _cut(edges, row, 1)), row)


def lengths_of(batch: Any, loop: TrainLoop) -> tuple[tuple[int, ...], int]:
    """The length of each row, where padding at the ends of rows is proven, and what rows are padded to; else nothing
    and 0."""
    if loop.batch_dim not in (None, 0):
        return (), 0
    read = read_paddings(
        batch,
        at_least=Proof.EMPTY,  # rows are cut there, and all tensors with them
        declared=loop.padding,
        pad_ids=padding_ids(loop.modules.values()),
    )
    return next(((found.lengths, found.grid.length) for found in read if found.side == "right"), ((), 0))


def _cut(edges: Edges, row: int, length: int) -> Compose:
    """Everything that is as long as rows are padded to, or one shorter or longer than that, cut to the row's length."""
    take, full = edges.taken([row]), edges.full

    def compose(loop: TrainLoop) -> Any:
        one = take(loop)
        memo = {id(t): cut for t in nested.tensors(one) if (cut := _shortened(t, full, length)) is not None}
        return copy.deepcopy(one, memo)

    return compose


def _shortened(tensor: torch.Tensor, full: int, length: int) -> torch.Tensor | None:
    if tensor.is_nested or tensor.dim() < 2 or tensor.shape[0] != 1 or abs(tensor.shape[1] - full) > 1:
        return None
    left = max(1, length + tensor.shape[1] - full)
    cut = tensor.detach()[:, :left]
    if cut.dim() > 2 and cut.shape[2] == full and not cut.is_floating_point():
        cut = cut[:, :, :left]  # a mask over pairs of positions
    return cut.clone()
