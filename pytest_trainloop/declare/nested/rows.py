"""The rows of a batch, whatever it is made of.

A row is an entry of every tensor along one axis. Besides tensors it may be an entry of an array, of a list of texts or
numbers, of a list of tensors of different sizes, a sequence of a ``PackedSequence`` or of a jagged tensor. The batch
may also be a list of samples. ``listings`` tells lists of rows from lists of columns.
"""

from __future__ import annotations

import copy as _copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from pytest_trainloop.declare.memory_layout import laid_out_as
from pytest_trainloop.declare.nested.listings import hold_rows, is_listing, is_sequence, outermost
from pytest_trainloop.declare.nested.walk import NO_NEST, children, tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def rows(batch: Any, axis: int = 0) -> int:
    """The number of rows of a batch: the size along ``axis`` that most of its tensors share; 0 without such an axis.

    Of several sizes that are equally frequent the first counts. Where no tensor has the axis, arrays say it, then lists
    of as many texts or numbers each.
    """
    return _Layout.of(batch, axis).count


def take(batch: Any, chosen: Sequence[int], axis: int = 0) -> Any:
    """A fresh batch of the chosen rows, in this order; types, keys, dtypes and devices stay.

    Tensors that have their rows first only, next to some that have them along ``axis``, are taken from there; so are
    those that have them second (states of recurrent layers). What has no entry for each row (class weights, one mask
    for all) is kept whole.
    """
    return _copy.deepcopy(batch, _Taking(_Layout.of(batch, axis), chosen).memo(batch))


def is_of_rows(value: Any, batch: Any, axis: int = 0) -> bool:
    """Whether a list or tuple in a batch, or the batch itself, has one entry for each row."""
    return is_sequence(value) and _Layout.of(batch, axis).by_rows(value)


def knows_its_rows(value: Any) -> bool:
    """Whether a value keeps rows of its own in a way that only it knows: a packed or a jagged tensor, a table."""
    return not isinstance(value, NO_NEST) and _own_size(value) is not None


def lists_of_rows(batch: Any, count: int) -> list[Sequence[Any]]:
    """Lists and tuples with one entry for each of ``count`` rows."""
    layout = _Layout.of(batch, 0)
    layout = layout if layout.count == count else _Layout(batch, 0, count)
    return [leaf for leaf in layout.leaves(batch) if is_sequence(leaf)]


@dataclass(slots=True)
class _Layout:
    """Where the rows of a batch are."""

    batch: Any
    axis: int
    count: int
    of_rows: set[int] = field(default_factory=set)
    """Lists and tuples whose entries are rows beyond doubt, by identity."""
    is_listing: bool = False
    """Whether the batch is a list of rows."""

    @classmethod
    def of(cls, batch: Any, axis: int) -> _Layout:
        if is_listing(batch):
            return cls(batch, axis, len(batch), {id(batch)}, is_listing=True)
        by_length: dict[int, list[Any]] = {}
        for listing in outermost(batch):
            by_length.setdefault(len(listing), []).append(listing)
        sure = [listing for same in by_length.values() if hold_rows(same) for listing in same]
        made = cls(batch, axis, 0, {id(listing) for listing in sure})
        outside = set(made._sizes(lambda value: isinstance(value, list)))
        sizes = list(made._sizes(lambda value: isinstance(value, list) and len(value) in outside and axis == 0))
        found = [*sizes, *(len(listing) for listing in sure for _ in range(2))]
        if not found:
            found = [a.shape[axis] for a in _arrays(batch) if a.ndim > _least_dims(axis)]
        if not found and not any(True for _ in tensors(batch)) and len(by_length) == 1:
            found = list(by_length)  # texts and numbers
        made.count = max(dict.fromkeys(found), key=found.count, default=0)
        return made

    def _sizes(self, skipped: Callable[[Any], bool]) -> Iterator[int]:
        """The tensors' sizes along the axis, but for those in lists that are skipped, unless these hold columns, and
        those in lists of rows."""
        seen: set[int] = set()
        todo = [self.batch]
        while todo:
            value = todo.pop(0)
            if id(value) in seen or isinstance(value, NO_NEST) or id(value) in self.of_rows:
                continue
            seen.add(id(value))
            if (size := _own_size(value)) is not None:
                yield size
            elif isinstance(value, torch.Tensor):
                if value.dim() > _least_dims(self.axis):
                    yield value.shape[self.axis]
            elif value is self.batch or not skipped(value) or _of_columns(value, len(value)):
                todo.extend(children(value))

    def leaves(self, batch: Any) -> Iterator[Any]:
        """Tensors, arrays, and lists of rows, once each."""
        seen: set[int] = set()
        todo: list[Any] = [batch]
        while todo:
            value = todo.pop(0)
            if id(value) in seen or isinstance(value, NO_NEST):
                continue
            seen.add(id(value))
            known = isinstance(value, torch.Tensor) or _own_size(value) is not None or is_array(value)
            if known or (is_sequence(value) and self.by_rows(value)):
                yield value
            else:
                todo.extend(children(value))

    def by_rows(self, value: Any) -> bool:
        """Whether a list or tuple has one entry for each row, rather than columns that each have all rows."""
        if value is self.batch or id(value) in self.of_rows:
            return id(value) in self.of_rows
        if len(value) != self.count:
            return False
        held = list(tensors(value))
        if not held:
            entries = all(not isinstance(v, (int, float, complex, type(None))) for v in value)
            return isinstance(value, list) or entries  # a tuple of numbers is a size
        with_rows = [self.row_axis(tensor) is not None for tensor in held]
        return not all(with_rows) and (isinstance(value, list) or not any(with_rows))

    def row_axis(self, tensor: torch.Tensor) -> int | None:
        """The axis of a tensor's rows; None where it has none."""
        if tensor.is_nested or not tensor.dim() or not self.count:
            return None
        if tensor.dim() > _least_dims(self.axis) and tensor.shape[self.axis] == self.count:
            return self.axis
        if self.axis:
            return 0 if tensor.shape[0] == self.count else None
        return 1 if self._may_be_second(tensor) else None

    def _may_be_second(self, tensor: torch.Tensor) -> bool:
        """Whether rows lie second in a tensor, as in states of recurrent layers and in time-first ids: not in a matrix
        of numbers (classes by features), nor where another axis of the batch has as many entries by chance."""
        if tensor.dim() < 2 or tensor.shape[1] != self.count or self.count < 2:
            return False
        if tensor.dim() == 2 and (tensor.is_floating_point() or tensor.shape[0] == 2):
            return False  # with two entries: the edges of a graph
        others = [t for t in tensors(self.batch) if not t.is_nested and t.dim() and t.shape[0] == self.count]
        return bool(others) and all(self.count not in t.shape[1:] for t in others)


class _Taking:
    """The chosen rows of each leaf of a batch."""

    def __init__(self, layout: _Layout, chosen: Sequence[int]) -> None:
        self._layout = layout
        self._chosen = list(chosen)
        self._offsets: dict[int, torch.Tensor] = {}
        """Of jagged tensors, by identity of the old ones: only those that share them can be computed with."""
        self._kept: list[Any] = []

    def memo(self, batch: Any) -> dict[int, Any]:
        """What replaces each leaf in a deep copy of the batch."""
        memo: dict[int, Any] = {}
        for leaf in self._layout.leaves(batch):
            taken = self._taken(leaf)
            if taken is not leaf:
                memo[id(leaf)] = taken
                self._kept.append(leaf)
        memo[id(memo)] = self._kept  # an identity may not be used again while it is in the memo
        return memo

    def _taken(self, leaf: Any) -> Any:
        count, chosen = self._layout.count, self._chosen
        if is_sequence(leaf):
            return type(leaf)(_copy.deepcopy(leaf[i]) for i in chosen)
        if (size := _own_size(leaf)) is not None:
            return self._of_own_size(leaf) if size == count and self._layout.axis == 0 else _copied(leaf)
        if isinstance(leaf, torch.Tensor):
            axis = self._layout.row_axis(leaf)
            if axis is None:
                return leaf
            taken = leaf.detach().index_select(axis, torch.tensor(chosen, device=leaf.device)).clone()
            fresh = laid_out_as(taken, leaf)
            return fresh.requires_grad_(leaf.requires_grad)
        axis = self._layout.axis
        has_rows = leaf.ndim > _least_dims(axis) and leaf.shape[axis] == count
        return leaf.take(chosen, axis=axis) if has_rows else leaf

    def _of_own_size(self, leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return _of_packed(leaf, self._chosen)
        if isinstance(leaf, torch.Tensor):
            return self._of_jagged(leaf)
        return leaf[torch.tensor(self._chosen)]

    def _of_jagged(self, leaf: torch.Tensor) -> torch.Tensor:
        values = _values_of(leaf)
        if values is None:
            parts = leaf.detach().unbind()
            made = torch.nested.nested_tensor([parts[i] for i in self._chosen], layout=leaf.layout)
            return made.requires_grad_(leaf.requires_grad)
        offsets = _offsets(leaf)
        places = torch.tensor(self._chosen, device=offsets.device)
        if id(offsets) not in self._offsets:
            self._kept.append(offsets)
            self._offsets[id(offsets)] = torch.nn.functional.pad(offsets.diff()[places].cumsum(0), (1, 0))
        bounds = offsets.tolist()
        taken = torch.cat([values[bounds[i] : bounds[i + 1]] for i in self._chosen])
        made = torch.nested.nested_tensor_from_jagged(taken, self._offsets[id(offsets)])
        return made.requires_grad_(leaf.requires_grad)


def _own_size(value: Any) -> int | None:
    """How many rows a container of tensors has that knows them itself: packed and jagged ones, and those with a
    ``batch_size`` of several axes (a ``TensorDict``). None for all others."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0]) if len(value.batch_sizes) else 0
    if isinstance(value, torch.Tensor):
        return int(value.size(0)) if value.is_nested else None
    held = None if isinstance(value, (dict, list, tuple)) else getattr(value, "batch_size", None)
    return int(held[0]) if isinstance(held, torch.Size) and held and hasattr(value, "__getitem__") else None


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf  # deepcopy() fails on nested tensors


def _of_packed(packed: PackedSequence, chosen: Sequence[int]) -> PackedSequence:
    """Sequences in the order that they were packed from; sorted by length only where these are."""
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    kept = lengths[list(chosen)]
    in_order = packed.sorted_indices is None and bool((kept.diff() <= 0).all())
    data = padded.detach()[list(chosen)]
    return pack_padded_sequence(data, kept, batch_first=True, enforce_sorted=in_order)


def _offsets(jagged: Any) -> torch.Tensor:
    found: torch.Tensor = jagged.offsets()
    return found


def _values_of(jagged: Any) -> torch.Tensor | None:
    """The rows of a jagged tensor one after another; None where it does not keep them so."""
    if jagged.layout is not torch.jagged:
        return None
    values: torch.Tensor = jagged.values().detach()
    return values if jagged.lengths() is None and len(values) == int(jagged.offsets()[-1]) else None


def is_array(value: Any) -> bool:
    """Whether a value is an array of another library, or a column of a table."""
    return hasattr(value, "__array__") and hasattr(value, "ndim") and not isinstance(value, torch.Tensor)


def _arrays(batch: Any) -> Iterator[Any]:
    seen: set[int] = set()
    todo: list[Any] = [batch]
    while todo:
        value = todo.pop(0)
        if id(value) in seen or isinstance(value, (*NO_NEST, torch.Tensor)):
            continue
        seen.add(id(value))
        if is_array(value):
            yield value
        else:
            todo.extend(children(value))


def _least_dims(axis: int) -> int:
    return axis if axis >= 0 else -axis - 1


def _of_columns(values: Sequence[Any], count: int) -> bool:
    """Whether a list as long as the batch holds columns, each with all rows, rather than rows."""
    return all(isinstance(v, torch.Tensor) and v.dim() > 0 and v.shape[0] == count for v in values)
