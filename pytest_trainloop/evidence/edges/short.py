"""A row of length one, alone and cut to its length, as a collate function that pads to the longest row gives it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop import batch as nests
from pytest_trainloop.evidence.contracts.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_trainloop.evidence.edges import Compose, Edges, Outcome
    from pytest_trainloop.loop import TrainLoop


@dataclass(frozen=True, slots=True)
class Short:
    """``row`` is as long as no other; ``cut``: the project's batches are as long as their longest row is."""

    outcome: Outcome
    row: int
    cut: bool


def shortest(edges: Edges, batches: Sequence[Any]) -> Short | None:
    """None where no row has length one, or where the loop does not take one of another length cut so either."""
    lengths, full = lengths_of(edges.batch, edges.count, edges.padding.pad_id if edges.padding else None)
    longer = sorted((n, row) for row, n in enumerate(lengths) if 1 < n < full)
    if 1 not in lengths or max(lengths) < full or not longer:
        return None
    n, other = longer[0]
    if not edges.outcome(f"row {other} alone, cut to {n}", _cut(edges, other, full, n)).fine:
        return None
    row = lengths.index(1)
    words = f"row {row} alone, of length 1"
    outcome = edges.outcome(words, _cut(edges, row, full, 1))
    if outcome.lost:
        outcome = edges.with_birth(words, _cut(edges, row, full, 1), outcome)
    widths = {lengths_of(b, nests.rows(b), edges.padding.pad_id if edges.padding else None)[1] for b in batches}
    return Short(outcome, row, len(widths - {0}) > 1)


def lengths_of(batch: Any, count: int, pad_id: int | None) -> tuple[list[int], int]:
    """The length of each row, where the batch tells, and what rows are padded to; else nothing and 0."""
    wide = [t for t in nests.tensors(batch) if t.dim() > 1 and not t.is_nested and t.shape[0] == count]
    tokens = Tokens(pad_id)
    tokens.handed(batch)
    tokens.embedded = [(t, None, t) for t in wide if t.dim() == 2 and _are_ids(t)]
    for full in dict.fromkeys(t.shape[1] for t in wide):
        padded = tokens.padded((count, full)) if full > 1 else None
        if padded is not None and not bool(padded[:, 0].any()):
            return (~padded).sum(1).tolist(), full
    return [], 0


def _are_ids(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and bool(((tensor != 0) & (tensor != 1)).any())


def _cut(edges: Edges, row: int, full: int, length: int) -> Compose:
    """Everything that is as long as rows are padded to, or one shorter or longer than that, cut to the row's length."""
    take = edges.taken([row])

    def compose(loop: TrainLoop) -> Any:
        one = take(loop)
        memo = {id(t): cut for t in nests.tensors(one) if (cut := _shortened(t, full, length)) is not None}
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
