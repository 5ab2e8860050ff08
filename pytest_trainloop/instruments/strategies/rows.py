"""Rows chosen from a real batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.declare import nested

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
        any nested structure of tensors, arrays and lists of rows; a list of samples; packed and jagged tensors
    batch_dim
        the dimension of the rows; tensors with the rows in dimension 0 only (labels next to time-first features) are
        taken there
    least, most
        bounds of the number of rows; ``most`` is by default one more than the batch has, at most 64

    Raises
    ------
    UsageError
        rows cannot be selected from this batch (no tensor with such a dimension)
    """
    count = nested.rows(batch, batch_dim)
    if count < 1:
        empty = isinstance(batch, (list, tuple, dict)) and not batch
        if empty or any(tensor.dim() and not len(tensor) for tensor in nested.tensors(batch)):
            what = f"an empty {type(batch).__name__}" if empty else f"{nested.describe(batch)}: it has none"
            raise UsageError(f"rows cannot be chosen from {what}; at least one row is needed")
        raise UsageError(
            f"rows cannot be chosen from {nested.describe(batch)}: no tensor of it has an axis {batch_dim}; "
            "pass batch_dim="
        )
    most = max(least, min(count + 1, MOST_CHOSEN)) if most is None else most
    if not 1 <= least <= most:
        raise UsageError(f"no selection has {least} to {most} rows: give least= from 1 to most=")

    return _indices(count, least, most).map(lambda indices: Rows(indices, _taken(batch, indices, batch_dim)))


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


def _taken(batch: Any, indices: Sequence[int], axis: int) -> Any:
    try:
        return nested.take(batch, indices, axis)
    except (RuntimeError, NotImplementedError, TypeError, IndexError) as error:
        reraise_raised(error)
        raise UsageError(
            f"rows cannot be taken from {nested.describe(batch)} ({type(error).__name__}: {error}); a batch of strided "
            "tensors is needed"
        ) from error
