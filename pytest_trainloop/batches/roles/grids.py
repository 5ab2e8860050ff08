"""Along which axes the rows and the positions of a batch may lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.nested import Path


@dataclass(frozen=True, slots=True)
class Grid:
    """So many rows and positions; ``dim`` is the axis of positions where a tensor leaves it open."""

    rows: int
    length: int
    dim: int

    def axes(self, tensor: torch.Tensor) -> tuple[int | None, int | None]:
        """The axes of rows and of positions of one tensor; a mask may have them the other way round than features."""
        own, shape = (1 if self.dim == 0 else 0), tensor.shape
        if tensor.dim() > max(own, self.dim) and (shape[own], shape[self.dim]) == (self.rows, self.length):
            return own, self.dim
        if shape[:2] == (self.rows, self.length):
            return 0, 1
        if shape[:2] == (self.length, self.rows):
            return 1, 0
        for axis in (own, 0):
            if tensor.dim() > axis and shape[axis] == self.rows:
                return axis, None
        return None, None


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
        return next((key for key in reversed(self.path) if isinstance(key, str)), "").lower()

    @property
    def cells(self) -> torch.Tensor:
        """The tensor as (rows, positions, ...), on the CPU."""
        assert self.row is not None
        assert self.time is not None
        return self.tensor.detach().movedim((self.row, self.time), (0, 1)).cpu()

    @property
    def whole(self) -> bool:
        """Whether these are whole numbers, as ids and labels are."""
        return not (self.tensor.is_floating_point() or self.tensor.is_complex() or self.tensor.dtype is torch.bool)

    def under(self, grid: Grid) -> Leaf:
        return Leaf(self.path, self.tensor, *grid.axes(self.tensor))


def grids(leaves: Sequence[Leaf], dim: int | None) -> list[Grid]:
    """Rows and positions as they may be, the likeliest first: where tensors of one entry for each row agree, where a
    tensor has nothing but rows and positions, rows first."""
    flat = {len(leaf.tensor) for leaf in leaves if leaf.tensor.dim() == 1}
    found: dict[Grid, tuple[bool, bool, bool]] = {}
    for axis in (1, 0) if dim is None else (dim,):
        for leaf in leaves:
            shape, own = leaf.tensor.shape, 1 if axis == 0 else 0
            if len(shape) <= max(axis, own):
                continue
            grid = Grid(shape[own], shape[axis], axis)
            rank = (grid.rows not in flat, len(shape) != 2, axis == 0)
            found[grid] = min(rank, found.get(grid, rank))
    return sorted(found, key=lambda grid: found[grid])
