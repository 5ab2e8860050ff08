"""What a stream's own code stores: the true pairs of inputs and labels, rows never drawn, records that share a slot."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytest_trainloop.checks.state.data_order.rows import Leaf, digest, rows_of
from pytest_trainloop.recording.torch_internals import writes_in_place
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from pytest_trainloop.checks.state.data_order.held import Held
    from pytest_trainloop.checks.state.data_order.streams import Epoch

MOST_BYTES = 1 << 28
"""Bytes of one stored tensor that are read, at most."""

LEAST_RECORDS = 8
"""Records that share an object, at least."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredPair:
    """Where inputs and labels are stored, row by row."""

    inputs: str
    labels: str
    rows: int


def pair_stored(held: Held, epoch: Epoch, x: str, y: str) -> StoredPair | None:
    """A tensor with the inputs and one of the same length with the labels, so that each row has a label of its own."""
    inputs, labels = set(epoch.column(x)), Counter(epoch.column(y))
    candidates = [(path, value) for path, value in (*held.stored, *held.records) if len_of(value) >= epoch.rows]
    found_x = [
        (path, len_of(value)) for path, value in candidates if inputs <= set(digests(value, epoch.batches[0][x]))
    ]
    for path, value in candidates if found_x else ():
        same = [p for p, rows in found_x if rows == len_of(value) and p != path]
        if same and not labels - Counter(digests(value, epoch.batches[0][y])):
            return StoredPair(same[0], path, len_of(value))
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class NeverDrawn:
    """A stored tensor of which most rows never come."""

    path: str
    rows: int
    seen: int
    draws: int


def rows_never_drawn(held: Held, epoch: Epoch, x: str) -> NeverDrawn | None:
    """A stored tensor that holds all rows seen, and at least twice as many that were never drawn in five times as many
    draws as it has rows."""
    if not x or x not in epoch.leaves or epoch.batches[0][x].elements < 2:
        return None
    seen = set(epoch.column(x))
    for path, value in (*held.stored, *held.records):
        rows = len_of(value)
        if not 3 * len(seen) <= rows <= epoch.rows / 5:
            continue
        there = set(digests(value, epoch.batches[0][x]))
        if seen <= there and len(there) >= 3 * len(seen):
            return NeverDrawn(path, rows, len(seen), epoch.rows)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class SharedSlot:
    """Records whose slot is one and the same tensor."""

    path: str
    slot: str
    records: int
    written: int | None
    """How often it was written in place; None for an array, which does not count that."""
    shape: tuple[int, ...]


def shared_slots(held: Held, own: Collection[int] = ()) -> list[SharedSlot]:
    """Slots of records that hold one object which was written in place, at least once a record. ``own`` are tensors of
    the model, by ``id``."""
    found = []
    for path, records in held.records:
        if len(records) < LEAST_RECORDS:
            continue
        for slot, values in _slots(list(records)).items():
            first = values[0]
            if id(first) in own or any(value is not first for value in values):
                continue
            if isinstance(first, torch.Tensor) and not isinstance(first, torch.nn.Parameter):
                if writes_in_place(first) >= len(values):
                    found.append(SharedSlot(path, slot, len(values), writes_in_place(first), tuple(first.shape)))
            elif isinstance(first, np.ndarray) and first.ndim:
                found.append(SharedSlot(path, slot, len(values), None, first.shape))
    return found


def _slots(records: Sequence[Any]) -> dict[str, list[Any]]:
    """The values of each slot of the records, which are of one kind; a bare tensor is its own slot."""
    kinds = {type(record) for record in records}
    if len(kinds) > 1:
        return {}
    first = records[0]
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return {"": list(records)}
    if isinstance(first, Mapping):
        keys = [key for key in first if all(key in record for record in records)]
        return {f"[{key!r}]": [record[key] for record in records] for key in keys}
    if isinstance(first, (tuple, list)):
        names = getattr(first, "_fields", None)
        width = min(len(record) for record in records)
        return {f".{names[i]}" if names else f"[{i}]": [record[i] for record in records] for i in range(width)}
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        return {f".{name}": [getattr(record, name, None) for record in records] for name in names}
    return {}


def len_of(value: Any) -> int:
    """Rows of what is stored."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.shape[0]) if value.ndim else 0
    return len(value)


def digests(value: Any, like: Leaf) -> tuple[int, ...]:
    """The digests of stored rows, in the dtype in which a batch holds them."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.nbytes > MOST_BYTES:
        return ()
    try:
        if isinstance(value, torch.Tensor):
            leaf = next(iter(rows_of([value]).values()), None)
            array = value.detach().cpu().numpy() if leaf is not None and leaf.dtype != like.dtype else None
        else:
            array, leaf = np.asarray(value), None
        if array is not None and array.dtype.kind in "fiub":
            leaf = next(iter(rows_of([_in_dtype(array, like.dtype)]).values()), leaf)
        if leaf is None:
            return tuple(digest(item, ()) for item in value)
        return leaf.digests
    except (TypeError, ValueError, RuntimeError, StopIteration) as error:
        reraise_raised(error)
        return ()


def _in_dtype(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    try:
        return array.astype(dtype)
    except TypeError:
        return array
