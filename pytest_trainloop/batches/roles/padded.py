"""Which positions of a batch are padding.

Nothing is guessed from names alone but a mask without any padding: a mask, or lengths, say where rows end if one and
the same value stands beyond, in a tensor that has several values before; or the id of the padding is declared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.batches.roles.grids import Grid, Leaf
    from pytest_trainloop.loop import Padding

FAR = -1e4
"""What is added to scores at padded positions is at most this: the largest that half precision masks are made with."""

_LABELS = ("label", "target", "tags", "y")


@dataclass(frozen=True, slots=True)
class Padded:
    """``where``: (rows, positions), true for padding. ``by``: the paths of masks and lengths that say so."""

    where: torch.Tensor
    by: frozenset[int]

    @property
    def any(self) -> bool:
        return bool(self.where.any())


def padded(leaves: Sequence[Leaf], grid: Grid, padding: Padding | None) -> Padded | None:
    """What is padding under this reading of the axes, None where nothing tells."""
    ways = [*_masks(leaves, grid), *_lengths(leaves, grid)]
    tellers = [where for where, leaf, sure in ways if sure or _stands_beyond(where, leaves, leaf)]
    known = next((w for w in tellers if bool(w.any())), None)
    if known is None:
        known = _declared(leaves, padding)
    if known is None:
        known = next(iter(tellers), None)
    if known is None:
        return None
    return Padded(known, frozenset(id(leaf.tensor) for where, leaf, _ in ways if torch.equal(where, known)))


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


def two_valued(leaf: Leaf) -> bool:
    """Whether a tensor has only values of a mask: 0 and 1, or 0 and what hides a score."""
    values = leaf.tensor.detach()
    if values.dtype is torch.bool:
        return True
    if values.is_complex() or values.numel() == 0:
        return False
    return bool(((values == 0) | (values == 1)).all()) or additive(leaf)


def additive(leaf: Leaf) -> bool:
    """Whether a tensor is added to scores: 0, and one number far below it or -inf."""
    values = leaf.tensor.detach()
    if not values.is_floating_point() or values.numel() == 0:
        return False
    low = values.min()
    return float(low) <= FAR and bool(((values == 0) | (values == low)).all())


def _masks(leaves: Sequence[Leaf], grid: Grid) -> Iterator[tuple[torch.Tensor, Leaf, bool]]:
    """What may say where rows end, the likelier meaning first, and whether no more proof is needed."""
    for leaf in leaves:
        if leaf.time is None or leaf.tensor.dim() != 2 or not two_valued(leaf):
            continue
        cells = leaf.cells
        named = "mask" in leaf.name or leaf.tensor.dtype is torch.bool
        if bool((cells == cells[0, 0]).all()):
            if named:
                yield torch.zeros(grid.rows, grid.length, dtype=torch.bool), leaf, True
            continue
        sure = "attention" in leaf.name or "pad" in leaf.name
        ends = (True,) if additive(leaf) else (True, False) if "pad" in leaf.name else (False, True)
        for end in ends:
            found = runs(cells.bool() == end)
            if found is not None:
                yield found, leaf, sure and end == ends[0]


def _lengths(leaves: Sequence[Leaf], grid: Grid) -> Iterator[tuple[torch.Tensor, Leaf, bool]]:
    for leaf in leaves:
        if not leaf.whole or leaf.tensor.shape != (grid.rows,):
            continue
        values = leaf.tensor.detach().cpu()
        least = 0 if "len" in leaf.name else 1  # classes begin with 0
        if bool((values >= least).all()) and int(values.max()) <= grid.length:
            full = bool((values == grid.length).all())
            if full and grid.rows == 1 and "len" not in leaf.name:
                continue
            yield torch.arange(grid.length)[None] >= values[:, None], leaf, full


def _stands_beyond(where: torch.Tensor, leaves: Sequence[Leaf], teller: Leaf) -> bool:
    """Whether one value stands at all padded positions of some tensor that has several elsewhere, and of every tensor
    of ids."""
    proven = False
    for leaf in leaves:
        if leaf is teller or leaf.time is None or two_valued(leaf):
            continue
        cells = leaf.cells
        alone = constant(cells[where]) is not None
        label = is_label(leaf, None)
        if leaf.whole and not label and not alone:
            return False
        proven = proven or (alone and not label and constant(cells[~where]) is None)
    return proven


def _declared(leaves: Sequence[Leaf], padding: Padding | None) -> torch.Tensor | None:
    """Where the declared id stands in the first tensor of ids."""
    if padding is None or padding.pad_id is None:
        return None
    for leaf in leaves:
        if leaf.time is not None and leaf.tensor.dim() == 2 and leaf.whole and not is_label(leaf, padding):
            where = leaf.cells == padding.pad_id
            return where if not bool(where.any()) else runs(where)
    return None


def constant(values: torch.Tensor) -> float | None:
    """The one value of a tensor, None where it has several or none. Not-a-number equals itself."""
    if values.numel() == 0:
        return None
    first = values.flatten()[0]
    same = values.isnan() if values.is_floating_point() and math.isnan(float(first)) else values == first
    return float(first) if bool(same.all()) else None


def runs(mask: torch.Tensor) -> torch.Tensor | None:
    """The mask, if it is true only for runs at the ends or the beginnings of rows, and nowhere for a whole batch."""
    if not bool(mask.any()) or bool(mask.all()):
        return None
    trailing = mask.long().flip(1).cummin(1).values.flip(1).bool()
    leading = mask.long().cummin(1).values.bool()
    return mask if torch.equal(trailing, mask) or torch.equal(leading, mask) else None
