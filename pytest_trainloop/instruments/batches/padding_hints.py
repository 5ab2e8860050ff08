"""What in a batch may say which entries are padding; ``padding.py`` decides which of it is proven."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.values import (
    additive,
    at_one_end,
    binary,
    constant,
    in_part,
    left_out,
    plain,
    trailing,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pytest_trainloop.declare.loop import Padding
    from pytest_trainloop.instruments.batches.grids import Grid, Leaf

Source = Literal["mask", "lengths", "id", "repeated"]

_LABELS = ("label", "target", "tags", "y")


class Ids(NamedTuple):
    """Ids (rows, positions) that an embedding looked up, and its ``padding_idx``."""

    ids: torch.Tensor
    padding_idx: int | None = None


@dataclass(frozen=True, slots=True)
class Hint:
    """``mask``: the positions (rows, positions), on the CPU, that ``leaf`` says are padding. ``said``: it says so by
    its name, or the project has declared it. ``reason``: the same in words."""

    source: Source
    mask: torch.Tensor
    leaf: Leaf
    said: bool
    reason: str


@dataclass(frozen=True, slots=True)
class View:
    """The tensors of a batch under one reading of its axes.

    ``inputs``: what the model is known to be given, with the padding_idx that goes with it. ``pad_ids`` are those of
    embeddings of which it is not known what they look up. ``labels``: padding of labels alone is asked for, too.
    ``read``: the shapes of what the model computes with, where they are known.
    """

    grid: Grid
    leaves: list[Leaf]
    declared: Padding | None = None
    pad_ids: Sequence[int] = ()
    inputs: list[tuple[Leaf, int | None]] = field(default_factory=list)
    labels: bool = False
    read: Collection[tuple[int, ...]] | None = None

    @property
    def aligned(self) -> list[Leaf]:
        """The tensors with rows and positions."""
        return [leaf for leaf in (*(leaf for leaf, _ in self.inputs), *self.leaves) if leaf.time is not None]

    def may_be_read(self, leaf: Leaf) -> bool:
        """Whether the model may be given this tensor."""
        return bool(self.inputs) or self.read is None or tuple(leaf.tensor.shape) in self.read

    @property
    def pad_id(self) -> int | None:
        return None if self.declared is None else self.declared.pad_id

    def tokens(self) -> list[tuple[Leaf, Sequence[int]]]:
        """Tensors of ids, those that may be labels last, with the ids that are padding in them."""
        found: list[tuple[Leaf, Sequence[int]]]
        found = [(leaf, [] if pad is None else [pad]) for leaf, pad in self.inputs]
        if not self.inputs:
            flat = [leaf for leaf in self.aligned if leaf.tensor.dim() == 2 and leaf.whole and not leaf.two_valued]
            flat.sort(key=lambda leaf: is_label(leaf, self.declared))
            found = [(leaf, self.pad_ids) for leaf in flat]
        return found if self.pad_id is None else [(leaf, [self.pad_id]) for leaf, _ in found]


def is_label(leaf: Leaf, padding: Padding | None) -> bool:
    """Whether whole numbers are labels: by their name, or since some are negative or ignored, as no id is."""
    if not leaf.whole or "len" in leaf.name:
        return False
    if any(leaf.name == n or (len(n) > 1 and n in leaf.name) for n in _LABELS):
        return True
    ignored = None if padding is None else padding.ignore_index
    values = leaf.tensor.detach()
    return bool((values < 0).any()) or (
        ignored is not None and ignored != (padding and padding.pad_id) and bool((values == ignored).any())
    )


def hints(view: View) -> Iterator[Hint]:
    """What says that positions are padding, in this order: masks, lengths, ids; then what says that none is."""
    for found in (_masks(view), _lengths(view), _pad_ids(view), _pad_features(view), _without_padding(view)):
        yield from found


def _masks(view: View) -> Iterator[Hint]:
    """Masks of two values, true or false at one end of the rows. Usually 0 is padding; in a mask that is named after
    the padding 1, and in one that is added to scores what is not 0."""
    for leaf in view.leaves:
        if leaf.time is None or leaf.tensor.dim() != 2 or not leaf.two_valued:
            continue
        cells = leaf.cells.cpu()
        usual = ~left_out(cells) if "pad" in leaf.name and not additive(cells) else left_out(cells)
        named = "attention" in leaf.name or "pad" in leaf.name
        for mask in (usual,) if additive(cells) else (usual, ~usual):
            if at_one_end(mask):
                value = cells[mask][0].item()
                yield Hint("mask", mask, leaf, named and mask is usual, f"{nested.shown(leaf.path)} is {value} there")


def _lengths(view: View) -> Iterator[Hint]:
    """Whole numbers, one for each row, up to the number of positions or one more (of a text that the model is given
    without its last token)."""
    length = view.grid.length
    for leaf, values in _counts_of_rows(view):
        if int(values.max()) <= length + 1 and int(values.min()) < length:
            mask = torch.arange(length)[None] >= values[:, None]
            if not bool(mask.all()):
                yield Hint("lengths", mask, leaf, False, f"they lie beyond {nested.shown(leaf.path)}")


def _counts_of_rows(view: View) -> Iterator[tuple[Leaf, torch.Tensor]]:
    for leaf in view.leaves:
        if leaf.whole and leaf.tensor.shape == (view.grid.rows,):
            values = leaf.tensor.detach().cpu()
            if bool((values >= (0 if "len" in leaf.name else 1)).all()):  # classes begin with 0
                yield leaf, values


def _pad_ids(view: View) -> Iterator[Hint]:
    for number, (leaf, pads) in enumerate(view.tokens()):
        for pad in pads:
            mask = leaf.cells.cpu() == pad
            # a single entry of any other tensor may be a label or an id of another table
            if at_one_end(mask) and (number == 0 or int(mask.sum()) > 1):
                declared = view.pad_id is not None
                what = "declared pad_id" if declared else "padding id"
                said = declared and number == 0 and not is_label(leaf, view.declared)
                yield Hint("id", mask, leaf, said, f"the {what} {pad} is there")


def _pad_features(view: View) -> Iterator[Hint]:
    """Features that are all the declared id, 0 as a rule, at one end of the rows: frames."""
    if view.pad_id is None:
        return
    for leaf in view.aligned:
        if leaf.tensor.is_floating_point() and leaf.cells.dim() == 3 and not leaf.two_valued:
            mask = (leaf.cells == view.pad_id).all(2).cpu()
            if at_one_end(mask):
                yield Hint("id", mask, leaf, False, f"all features are the declared pad_id {view.pad_id} there")


def _without_padding(view: View) -> Iterator[Hint]:
    """What says that nothing is padding: a declared id that is not there, masks of one value, lengths that are full."""
    nothing = torch.zeros(view.grid.rows, view.grid.length, dtype=torch.bool)
    if view.pad_id is not None and (found := view.tokens()):
        leaf = found[0][0]
        if not is_label(leaf, view.declared) and not bool((leaf.tensor == view.pad_id).any()):
            yield Hint("id", nothing, leaf, True, f"the declared pad_id {view.pad_id} does not occur")
    for leaf in view.leaves:
        if leaf.time is not None and leaf.tensor.dim() == 2 and leaf.two_valued:
            named = "mask" in leaf.name or leaf.tensor.dtype is torch.bool
            value = constant(leaf.cells)
            if named and value is not None:
                yield Hint("mask", nothing, leaf, True, f"{nested.shown(leaf.path)} is {value:g} everywhere")
    for leaf, values in _counts_of_rows(view):
        if bool((values == view.grid.length).all()) and (view.grid.rows > 1 or "len" in leaf.name):
            yield Hint("lengths", nothing, leaf, True, f"all {nested.shown(leaf.path)} are {view.grid.length}")


def repeated(view: View) -> Iterator[Hint]:
    """One value at the ends of rows, twice or more in some rows, in different numbers, and nowhere else."""
    for leaf in view.aligned:
        if leaf.tensor.dim() != 2 or leaf.tensor.is_floating_point() or leaf.tensor.is_complex():
            continue
        cells = leaf.cells.cpu()
        for value in torch.unique(cells[:, -1]).tolist():
            mask = cells == value
            count = mask.sum(1)
            if trailing(mask) and int(count.max()) > 1 and int(count.min()) < int(count.max()) and in_part(mask):
                reason = f"{value} is at the ends of rows of {nested.shown(leaf.path)}, and nowhere else"
                yield Hint("repeated", mask, leaf, False, reason)


def counted_entries(batch: Any, rows: int, batch_dim: int, ignored: Sequence[int]) -> Iterator[torch.Tensor]:
    """Which entries (rows, entries) may count, by one tensor after another with rows along ``batch_dim``: of whole
    numbers those that are not ``ignored``, of numbers those that are not NaN, then those that a mask leaves in.

    The weakest proof of all (``Proof.HINT``): a mask may be of anything, and an entry that is ignored a prompt. It is
    for those who measure afterwards whether it is right.
    """
    found = [t for t in nested.tensors(batch) if plain(t) and t.dim() > max(1, batch_dim) and batch_dim >= 0]
    found = [t for t in found if t.shape[batch_dim] == rows]
    counted = [t != v for v in ignored for t in found if whole(t) or t.dtype is torch.bool if bool((t == v).any())]
    counted += [~t.isnan() for t in found if bool(t.isnan().any())]
    counted += [~left_out(t) for t in found if binary(t) or additive(t)]
    for mask in counted:
        yield mask.movedim(batch_dim, 0).flatten(1)
