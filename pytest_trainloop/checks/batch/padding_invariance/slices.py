"""Slices of a batch: some of its rows, and of these a range of positions. No value is made up."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop import nested
from pytest_trainloop.batches.grids import time_axes
from pytest_trainloop.batches.values import plain
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_trainloop.batches.padding import PaddingMask
    from pytest_trainloop.nested import Path


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """Rows with equally many real positions, and the positions from ``start`` to ``stop`` of them, of which those from
    ``first`` up to ``last`` are real."""

    rows: tuple[int, ...]
    start: int
    stop: int
    first: int
    last: int
    uneven: bool = False
    """Whether some of the rows are shorter, so that a part of their padding is always there."""

    @property
    def span(self) -> Span:
        return Span(self.stop - self.start, self.first - self.start, self.last - self.start)

    @property
    def padded(self) -> int:
        return (self.stop - self.start) - (self.last - self.first)

    def trimmed(self, keep: int = 0) -> BatchSlice:
        """The same rows with ``keep`` padded positions left on their side."""
        left = self.first > self.start
        return replace(self, start=self.first - (keep if left else 0), stop=self.last + (0 if left else keep))


@dataclass(frozen=True, slots=True)
class Span:
    """``total`` positions, of which those from ``start`` to ``stop`` are real."""

    total: int
    start: int
    stop: int

    def of(self, size: int) -> tuple[int, int] | None:
        """The real positions of a tensor of this size, also where the loop dropped the last position, or put one before
        the first. None where none is padding, or for any other size."""
        shifted = {
            self.total: (self.start, self.stop),
            self.total - 1: (self.start, min(self.stop, self.total - 1)),
            self.total + 1: (0 if self.start == 0 else self.start + 1, self.stop + 1),
        }
        found = shifted.get(size)
        if found is None or self.stop - self.start == self.total or found[1] - found[0] in (0, size):
            return None
        return found


def slices(padded: PaddingMask, others: Sequence[PaddingMask] = ()) -> list[BatchSlice]:
    """The rows with the fewest real positions, and those with the most of all that are padded: as many of each as have
    equally many. Where there are others, rows with less than two real positions are left out, since a model of the next
    position has no target in them, and rows with less than two padded ones, since the first may end a text; and rows in
    which one of the ``others``, groups of the same width, is as long or longer."""
    total = padded.grid.length
    every = range(padded.grid.rows)
    shorter = [r for r in every if all(group.lengths[r] <= total - 2 for group in others)]
    for rows in (shorter, every):
        lengths = {r: padded.lengths[r] for r in rows}
        for known in ((2, total - 2), (1, total - 1)):
            sizes = sorted(n for n in lengths.values() if known[0] <= n <= known[1])
            if sizes:
                return [_slice(padded, lengths, n) for n in dict.fromkeys((sizes[0], sizes[-1]))]
    return []


def shorter_rows(padded: PaddingMask) -> list[BatchSlice]:
    """All rows that are padded by two positions or more, as one slice, cut to the longest of them: where one row alone,
    or several equal ones, give no gradient, as in a contrast of rows."""
    rows = tuple(r for r, n in enumerate(padded.lengths) if 1 <= n <= padded.grid.length - 2)
    if len(rows) < 2:
        return []
    longest = max(padded.lengths[r] for r in rows)
    return [replace(_slice(padded, dict.fromkeys(rows, longest), longest), rows=rows, uneven=True)]


def _slice(padded: PaddingMask, lengths: dict[int, int], n: int) -> BatchSlice:
    rows, total = tuple(r for r, length in lengths.items() if length == n)[:MOST], padded.grid.length
    left = padded.side == "left"
    return BatchSlice(rows, 0, total, total - n if left else 0, total if left else n)


MOST = 4
"""Rows of a slice, at most."""


def cut(
    batch: Any,
    padded: PaddingMask,
    chosen: BatchSlice,
    *,
    count: int | None = None,
    others: Sequence[PaddingMask] = (),
) -> Any:
    """This slice of a batch, its rows repeated from the first where ``count`` are wanted. Of ``others``, groups of the
    same width, what is padding in all of the rows is cut off, so that they are of another width."""
    rows = nested.rows(batch, padded.grid.batch_dim)
    ranges = [_Range(padded, chosen, rows), *(_Range(other, _longest(other, chosen.rows), rows) for other in others)]
    memo = {
        id(t): made
        for path, t in nested.paths(batch)
        if plain(t)
        for positions in ranges
        if (made := positions.of(path, t)) is not t
    }
    wanted = [chosen.rows[i % len(chosen.rows)] for i in range(count or len(chosen.rows))]
    try:
        return nested.take(copy.deepcopy(batch, memo), wanted, padded.grid.batch_dim)
    except (RuntimeError, NotImplementedError, TypeError, IndexError) as error:
        reraise_raised(error)
        raise CannotDecide(f"rows cannot be taken from {nested.describe(batch)} ({type(error).__name__})") from error


def _longest(padded: PaddingMask, rows: Sequence[int]) -> BatchSlice:
    """These rows, as long as the longest of them."""
    longest = max(padded.lengths[row] for row in rows)
    return _slice(padded, dict.fromkeys(rows, longest), longest).trimmed()


@dataclass(frozen=True, slots=True)
class _Range:
    """Cuts tensors along their positions."""

    padded: PaddingMask
    chosen: BatchSlice
    count: int

    def of(self, path: Path, tensor: torch.Tensor) -> torch.Tensor:
        total, size = self.padded.grid.length, self.chosen.stop - self.chosen.start
        if path in self.padded.others or (tensor.dim() > 1 and not self.padded.alone and path not in self.padded.of):
            return tensor
        if tensor.dim() == 1 and self._are_lengths(tensor):
            return tensor - (self.padded.lengths[self.chosen.rows[0]] - (self.chosen.last - self.chosen.first))
        for longer in (0, 1, -1):
            grid = self.padded.grid
            axes = time_axes(tensor, grid.batch_dim, self.count, total + longer, grid.time_dim)
            if axes and (longer == 0 or self._is_shifted(tensor)):
                return self._narrow(tensor, axes, longer)
        if not self.padded.alone:
            return tensor
        if total != self.count and tensor.shape[:1] == (total,) and set(tensor.shape) == {total}:
            return self._from_zero(tensor, list(range(tensor.dim())), size)
        if tensor.dim() > 1 and tensor.shape[0] == 1 != self.count and total in tensor.shape:
            return self._from_zero(tensor, [a for a in range(tensor.dim()) if tensor.shape[a] == total], size)
        return tensor

    def _is_shifted(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor with one position more or less holds ids, and nothing where it is cut off."""
        if tensor.dim() != 2 or tensor.is_floating_point() or self.padded.grid.batch_dim != 0:
            return False
        own = tensor[list(self.chosen.rows)]
        off = (
            own[:, : self.chosen.start]
            if self.chosen.start
            else own[:, own.shape[1] - (self.padded.grid.length - self.chosen.stop) :]
        )
        return bool((off == off[:1, :1]).all())

    def _are_lengths(self, tensor: torch.Tensor) -> bool:
        same = (
            tensor.shape == (self.count,)
            and not tensor.is_floating_point()
            and not (self.padded.joint or self.chosen.uneven)
        )
        return same and tuple(tensor.tolist()) == self.padded.lengths

    def _narrow(self, tensor: torch.Tensor, axes: Sequence[int], longer: int) -> torch.Tensor:
        for axis in axes:
            tensor = tensor.narrow(axis, self.chosen.start, self.chosen.stop - self.chosen.start + longer)
        return tensor.clone()

    def _from_zero(self, tensor: torch.Tensor, axes: Sequence[int], size: int) -> torch.Tensor:
        """Without rows: positions and masks between them, which a shorter batch would have from the first on."""
        for axis in axes:
            tensor = tensor.narrow(axis, 0, size)
        return tensor.clone()
