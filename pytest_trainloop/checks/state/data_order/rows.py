"""The rows of a batch by digest: leaf by leaf, along the batch's dimension."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from pytest_trainloop import nested
from pytest_trainloop.recording.samples import as_bytes
from pytest_trainloop.recording.torch_internals import has_values

PADS = (0, -100)
"""Ids that pad rows to one width, besides the declared ones: the same row has another width in another batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """What one tensor, array or list of a batch holds, a digest for each row."""

    digests: tuple[int, ...]
    floating: bool
    elements: int
    """Of one row."""
    nbytes: int
    """Of one row."""
    dtype: str
    shape: tuple[int, ...] = ()
    """Of one row."""

    @property
    def is_label(self) -> bool:
        """Whether a row is one whole number, or one word."""
        return not self.floating and self.elements == 1


Batch = Mapping[str, Leaf]
"""The leaves of a batch that have rows, by path."""


def rows_of(batch: Any, axis: int = 0, pads: Collection[int] = PADS) -> dict[str, Leaf]:
    """The leaves of a batch along the dimension in which its rows lie. A list of examples is read by their fields."""
    found = values_of(batch, axis)
    return {path: leaf for path, rows in found.items() if (leaf := _leaf(rows, pads)) is not None}


def values_of(batch: Any, axis: int = 0) -> dict[str, Any]:
    """The values of a batch that have rows, by path, each as a sequence of its rows."""
    found = dict(_values(batch, axis))
    sizes = [len(rows) for rows in found.values()]
    count = max(dict.fromkeys(sizes), key=sizes.count, default=0)
    return {path: rows for path, rows in found.items() if count and len(rows) == count}


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
    """The digest of one value: a tensor, an array, or a nest of these and plain data."""
    if isinstance(value, torch.Tensor):
        return _of_array(_as_array(value), pads) if _readable(value) else hash(("unread", id(value)))
    if isinstance(value, np.ndarray):
        return _of_array(value, pads)
    if isinstance(value, (int, float, np.generic)):
        return _of_array(np.asarray(value), ())  # as the entry of an array that is made of such values
    if isinstance(value, (str, bytes, complex, type(None))):
        return hash(value)
    children = nested.named_children(value)
    return hash(tuple((str(key), digest(child, pads)) for key, child in children))


def _values(value: Any, axis: int, path: nested.Path = (), depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every value of a batch that has rows, as a sequence of them, with its path."""
    if isinstance(value, torch.Tensor):
        if _readable(value) and -value.dim() <= axis < value.dim() and value.numel():
            yield nested.shown(path), _as_array(value.movedim(axis, 0))
    elif isinstance(value, np.ndarray):
        if value.ndim and value.size:
            yield nested.shown(path), value
    elif _of_rows(value):
        yield from _fields(value, path)
    elif depth < 6 and not isinstance(value, (str, bytes, int, float, complex, type(None), type, torch.nn.Module)):
        for key, child in nested.named_children(value):
            yield from _values(child, axis, (*path, key), depth + 1)


def _of_rows(value: Any) -> bool:
    """Whether a list holds a row at each place: words and numbers, or examples of one kind."""
    if not isinstance(value, (list, tuple)) or not value or hasattr(value, "_fields"):
        return False
    kinds = {type(item) for item in value}
    plain = kinds <= {str, int, float, bool, bytes}
    examples = (
        len(kinds) == 1
        and isinstance(value, list)
        and (isinstance(value[0], (Mapping, tuple)) or dataclasses.is_dataclass(value[0]))
    )
    return plain or examples


def _fields(value: Any, path: nested.Path) -> Iterator[tuple[str, Any]]:
    if isinstance(value[0], (str, int, float, bytes)):
        yield nested.shown(path), list(value)
        return
    rows = [dict(nested.named_children(item)) for item in value]
    for key in rows[0]:
        if all(key in row for row in rows):
            yield nested.shown((*path, key)), [row[key] for row in rows]


def _leaf(rows: Any, pads: Collection[int]) -> Leaf | None:
    if isinstance(rows, np.ndarray):
        if rows.dtype == object:
            return _leaf(list(rows), pads)
        first = rows[0]
        return Leaf(
            tuple(_of_array(row, pads) for row in rows),
            floating=rows.dtype.kind in "fcV",
            elements=int(first.size),
            nbytes=int(first.nbytes),
            dtype=str(rows.dtype),
            shape=tuple(first.shape),
        )
    example = rows[0]
    if isinstance(example, torch.Tensor):
        if not all(_readable(row) for row in rows):
            return None
        floating, elements, nbytes = example.is_floating_point(), example.numel(), example.nbytes
    elif isinstance(example, np.ndarray):
        floating, elements, nbytes = example.dtype.kind in "fc", example.size, example.nbytes
    else:
        floating, elements, nbytes = isinstance(example, float), 1, len(example) if isinstance(example, str) else 8
    return Leaf(tuple(digest(row, pads) for row in rows), floating, int(elements), int(nbytes), type(example).__name__)


def _readable(tensor: torch.Tensor) -> bool:
    return has_values(tensor) and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The entries as an array; those of a dtype that numpy lacks by their bits."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return plain.numpy()
    except TypeError:
        kind = f"V{plain.element_size()}"
        return as_bytes(plain).numpy().view(kind).reshape(tuple(plain.shape))


def _of_array(values: np.ndarray[Any, Any], pads: Collection[int]) -> int:
    """Without the padding at the ends of a row: it has another width in another batch."""
    if values.dtype.kind in "iu" and values.ndim == 1 and pads:
        kept = np.flatnonzero(~np.isin(values, list(pads)))
        values = values[kept[0] : kept[-1] + 1] if len(kept) else values[:0]
    return hash(np.ascontiguousarray(values).tobytes().rstrip(b"\0"))
