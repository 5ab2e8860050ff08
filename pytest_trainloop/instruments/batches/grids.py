"""Along which axes the rows and the positions of a batch lie, and its tensors under such a reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.whose import present
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.values import plain, two_valued, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.declare.nested import Path


@dataclass(frozen=True, slots=True)
class Grid:
    """``rows`` by ``length`` positions.

    Rows lie along ``batch_dim``, and positions along ``time_dim`` in a tensor that has several axes as long. ``fixed``:
    the rows of every tensor lie along ``batch_dim``; otherwise single tensors may have both axes swapped, as a mask
    (rows, positions) next to time-first features.
    """

    rows: int
    length: int
    batch_dim: int = 0
    time_dim: int = 1
    fixed: bool = False

    def is_near(self, other: Grid) -> bool:
        """Whether outputs by position of one can be as wide as those of the other, where the loop drops a position or
        adds one."""
        same = (self.rows, self.batch_dim, self.time_dim) == (other.rows, other.batch_dim, other.time_dim)
        return same and abs(self.length - other.length) <= 2

    def axes(self, tensor: torch.Tensor) -> tuple[int | None, int | None]:
        """The axes of rows and of positions of one tensor; None for what it has not. A tensor with a value for each
        pair of positions has no axis of positions."""
        own, shape = self.batch_dim, tensor.shape
        found = time_axes(tensor, own, self.rows, self.length, self.time_dim)
        if len(found) == 1 and (self.fixed or found[0] in (0, 1, self.time_dim) or tensor.dim() == 3):
            return own, found[0]  # sizes of an image may agree with the positions by chance
        if not self.fixed and not found:
            if shape[:2] == (self.rows, self.length):
                return 0, 1
            if shape[:2] == (self.length, self.rows):
                return 1, 0
        for axis in (own,) if self.fixed else (own, 0):
            if tensor.dim() > axis and shape[axis] == self.rows:
                return axis, None
        return None, None


def time_axes(tensor: torch.Tensor, batch_dim: int, rows: int, length: int, time_dim: int = 1) -> list[int]:
    """The axes of ``length`` positions of a tensor with ``rows`` rows along ``batch_dim``: none, one, or the last two
    of a tensor with a value for each pair of positions."""
    if tensor.dim() < 2 or tensor.dim() <= batch_dim or tensor.shape[batch_dim] != rows:
        return []
    axes = [a for a in range(tensor.dim()) if a != batch_dim and tensor.shape[a] == length]
    if axes[-2:] == [tensor.dim() - 2, tensor.dim() - 1] and _of_pairs(tensor):
        return axes[-2:]
    return [time_dim] if time_dim in axes else axes[:1]


def _of_pairs(tensor: torch.Tensor) -> bool:
    """Whether the last two axes are those of pairs of positions, as in masks, distances and adjacencies, and not of
    as many features as positions: two values, or zeros that lie symmetrically (without zeros: values that do)."""
    values = tensor.detach()
    if two_valued(values):
        return True
    zeros = values == 0
    return torch.equal(zeros, zeros.mT) if bool(zeros.any()) else torch.equal(values, values.mT)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a batch, and its axes under a grid."""

    path: Path
    tensor: torch.Tensor
    row: int | None = None
    time: int | None = None

    @property
    def name(self) -> str:
        """The last name on the path, in small letters."""
        return nested.last_name(self.path).lower()

    @property
    def cells(self) -> torch.Tensor:
        """The tensor as (rows, positions, ...)."""
        axes = present(self.row, "the axis of rows"), present(self.time, "the axis of positions")
        return self.tensor.detach().movedim(axes, (0, 1))

    def at(self, mask: torch.Tensor) -> torch.Tensor:
        """Its entries where a mask (rows, positions) is true."""
        return self.cells[mask.to(self.tensor.device)]

    @property
    def whole(self) -> bool:
        """Whether these are whole numbers, as ids and labels are."""
        return whole(self.tensor)

    @property
    def two_valued(self) -> bool:
        """Whether it has only values of a mask."""
        return two_valued(self.tensor)

    def under(self, grid: Grid) -> Leaf:
        return Leaf(self.path, self.tensor, *grid.axes(self.tensor))


def leaves(batch: Any) -> list[Leaf]:
    """The tensors of a batch whose entries can be compared, with their paths."""
    return [Leaf(path, tensor) for path, tensor in nested.paths(batch) if plain(tensor)]


def fixed_grids(found: Sequence[Leaf], batch_dim: int, rows: int, time_dim: int | None) -> list[Grid]:
    """One for each number of positions that tensors have next to ``rows`` rows along ``batch_dim``."""
    other = (1 if batch_dim == 0 else 0) if time_dim is None else time_dim
    shapes = [leaf.tensor.shape for leaf in found if leaf.tensor.dim() > max(1, batch_dim)]
    lengths = [n for shape in shapes if shape[batch_dim] == rows for a, n in enumerate(shape) if a != batch_dim]
    return [Grid(rows, length, batch_dim, other, fixed=True) for length in dict.fromkeys(lengths)]


def open_grids(found: Sequence[Leaf], time_dim: int | None) -> list[Grid]:
    """Rows and positions as they may lie, the likeliest first: where tensors of one entry for each row agree, where a
    tensor has nothing but rows and positions, rows first."""
    flat = {len(leaf.tensor) for leaf in found if leaf.tensor.dim() == 1}
    ranks: dict[Grid, tuple[bool, bool, bool]] = {}
    for time in (1, 0) if time_dim is None else (time_dim,):
        for leaf in found:
            shape, own = leaf.tensor.shape, 1 if time == 0 else 0
            if len(shape) <= max(time, own):
                continue
            grid = Grid(shape[own], shape[time], own, time)
            rank = (grid.rows not in flat, len(shape) != 2, time == 0)
            ranks[grid] = min(rank, ranks.get(grid, rank))
    return sorted(ranks, key=lambda grid: ranks[grid])
