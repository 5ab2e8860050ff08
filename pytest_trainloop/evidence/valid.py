"""How many entries of each row count: rows in an order that makes micro-batches as uneven as they can be.

A loop that averages over tokens can weigh micro-batches wrongly only where their counts differ. The order of the rows
is the only thing that is chosen; what counts is read off what the batch itself ignores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_trainloop import batch as nests
from pytest_trainloop.observe.events import LossCall

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_trainloop.loop import Padding
    from pytest_trainloop.observe.record import Record


def uneven_order(batch: Any, count: int, axis: int, padding: Padding | None, seen: Record) -> list[int]:
    """All rows, those with the fewest valid entries first; as they stand where all are alike or some have none."""
    for counts in _counts(batch, count, axis, _ignored(padding, seen)):
        if len(set(counts)) > 1 and min(counts) > 0:
            return sorted(range(count), key=lambda row: counts[row])
    return list(range(count))


def _ignored(padding: Padding | None, seen: Record) -> list[int]:
    """Values that stand for no label or no token: what the loss calls ignore first, then what was declared."""
    found = [call.ignore_index for call in seen.of(LossCall)]
    declared = [] if padding is None else [padding.ignore_index, padding.pad_id]
    return [v for v in dict.fromkeys([*found, *declared]) if v is not None]


def _counts(batch: Any, count: int, axis: int, ignored: list[int]) -> Iterator[list[int]]:
    """Valid entries by row, one list for each tensor that tells: integers without the ignored value, then masks."""
    leaves = [t for t in nests.tensors(batch) if t.dim() > 1 and t.dim() > axis >= 0 and t.shape[axis] == count]
    for value in ignored:
        for leaf in leaves:
            if not leaf.is_floating_point() and not leaf.is_complex() and bool((leaf == value).any()):
                yield _by_row(leaf != value, axis)
    for leaf in leaves:
        if not leaf.is_complex() and bool(((leaf == 0) | (leaf == 1)).all()):
            yield _by_row(leaf != 0, axis)


def _by_row(valid: torch.Tensor, axis: int) -> list[int]:
    return [int(n) for n in valid.movedim(axis, 0).flatten(1).sum(1)]
