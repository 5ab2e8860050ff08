"""Rows chosen from a real batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence

from pytest_trainloop import nested
from pytest_trainloop.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import SearchStrategy


MOST_CHOSEN = 64
"""The default of ``most`` is at most this: the more rows, the longer each example takes."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rows:
    """The selected rows of a batch.

    Attributes
    ----------
    indices
        the numbers of the rows, in order
    batch
        the batch that they form, of the type of the one that was given
    """

    indices: tuple[int, ...]
    batch: Any

    def __repr__(self) -> str:
        return f"rows {list(self.indices)}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What Hypothesis writes into a failure, in place of all fields."""
        printer.text(repr(self))


def row_selections(batch: Any, batch_dim: int = 0, *, least: int = 1, most: int | None = None) -> SearchStrategy[Rows]:
    """Batches of selected rows of ``batch``: some of them, another order, a row twice, a single row, odd numbers.

    Types, keys, dtypes and devices stay; every batch is a fresh copy. Failures shrink to few rows, in order, without
    duplicates unless these matter.

    >>> @given(strategies.row_selections(batch))
    ... def test_the_loss_of_some_rows_is_finite(rows):
    ...     assert loss(model, rows.batch).isfinite(), rows.indices

    Parameters
    ----------
    batch
        any nested structure of tensors, or lists of rows
    batch_dim
        the dimension of the rows; tensors with the rows in dimension 0 only (labels next to time-first features) are
        taken there
    least, most
        bounds of the number of rows; ``most`` is by default one more than the batch has, at most 64

    Raises
    ------
    UsageError
        rows cannot be selected from this batch (a ``PackedSequence``, no tensor with such a dimension)
    """
    if _holds_packed(batch):
        raise UsageError("rows cannot be chosen from a PackedSequence; pass the padded tensor and its lengths")
    listed = _listed_rows(batch)
    count = len(listed[0]) if listed else nested.rows(batch, batch_dim)
    if count < 1:
        raise UsageError(
            f"rows cannot be chosen from {nested.describe(batch)}: no tensor of it has an axis {batch_dim}; "
            "pass batch_dim="
        )
    most = max(least, min(count + 1, MOST_CHOSEN)) if most is None else most
    if not 1 <= least <= most:
        raise UsageError(f"no selection has {least} to {most} rows: give least= from 1 to most=")

    def made(indices: tuple[int, ...]) -> Rows:
        return Rows(indices, _of_lists(batch, listed, indices) if listed else _taken(batch, indices, count, batch_dim))

    return _indices(count, least, most).map(made)


@st.composite
def _indices(draw: st.DrawFn, count: int, least: int, most: int) -> tuple[int, ...]:
    """A number of rows, each of them by its own number, and their order.

    That much is drawn for all rows, too, though only their order is open: shrinking may then take them for some rows,
    and leave out those that it does not need.
    """
    ways = [way for way, there in (("some", least <= count), ("all", least <= count <= most), ("twice", True)) if there]
    way = draw(st.sampled_from(ways))
    bounds = (count, count) if way == "all" else (least, most if way == "twice" else min(most, count))
    number = draw(st.integers(*bounds))
    chosen = [draw(st.integers(nth, nth) if way == "all" else st.integers(0, count - 1)) for nth in range(number)]
    if way != "twice":
        chosen = list(dict.fromkeys(chosen))
        missing = [row for row in range(count) if row not in chosen]
        chosen += missing[: max(0, least - len(chosen))]
    return tuple(draw(st.permutations(chosen)))


def _holds_packed(batch: Any) -> bool:
    if isinstance(batch, PackedSequence):
        return True
    return isinstance(batch, (Mapping, list, tuple)) and any(_holds_packed(value) for value in nested.children(batch))


def _listed_rows(batch: Any) -> list[list[Any]]:
    """The lists whose entries are the rows of a batch, where no tensor holds several rows: as many entries in each, and
    tensors of different sizes in one of them."""
    found: list[list[Any]] = []
    todo = [batch]
    while todo:
        value = todo.pop(0)
        if isinstance(value, list) and any(True for _ in nested.tensors(value)):
            found.append(value)
        elif isinstance(value, torch.Tensor) and value.dim():
            return []
        elif isinstance(value, (Mapping, tuple)) or dataclasses.is_dataclass(value):
            todo.extend(nested.children(value))
    same_length = len({len(value) for value in found}) == 1
    return found if same_length and any(_uneven(value) for value in found) else []


def _uneven(values: list[Any]) -> bool:
    """Whether the entries differ only in the sizes of their tensors along the first axis."""
    entries = [dict(nested.paths(value)) for value in values]
    kinds = {tuple((path, t.dtype, t.dim()) for path, t in entry.items()) for entry in entries}
    if len(kinds) != 1:
        return False
    return any(len({len(entry[path]) for entry in entries}) > 1 for path, t in entries[0].items() if t.dim())


def _of_lists(batch: Any, lists: Sequence[list[Any]], indices: Sequence[int]) -> Any:
    return copy.deepcopy(batch, {id(rows): [nested.copy(rows[i]) for i in indices] for rows in lists})


def _taken(batch: Any, indices: Sequence[int], count: int, axis: int) -> Any:
    try:
        return nested.take(batch if axis == 0 else _taken_in_front(batch, indices, count, axis), indices, axis)
    except (RuntimeError, NotImplementedError, TypeError, IndexError) as error:
        raise UsageError(
            f"rows cannot be taken from {nested.describe(batch)} ({type(error).__name__}: {error}); a batch of strided "
            "tensors is needed"
        ) from error


def _taken_in_front(batch: Any, indices: Sequence[int], count: int, axis: int) -> Any:
    """Rows of those tensors that have them along the first axis only."""
    new = {}
    for _, tensor in nested.paths(batch):
        has_axis = tensor.dim() > (axis if axis >= 0 else -axis - 1)
        if tensor.dim() and len(tensor) == count and not (has_axis and tensor.shape[axis] == count):
            new[id(tensor)] = tensor.detach()[list(indices)].requires_grad_(tensor.requires_grad)
    return nested.replaced(batch, new)
