"""Whether an axis of a batch is one of rows, and not of positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, RandomSampler, default_collate

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.padding import Proof, read_paddings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.declare.loop import TrainLoop


def rows_known(batch: Any, axis: int) -> bool:
    """Whether something in the batch distinguishes the axis of rows from one of positions.

    Where no tensor could have both, they cannot be confused. Else some tensor must have one entry for each row and no
    axis of positions (a class, a length, a target), rows must end in padding, or one tensor must be another shifted by
    one position.
    """
    count = nested.rows(batch, axis)
    plain = [t for t in nested.tensors(batch) if not t.is_nested and t.layout is torch.strided and t.dim() > 0]
    with_rows = [t for t in plain if t.dim() > axis and t.shape[axis] == count]
    deep = [t for t in with_rows if t.dim() > 2 or (t.dim() == 2 and not t.is_floating_point())]
    if not deep:
        return True
    if axis != 0:
        return False
    length = max(deep, key=lambda t: t.dim()).shape[1]
    if length == count:
        return False
    one_each = [t for t in with_rows if t.dim() == 1 or (t.dim() == 2 and t.shape[1] != length)]
    return any(not _counts_up(t) for t in one_each) or any(map(_padded_at_the_end, deep)) or _shifted(with_rows)


def other_axis(loop: TrainLoop, batch: Any) -> int | None:
    """The second axis, where rows may lie along it as well as along the first: all tensors with several axes are as
    long there, the project does not say where rows lie, and nothing in the batch does."""
    if loop.split_batch is not None or loop.batch_dim is not None or drawn_by_a_loader(loop.batches):
        return None
    lengths = {t.shape[1] for t in nested.tensors(batch) if not t.is_nested and t.dim() > 1}
    return 1 if len(lengths) == 1 and min(lengths) > 1 and not rows_known(batch, 0) else None


def relation(batch: Any) -> str:
    """The tensor of a batch that relates each row to each other one, with its shape: an adjacency matrix, in words as
    "batch.adj of shape (40, 40)"; empty where there is none.

    It is square and symmetric by its values or by where they are not 0, and next to it a tensor has something else of
    each row, so that the axis does not have as many entries by chance.
    """
    count = nested.rows(batch)
    leaves = [(path, t) for path, t in nested.paths(batch) if not t.is_nested and t.dim() > 1 and len(t) == count > 2]
    if not any(t.shape[1] != count and t.is_floating_point() for _, t in leaves):
        return ""
    for path, tensor in leaves:
        if tensor.shape == (count, count) and not tensor.is_meta and _is_symmetric(tensor.detach()):
            return f"{nested.shown(path)} of shape {tuple(tensor.shape)}"
    return ""


def _is_symmetric(tensor: torch.Tensor) -> bool:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    filled = dense != 0
    return torch.equal(dense, dense.T) or (torch.equal(filled, filled.T) and not bool(filled.all()))


def drawn_by_a_loader(batches: Any) -> bool:
    """Whether these are batches of a ``DataLoader`` that stacks items of a shuffled data set: whatever an item is, the
    first axis lists items in an order drawn at random, which no axis of positions has."""
    if not isinstance(batches, DataLoader) or batches.batch_size is None:
        return False
    return type(batches.sampler) is RandomSampler and batches.collate_fn is default_collate


def _counts_up(tensor: torch.Tensor) -> bool:
    """Whether this may be a list of times rather than something about each row."""
    return tensor.dim() == 1 and tensor.numel() > 1 and bool((tensor[1:] > tensor[:-1]).all())


def _padded_at_the_end(tensor: torch.Tensor) -> bool:
    """Whether rows end in one value, from positions on that differ. The weakest proof is enough: only that positions
    lie along the second axis matters here, and not which of them are padding."""
    return any(found.side == "right" for found in read_paddings(tensor, at_least=Proof.REPEATED))


def _shifted(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one tensor is another one shifted by one position along the second axis."""
    for one in tensors:
        for other in tensors:
            if one.dim() > 1 and one.shape == other.shape and one.shape[1] > 2 and one is not other:
                ahead = torch.equal(one[:, :-1], other[:, 1:].to(one.device))
                across = torch.equal(one[:-1], other[1:].to(one.device))
                if ahead and not across:
                    return True
    return False
