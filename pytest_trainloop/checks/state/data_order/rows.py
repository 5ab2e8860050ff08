"""The rows of a batch by digest: what a leaf holds, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.recording.samples import as_bytes
from pytest_trainloop.recording.torch_internals import has_values

PADS = (0, -100)
"""Ids that pad rows to one width, besides the declared ones: the same row has another width in another batch."""


class Leaf(NamedTuple):
    """What one tensor, array or list of a batch holds: a digest for each row, and what a row is."""

    digests: tuple[int, ...]
    floating: bool
    shape: tuple[int, ...]
    dtype: str
    elements: int
    nbytes: int

    @property
    def is_label(self) -> bool:
        """Whether a row is one whole number, or one word."""
        return not self.floating and self.elements == 1


Batch = Mapping[str, Leaf]
"""The leaves of a batch that have rows, by path."""


def rows_of(batch: Any, axis: int = 0, pads: Collection[int] = PADS) -> dict[str, Leaf]:
    """The leaves of a batch along the dimension in which its rows lie. A list of examples is read by their fields."""
    leaves = {}
    for path, rows in values_of(batch, axis).items():
        if any(isinstance(row, torch.Tensor) and not _readable(row) for row in rows):
            continue
        digests, first = tuple(digest(row, pads) for row in rows), array_of(rows[0])
        if first is None:
            size = len(rows[0]) if isinstance(rows[0], str) else 8
            leaves[path] = Leaf(digests, False, (), type(rows[0]).__name__, 1, size)
        else:
            floating = first.dtype.kind in "fcV"
            leaves[path] = Leaf(digests, floating, first.shape, str(first.dtype), first.size, first.nbytes)
    return leaves


def values_of(batch: Any, axis: int = 0, count: int = 0) -> dict[str, Any]:
    """The values of a batch that have rows, by path, each as a sequence of its rows: those of ``count`` rows, or of as
    many as most have."""
    found = dict(_values(batch, axis))
    lengths = [len(rows) for rows in found.values()]
    count = count or max(dict.fromkeys(lengths), key=lengths.count, default=0)
    return {path: rows for path, rows in found.items() if count and len(rows) == count}


def _values(value: Any, axis: int, path: nested.Path = (), depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        if _readable(value) and -value.dim() <= axis < value.dim() and value.numel():
            yield nested.shown(path), _as_array(value.movedim(axis, 0))
    elif isinstance(value, np.ndarray):
        if value.ndim and value.size:
            yield nested.shown(path), value
    elif isinstance(value, (list, tuple)) and value and {type(row) for row in value} <= {str, int, float, bool, bytes}:
        if not hasattr(value, "_fields"):
            yield nested.shown(path), list(value)
    elif isinstance(value, list) and value and len({type(row) for row in value}) == 1 and _is_example(value[0]):
        rows = [dict(nested.named_children(row)) for row in value]
        for key in rows[0]:
            if all(key in row for row in rows):
                yield nested.shown((*path, key)), [row[key] for row in rows]
    elif depth < 6 and not isinstance(value, (str, bytes, int, float, complex, type(None), type, torch.nn.Module)):
        for key, child in nested.named_children(value):
            yield from _values(child, axis, (*path, key), depth + 1)


def _is_example(value: Any) -> bool:
    return isinstance(value, (Mapping, tuple)) or dataclasses.is_dataclass(value)


def array_of(value: Any) -> np.ndarray[Any, Any] | None:
    """A tensor, an array, a number or a list of numbers as an array; None for anything else."""
    if isinstance(value, torch.Tensor):
        return _as_array(value) if _readable(value) else None
    plain = isinstance(value, (np.ndarray, np.generic, int, float)) or (
        isinstance(value, list) and all(isinstance(entry, (int, float)) for entry in value)
    )
    array = np.asarray(value) if plain else None
    return None if array is None or array.dtype == object else array


def digest(value: Any, pads: Collection[int] = ()) -> int:
    """The digest of one value: a tensor, an array, or a nest of these and plain data. It leaves out the padding at the
    ends of a row of ids, which has another width in another batch."""
    if isinstance(value, torch.Tensor):
        if not _readable(value):
            return hash(("unread", id(value)))
        value = _as_array(value)
    if isinstance(value, (int, float, np.generic)):
        value = np.asarray(value)  # as the entry of an array that is made of such values
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "iu" and value.ndim == 1 and pads:
            kept = np.flatnonzero(~np.isin(value, list(pads)))
            value = value[kept[0] : kept[-1] + 1] if len(kept) else value[:0]
        return hash(np.ascontiguousarray(value).tobytes().rstrip(b"\0"))
    if isinstance(value, (str, bytes, complex, type(None))):
        return hash(value)
    return hash(tuple((str(key), digest(child, pads)) for key, child in nested.named_children(value)))


def _readable(tensor: torch.Tensor) -> bool:
    return has_values(tensor) and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The entries as an array; those of a dtype that numpy lacks by their bits."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return plain.numpy()
    except TypeError:
        return as_bytes(plain).numpy().view(f"V{plain.element_size()}").reshape(tuple(plain.shape))
