"""A batch read: the role of each tensor, its axes, and what stands in it at padded positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.roles.grids import Grid, Leaf, grids
from pytest_trainloop.batches.roles.padded import Padded, additive, constant, is_label, padded, two_valued

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.loop import Padding
    from pytest_trainloop.nested import Path

Role = Literal["ids", "mask", "labels", "lengths", "features", "other"]

_ELSEWHERE = ("type", "segment", "position", "token_type_ids", "position_ids", "bbox", "word_ids")
"""Names of whole numbers for each position that are neither tokens nor labels."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a batch.

    ``row`` and ``time`` are the axes of rows and of positions, None where it has none. ``fill`` is what stands in it at
    padded positions and ``real`` what a mask has at the others; None where that is not known.
    """

    path: Path
    role: Role
    row: int | None
    time: int | None
    fill: float | None
    real: float | None
    tensor: torch.Tensor = field(repr=False)

    @property
    def name(self) -> str:
        return nested.shown(self.path)

    @property
    def cells(self) -> torch.Tensor:
        """The tensor as (rows, positions, ...)."""
        assert self.row is not None
        assert self.time is not None
        return self.tensor.detach().movedim((self.row, self.time), (0, 1))


@dataclass(frozen=True, slots=True)
class Roles:
    """``padded``: (rows, positions) on the CPU, true for padding; None where it cannot be told. ``undecided``: why the
    batch cannot be padded in another way, and what to give; empty where it can."""

    parts: tuple[Part, ...]
    rows: int
    length: int | None
    padded: torch.Tensor | None = field(repr=False)
    undecided: str = ""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The real positions of each row; empty where padding cannot be told."""
        return () if self.padded is None else tuple(int(n) for n in (~self.padded).sum(1))

    @property
    def side(self) -> Literal["left", "right"]:
        """Where padding stands in the rows: on the right, also where there is none."""
        if self.padded is None or not bool(self.padded.any()):
            return "right"
        some = self.padded[~self.padded.all(1)]
        return "left" if bool(some[:, 0].any()) else "right"

    def of(self, *roles: Role) -> tuple[Part, ...]:
        """The parts with one of these roles."""
        return tuple(part for part in self.parts if part.role in roles)


def read(batch: Any, padding: Padding | None = None) -> Roles:
    """The role and the axes of each tensor of a batch; raises nothing: ``undecided`` says what cannot be told.

    Positions lie along ``padding.dim`` where padding is declared. Else the axes are those under which a mask or lengths
    say where padding stands; where rows and positions could be either, rows come first.
    """
    leaves = [Leaf(path, tensor) for path, tensor in nested.paths(batch) if _plain(tensor)]
    best: tuple[Grid, list[Leaf], Padded | None] | None = None
    for grid in grids(leaves, None if padding is None else padding.dim):
        under = [leaf.under(grid) for leaf in leaves]
        found = padded(under, grid, padding)
        if found is not None and found.any:
            best = (grid, under, found)
            break
        if best is None and (found is not None or (padding is not None and any(_tokens(leaf) for leaf in under))):
            best = (grid, under, found)
    if best is None:
        return _unread(leaves, batch)
    grid, under, found = best
    parts = _parts(under, found, padding)
    why = _undecided(parts, grid, found, padding)
    return Roles(parts, grid.rows, grid.length, None if found is None else found.where, why)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta and tensor.numel() > 0


def _tokens(leaf: Leaf) -> bool:
    return leaf.time is not None and (leaf.whole or leaf.tensor.dim() > 2)


def _unread(leaves: Sequence[Leaf], batch: Any) -> Roles:
    """A batch whose positions cannot be told."""
    rows = nested.rows(batch)
    parts = []
    for leaf in leaves:
        row = 0 if leaf.tensor.dim() and len(leaf.tensor) == rows else None
        role: Role = "other"
        if row is not None:
            role = "labels" if is_label(leaf, None) else "features" if leaf.tensor.is_floating_point() else "other"
        parts.append(Part(leaf.path, role, row, None, None, None, leaf.tensor))
    why = (
        f"what is padding cannot be told from {nested.describe(batch)}: no mask and no lengths say where rows end; "
        "pass padding=Padding(pad_id=, ignore_index=, dim=)"
    )
    return Roles(tuple(parts), rows, None, None, why)


def _parts(leaves: Sequence[Leaf], found: Padded | None, padding: Padding | None) -> tuple[Part, ...]:
    parts: list[Part] = []
    for leaf in leaves:
        has_ids = any(part.role == "ids" for part in parts)
        role = _role(leaf, found, padding, has_ids)
        fill = real = None
        if leaf.time is not None:
            fill = _fill(leaf, role, found, padding)
            real = _real(leaf, fill) if role == "mask" else None
        parts.append(Part(leaf.path, role, leaf.row, leaf.time, fill, real, leaf.tensor))
    return tuple(parts)


def _role(leaf: Leaf, found: Padded | None, padding: Padding | None, has_ids: bool) -> Role:
    says = found is not None and id(leaf.tensor) in found.by
    if leaf.row is None:
        return "other"
    if leaf.time is None:
        if says:
            return "lengths"
        return "labels" if is_label(leaf, padding) else "features" if leaf.tensor.is_floating_point() else "other"
    if says or ("mask" in leaf.name and leaf.tensor.dim() == 2 and two_valued(leaf)):
        return "mask"
    if not leaf.whole:
        return "features" if leaf.tensor.is_floating_point() else "other"
    if is_label(leaf, padding):
        return "labels"
    if any(name in leaf.name for name in _ELSEWHERE) or _counts_up(leaf):
        return "other"
    named = leaf.name.endswith("ids") or "input" in leaf.name or "token" in leaf.name
    return "ids" if named or not has_ids else "labels"


def _counts_up(leaf: Leaf) -> bool:
    """Whether all rows are 0, 1, 2, ...: positions."""
    cells = leaf.cells
    return cells.dim() == 2 and cells.shape[1] > 1 and bool((cells == torch.arange(cells.shape[1])).all())


def _fill(leaf: Leaf, role: Role, found: Padded | None, padding: Padding | None) -> float | None:
    """What stands at padded positions, or would."""
    cells = leaf.cells
    if found is not None and found.any:
        seen = constant(cells[found.where])
        if seen is not None or (role == "features" and cells.dim() == 2):
            return seen
    elif role == "mask":
        same = constant(cells)
        if same is None:
            return float("-inf") if additive(leaf) else 0.0
        return None if leaf.tensor.is_floating_point() and same == 0 else 1 - same
    by_role = {} if padding is None else {"ids": padding.pad_id, "labels": padding.ignore_index}
    declared = by_role.get(role)
    if declared is not None:
        return float(declared)
    if role == "labels" and (ignored := constant(cells[cells < 0])) is not None:
        return ignored
    if role == "features" or (role == "other" and _counts_up(leaf)):
        return 0.0
    return constant(cells) if role == "other" else None


def _real(leaf: Leaf, fill: float | None) -> float | None:
    """What a mask has at real positions: its other value."""
    values = leaf.tensor.detach()
    others = values[values != fill] if fill is not None else values
    known = constant(others)
    return known if known is not None else None if fill is None else 1.0 - fill if abs(fill) <= 1 else 0.0


def _undecided(parts: Sequence[Part], grid: Grid, found: Padded | None, padding: Padding | None) -> str:
    declare = "pass padding=Padding(pad_id=, ignore_index=, dim=)"
    if found is None and padding is not None and padding.pad_id is not None:
        return (
            f"the declared pad_id {padding.pad_id} stands between real tokens of the batch, or nowhere else: "
            "give a mask or lengths beside the ids"
        )
    if found is None:
        return f"no mask and no lengths say which of the {grid.length} positions are padding: {declare}"
    for part in parts:
        shape = tuple(part.tensor.shape)
        if part.time is not None and (part.fill is None or (part.role == "mask" and part.real is None)):
            how = {"ids": "pass padding=Padding(pad_id=)", "labels": "pass padding=Padding(ignore_index=)"}
            needed = how.get(part.role, "give a batch in which some row is padded, with one value there")
            return f"what stands at padded positions of {part.name} cannot be told: {needed}"
        if part.time is None and _may_have_positions(part, grid):
            return (
                f"{part.name} of shape {shape} has {grid.length} or so entries along an axis that may be the positions "
                f"of rows of {grid.length}: leave it out of the batch, or {declare}"
            )
    return ""


def _may_have_positions(part: Part, grid: Grid) -> bool:
    """Whether a tensor without rows and positions may still have to grow with them: a mask or positions for all rows,
    a mask of pairs of positions, ids with one position more or less."""
    tensor, length = part.tensor, grid.length
    leaf = Leaf(part.path, tensor, part.row, part.time)
    if tensor.shape[-2:] == (length, length) or (length in tensor.shape[1:] and tensor.dim() > 2 and two_valued(leaf)):
        return True
    if tensor.dim() == 1:
        return part.row is None and len(tensor) == length and (two_valued(leaf) or bool((tensor.diff() == 1).all()))
    near = tensor.dim() == 2 and tensor.shape[0] == grid.rows and abs(tensor.shape[1] - length) == 1
    return near and (leaf.whole or two_valued(leaf))
