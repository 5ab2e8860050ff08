"""What the tensors of a batch are: ids, masks, labels, lengths or features; their axes, and their value at padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.core.whose import present
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.grids import Grid, Leaf, leaves, open_grids
from pytest_trainloop.instruments.batches.padding import PaddingMask, Proof, read_padding
from pytest_trainloop.instruments.batches.padding_hints import is_label
from pytest_trainloop.instruments.batches.values import additive, constant, count_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_trainloop.declare.loop import Padding
    from pytest_trainloop.declare.nested import Path

Role = Literal["ids", "mask", "labels", "lengths", "features", "other"]

_ELSEWHERE = ("type", "segment", "position", "token_type_ids", "position_ids", "bbox", "word_ids")
"""Names of whole numbers for each position that are neither tokens nor labels."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a batch.

    ``row`` and ``time`` are the axes of rows and of positions, None where it has none. ``fill`` is its value at
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
    def axes(self) -> tuple[int, int]:
        """The axes of rows and of positions, of a tensor that has both."""
        return present(self.row, "the axis of rows"), present(self.time, "the axis of positions")

    @property
    def cells(self) -> torch.Tensor:
        """The tensor as (rows, positions, ...)."""
        return self.tensor.detach().movedim(self.axes, (0, 1))


@dataclass(frozen=True, slots=True)
class Roles:
    """``found``: which of the ``rows`` by ``length`` positions are padding; None where that is not proven.
    ``undecided``: why the batch cannot be padded in another way, and what to give; empty where it can."""

    parts: tuple[Part, ...]
    rows: int
    length: int | None
    found: PaddingMask | None = field(repr=False)
    undecided: str = ""

    @property
    def padded(self) -> torch.Tensor | None:
        """(rows, positions) on the CPU, true for padding."""
        return None if self.found is None else self.found.mask

    @property
    def lengths(self) -> tuple[int, ...]:
        """The real positions of each row; empty where padding is not proven."""
        return () if self.found is None else self.found.lengths

    @property
    def side(self) -> Literal["left", "right"]:
        """At which end of the rows padding is: on the right, also where there is none."""
        return "right" if self.found is None else self.found.side

    def of(self, *roles: Role) -> tuple[Part, ...]:
        """The parts with one of these roles."""
        return tuple(part for part in self.parts if part.role in roles)


def read(batch: Any, padding: Padding | None = None) -> Roles:
    """The role and the axes of each tensor of a batch; raises nothing: ``undecided`` says what is not known.

    Positions lie along ``padding.dim`` where padding is declared. Else the axes are those under which a mask or lengths
    say where padding is; where rows and positions could be either, rows come first.
    """
    found = read_padding(batch, at_least=Proof.SAID, declared=padding)
    tensors = leaves(batch)
    grid = _with_tokens(tensors, padding) if found is None else found.grid
    if grid is None:
        return _unread(tensors, batch)
    parts = _parts([leaf.under(grid) for leaf in tensors], found, padding)
    return Roles(parts, grid.rows, grid.length, found, _undecided(parts, grid, found, padding))


def _with_tokens(tensors: Sequence[Leaf], padding: Padding | None) -> Grid | None:
    """The likeliest axes of a batch of which it is declared that it is padded."""
    if padding is None:
        return None
    return next((g for g in open_grids(tensors, padding.dim) if any(_tokens(leaf.under(g)) for leaf in tensors)), None)


def _tokens(leaf: Leaf) -> bool:
    return leaf.time is not None and (leaf.whole or leaf.tensor.dim() > 2)


def _unread(tensors: Sequence[Leaf], batch: Any) -> Roles:
    """A batch of which nothing says where its positions lie."""
    rows = nested.rows(batch)
    parts = []
    for leaf in tensors:
        row = 0 if leaf.tensor.dim() and len(leaf.tensor) == rows else None
        role: Role = "other"
        if row is not None:
            role = "labels" if is_label(leaf, None) else "features" if leaf.tensor.is_floating_point() else "other"
        parts.append(Part(leaf.path, role, row, None, None, None, leaf.tensor))
    why = (
        f"nothing says which positions are padding in {nested.describe(batch)}: no mask and no lengths say where rows "
        "end; pass padding=Padding(pad_id=, ignore_index=, dim=)"
    )
    return Roles(tuple(parts), rows, None, None, why)


def _parts(tensors: Sequence[Leaf], found: PaddingMask | None, padding: Padding | None) -> tuple[Part, ...]:
    parts: list[Part] = []
    for leaf in tensors:
        has_ids = any(part.role == "ids" for part in parts)
        role = _role(leaf, found, padding, has_ids)
        fill = real = None
        if leaf.time is not None:
            fill = _fill(leaf, role, found, padding)
            real = _real(leaf, fill) if role == "mask" else None
        parts.append(Part(leaf.path, role, leaf.row, leaf.time, fill, real, leaf.tensor))
    return tuple(parts)


def _role(leaf: Leaf, found: PaddingMask | None, padding: Padding | None, has_ids: bool) -> Role:
    says = found is not None and leaf.path in found.by
    if leaf.row is None:
        return "other"
    if leaf.time is None:
        if says:
            return "lengths"
        return "labels" if is_label(leaf, padding) else "features" if leaf.tensor.is_floating_point() else "other"
    if says or ("mask" in leaf.name and leaf.two_valued):
        return "mask" if leaf.tensor.dim() == 2 else "other"
    if not leaf.whole:
        return "features" if leaf.tensor.is_floating_point() else "other"
    if is_label(leaf, padding):
        return "labels"
    if any(name in leaf.name for name in _ELSEWHERE) or count_up(leaf.cells):
        return "other"
    named = leaf.name.endswith("ids") or "input" in leaf.name or "token" in leaf.name
    return "ids" if named or not has_ids else "labels"


def _fill(leaf: Leaf, role: Role, found: PaddingMask | None, padding: Padding | None) -> float | None:
    """The value at padded positions, also if there are none."""
    cells = leaf.cells
    if found is not None and found.any:
        seen = constant(leaf.at(found.mask))
        if seen is not None or (role == "features" and cells.dim() == 2):
            return seen
    elif "mask" in leaf.name and role == "other":
        return None
    elif role == "mask":
        same = constant(cells)
        if same is None:
            return float("-inf") if additive(leaf.tensor) else 0.0
        return None if leaf.tensor.is_floating_point() and same == 0 else 1 - same
    by_role = {} if padding is None else {"ids": padding.pad_id, "labels": padding.ignore_index}
    declared = by_role.get(role)
    if declared is not None:
        return float(declared)
    if role == "labels" and (ignored := constant(cells[cells < 0])) is not None:
        return ignored
    if role == "features" or (role == "other" and count_up(leaf.cells)):
        return 0.0
    return constant(cells) if role == "other" else None


def _real(leaf: Leaf, fill: float | None) -> float | None:
    """What a mask has at real positions: its other value."""
    values = leaf.tensor.detach()
    others = values[values != fill] if fill is not None else values
    known = constant(others)
    return known if known is not None else None if fill is None else 1.0 - fill if abs(fill) <= 1 else 0.0


def _undecided(parts: Sequence[Part], grid: Grid, found: PaddingMask | None, padding: Padding | None) -> str:
    declare = "pass padding=Padding(pad_id=, ignore_index=, dim=)"
    if found is None and padding is not None and padding.pad_id is not None:
        return (
            f"the declared pad_id {padding.pad_id} occurs between real tokens of the batch, or nowhere else: "
            "give a mask or lengths next to the ids"
        )
    if found is None:
        return f"no mask and no lengths say which of the {grid.length} positions are padding: {declare}"
    for part in parts:
        shape = tuple(part.tensor.shape)
        if part.time is not None and (part.fill is None or (part.role == "mask" and part.real is None)):
            how = {"ids": "pass padding=Padding(pad_id=)", "labels": "pass padding=Padding(ignore_index=)"}
            needed = how.get(part.role, "give a batch in which some row is padded, with one value there")
            return f"the value at padded positions of {part.name} is not known: {needed}"
        if part.role == "lengths" and found is not None and tuple(part.tensor.tolist()) != found.lengths:
            return f"{part.name} counts more positions than the {grid.length} that are there: leave it out of the batch"
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
    if tensor.shape[-2:] == (length, length) or (length in tensor.shape[1:] and tensor.dim() > 2 and leaf.two_valued):
        return True
    if tensor.dim() == 1:
        return part.row is None and len(tensor) == length and (leaf.two_valued or bool((tensor.diff() == 1).all()))
    near = tensor.dim() == 2 and tensor.shape[0] == grid.rows and abs(tensor.shape[1] - length) == 1
    return near and (leaf.whole or leaf.two_valued)
