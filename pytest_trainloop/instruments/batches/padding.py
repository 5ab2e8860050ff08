"""Which positions of a batch are padding, and what proves it.

Every check and every strategy asks here. A position is padding if something says so:

1. a mask of two values next to the tokens (bool, 0 and 1, or added to scores; either value may mark padding) that
   has one of them at one end of the rows only;
2. the lengths of the rows;
3. an id at one end of the rows only: the declared ``Padding(pad_id=)``, else an embedding's
   ``padding_idx``. It comes last, since the first one may end a text, and then a mask or lengths count it as real.

A mask may be of other things (segments, prompts, tokens to predict), whole numbers may be classes and an id a token.
So a hint needs proof by the values at these positions, from the strongest to the weakest:

``Proof.EMPTY``
    every tensor with rows and positions holds one value there, or positions that count up; and a mask or lengths leave
    rows of different lengths (as much in every row may be the first or the last token). For checks that cut all tensors
    of a batch there: padding_invariance, edge_batches.
``Proof.INPUTS``
    what the model is given holds one value there and others elsewhere; labels may hold anything. For loss_contract,
    where labels at padded positions are what is judged.
``Proof.SAID``
    nothing is compared: the name of a mask says so (attention, pad), or the declared id. For strategies, which are
    given the batch for this purpose and leave real tokens alone. Only this proves as well that *nothing* is padding:
    by a mask of one value, lengths that are all full, a declared id that does not occur.
``Proof.REPEATED``
    nothing says so, and one value is at the ends of rows of different lengths, and nowhere else. For
    batch_independence, which only needs to know that positions lie along this axis.
``Proof.HINT``
    one tensor leaves entries out, at any position: ignored targets, NaN, any mask (``counted_entries``). For
    accumulation_equivalence and edge_batches, which measure what it says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.grids import Grid, Leaf, fixed_grids, leaves, open_grids
from pytest_trainloop.instruments.batches.padding_hints import Ids, View, counted_entries, hints, is_label, repeated
from pytest_trainloop.instruments.batches.values import all_equal, constant, in_part, trailing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pytest_trainloop.declare.loop import Padding
    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.instruments.batches.padding_hints import Hint, Source

__all__ = ["Ids", "PaddingMask", "Proof", "counted_entries", "empty", "padding_ids", "read_padding", "read_paddings"]


class Proof(IntEnum):
    """How far it is proven that positions are padding; see the module's docstring."""

    HINT = 0
    REPEATED = 1
    SAID = 2
    INPUTS = 3
    EMPTY = 4


_ORDER: tuple[Source, ...] = ("mask", "lengths", "id", "repeated")


@dataclass(frozen=True, slots=True)
class PaddingMask:
    """Which positions of a batch are padding.

    ``mask``: (rows, positions) on the CPU, true at padding, which is at one end of the rows; all false where it is
    proven that nothing is padding. ``grid``: the axes of rows and positions. ``source``: what says so, and ``by`` the
    paths of all masks and lengths that say the same. ``of_ids``: what is padded are ids rather than features.
    ``reason``: one sentence for the user, as "attention_mask is 0 there".

    Of a group (``groups.py``): ``of``, the paths of the tensors that are padded so, and ``others``, those of other
    groups; ``alone``, no other group is as wide; ``name``, one of its tensors, where another is; ``joint``, several
    groups are cut at once.
    """

    mask: torch.Tensor
    grid: Grid
    source: Source
    proof: Proof
    by: frozenset[Path]
    of_ids: bool
    reason: str
    of: frozenset[Path] = frozenset()
    others: frozenset[Path] = frozenset()
    alone: bool = True
    name: str = ""
    joint: bool = False

    @property
    def any(self) -> bool:
        return bool(self.mask.any())

    @property
    def side(self) -> Literal["left", "right"]:
        """At which end of the rows padding is; on the right where there is none."""
        return "right" if trailing(self.mask) else "left"

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of real positions of each row."""
        return tuple(int(n) for n in (~self.mask).sum(1))


def read_padding(
    batch: Any,
    *,
    at_least: Proof,
    declared: Padding | None = None,
    shape: tuple[int, int] | None = None,
    inputs: Sequence[Ids] = (),
    read: Collection[tuple[int, ...]] | None = None,
) -> PaddingMask | None:
    """The padding of what a model is given; None where it is not proven as far as ``at_least``.

    ``shape``: the rows and positions that are asked for, in this order; a mask may have one position more, as of a text
    that the model is given without its last token. Without it the axes are those under which something is padded, also
    with rows along the second one. ``inputs``: the ids that embeddings looked up, if they are known. ``read``: the
    shapes of all that the model computes with, if they are known: what has another shape is none of its inputs.
    """
    found = leaves(batch)
    if shape is None:
        grids = open_grids(found, None if declared is None else declared.dim)
    else:
        grids = [Grid(*shape, fixed=True)]
        found = [_without_last(leaf, shape) for leaf in found]
    known = [(Leaf(("ids",), given.ids, 0, 1), given.padding_idx) for given in inputs]
    first: PaddingMask | None = None
    for grid in grids:
        one = _read(View(grid, [leaf.under(grid) for leaf in found], declared, inputs=known, read=read), at_least)
        if one is not None and one.any:
            return one
        first = first or one
    return first


def read_paddings(
    batch: Any,
    *,
    at_least: Proof,
    batch_dim: int = 0,
    declared: Padding | None = None,
    pad_ids: Sequence[int] = (),
) -> list[PaddingMask]:
    """The padding of all tensors with rows along ``batch_dim``, inputs or labels: one for each length to which
    something is padded, as source and target are, in the order of what says so.

    ``pad_ids``: those of the model's embeddings (``padding_ids``). Lengths that differ by one are those of a text and
    its shifted targets; only the first is read.
    """
    tensors = leaves(batch) if batch_dim >= 0 else []
    grids = fixed_grids(tensors, batch_dim, nested.rows(batch, batch_dim), None if declared is None else declared.dim)
    views = (View(grid, [leaf.under(grid) for leaf in tensors], declared, pad_ids, labels=True) for grid in grids)
    read = [one for view in views if (one := _read(view, at_least)) is not None and one.any]
    found: list[PaddingMask] = []
    for one in sorted(read, key=lambda one: _ORDER.index(one.source)):
        if all(abs(one.grid.length - known.grid.length) > 1 for known in found):
            found.append(one)
    return found


def padding_ids(modules: Iterable[nn.Module]) -> list[int]:
    """The ``padding_idx`` of all embeddings in these modules."""
    tables = [
        m for module in modules for m in members.modules(module) if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
    ]
    return list(dict.fromkeys(m.padding_idx for m in tables if m.padding_idx is not None))


def _without_last(leaf: Leaf, shape: tuple[int, int]) -> Leaf:
    longer = leaf.tensor.shape == (shape[0], shape[1] + 1) and leaf.two_valued
    return replace(leaf, tensor=leaf.tensor[:, :-1]) if longer else leaf


def _read(view: View, at_least: Proof) -> PaddingMask | None:
    for hint in hints(view):
        proof = _proof(hint, view)
        if proof is not None and proof >= at_least:
            return _padding_mask(hint, proof, view)
    found = next(repeated(view), None) if at_least <= Proof.REPEATED else None
    return None if found is None else _padding_mask(found, Proof.REPEATED, view)


def _padding_mask(hint: Hint, proof: Proof, view: View) -> PaddingMask:
    same = [h for h in hints(view) if h.source != "id" and torch.equal(h.mask, hint.mask)]
    features = any(
        leaf.tensor.dim() > 2 or leaf.tensor.is_floating_point() for leaf in view.aligned if not leaf.two_valued
    )
    by = frozenset(h.leaf.path for h in same)
    return PaddingMask(hint.mask, view.grid, hint.source, proof, by, not features, hint.reason)


def _proof(hint: Hint, view: View) -> Proof | None:
    """How strongly the values at the hinted positions confirm that they are padding."""
    said = Proof.SAID if hint.said else None
    if not bool(hint.mask.any()):
        return said
    lengths = (~hint.mask).sum(1)
    uneven = int(lengths.min()) < int(lengths.max())
    if not in_part(hint.mask):
        return said  # whole rows, as the first position of a time-first batch that is read with its axes swapped
    if (hint.source == "id" or (uneven and int(hint.mask.sum()) > 1)) and _all_empty(hint, view):
        return Proof.EMPTY
    may_be_a_token = hint.source == "mask" and not uneven and view.grid.rows > 1 and not hint.said
    return Proof.INPUTS if not may_be_a_token and _inputs_empty(hint, view) else said


def _all_empty(hint: Hint, view: View) -> bool:
    """Whether all tensors with rows and positions hold nothing there, and not only masks, or labels, have them."""
    aligned = view.aligned
    if not all(empty(leaf, hint.mask) for leaf in aligned):
        return False
    aside = (leaf.two_valued or (not view.labels and is_label(leaf, view.declared)) for leaf in aligned)
    return not all(one or not view.may_be_read(leaf) for one, leaf in zip(aside, aligned, strict=True))


def _inputs_empty(hint: Hint, view: View) -> bool:
    """Whether all ids hold one value there, or positions, and something that the model is given holds one value there
    and others elsewhere."""
    proven = False
    for leaf in [leaf for leaf, _ in view.inputs] or view.aligned:
        if not view.inputs and (leaf.two_valued or is_label(leaf, view.declared)):
            continue
        if leaf.whole and not empty(leaf, hint.mask):
            return False
        if not view.may_be_read(leaf):
            continue
        one_value = constant(leaf.at(hint.mask)) is not None
        proven = proven or (one_value and constant(leaf.at(~hint.mask)) is None)
    return proven


def empty(leaf: Leaf, mask: torch.Tensor) -> bool:
    """Whether the cells are constant, or are position ids: equal in every row, or capped at the row length."""
    values = leaf.at(mask)
    if all_equal(values):
        return True
    cells = leaf.cells
    if cells.is_floating_point() or cells.dim() != 2:
        return False
    if bool((cells.diff(dim=1) == 1).all()) and all_equal(cells):
        return True
    lengths = (~mask).sum(1, keepdim=True).expand(mask.shape)[mask].to(values.device)
    return bool((values == lengths - 1).all()) or bool((values == lengths).all())
