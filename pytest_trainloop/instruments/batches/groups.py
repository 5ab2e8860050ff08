"""Which tensors of a batch are padded together: source and target, chosen and rejected, two sentences.

What says where padding is (a mask, lengths, a pad id) is a *teller*; tellers of equal regions are one. A tensor
belongs to the teller over whose region it holds one value, and several before; of nested regions that fit, to the
larger one, since a longer padding holds one value over a shorter one's region too. Equal width is no tie: two sequences
may have one length by chance. A tensor of one value goes to the only group of its width, else to none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.grids import Leaf, fixed_grids, leaves
from pytest_trainloop.instruments.batches.padding import PaddingMask, Proof, empty
from pytest_trainloop.instruments.batches.padding_hints import View, hints, is_label
from pytest_trainloop.instruments.batches.values import constant, in_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.declare.loop import Padding
    from pytest_trainloop.instruments.batches.grids import Grid
    from pytest_trainloop.instruments.batches.padding_hints import Hint


def padded_groups(
    batch: Any, *, batch_dim: int = 0, declared: Padding | None = None, pad_ids: Sequence[int] = ()
) -> list[PaddingMask]:
    """The padding of each group of tensors that is padded as one, those that a mask or lengths prove first.

    ``pad_ids``: those of the model's embeddings. Raises ``CannotDecide`` where a tensor fits two regions of which
    neither holds the other.
    """
    tensors = leaves(batch) if batch_dim >= 0 else []
    tensors += _lists_of_lengths(batch, nested.rows(batch, batch_dim)) if tensors else []
    paddings = [None] if declared is None else declared.all
    rows = nested.rows(batch, batch_dim) if tensors else 0
    dims = dict.fromkeys(None if p is None else p.dim for p in paddings)
    found: list[PaddingMask] = []
    for grid in dict.fromkeys(g for dim in dims for g in fixed_grids(tensors, batch_dim, rows, dim)):
        under = [leaf.under(grid) for leaf in tensors]
        given = [p for p in paddings if p is not None and p.of]
        for padding in given:
            found += _declared(under, grid, padding, pad_ids)
        if not given:
            found += _inferred(under, grid, paddings, pad_ids)
    return _each_once(sorted(found, key=lambda one: one.source == "id"))


def _lists_of_lengths(batch: Any, rows: int) -> list[Leaf]:
    """Lists of whole numbers, one for each row, as tensors."""
    listed = {id(value) for value in nested.lists_of_rows(batch, rows)} if rows > 1 else set()
    return [
        Leaf((key,), torch.tensor(list(value)))
        for key, value in nested.named_children(batch)
        if id(value) in listed and all(type(number) is int for number in value)
    ]


def together(groups: Sequence[PaddingMask]) -> PaddingMask | None:
    """Groups of one width as one: the positions that are padding in all of them, at which all can be cut at once, as
    where they are concatenated. None where there are no such positions, or not on one side."""
    mask = torch.stack([g.mask for g in groups]).all(0)
    if len({g.side for g in groups}) > 1 or not in_part(mask):
        return None
    of, by = (frozenset().union(*found) for found in ([g.of for g in groups], [g.by for g in groups]))
    reason = " and ".join(dict.fromkeys(g.reason for g in groups))
    others = frozenset().union(*(g.others for g in groups)) - of
    return replace(groups[0], mask=mask, of=of, by=by, others=others, reason=reason, name="", alone=True, joint=True)


def in_step(group: PaddingMask, others: Sequence[PaddingMask]) -> PaddingMask | None:
    """A group and others of near widths as one: as many positions at the end of each row as are padding in all of them.
    None where there are no others, or no such positions in all rows or none."""
    if not others or any(other.side != group.side for other in others):
        return None
    padded = torch.stack([g.mask.sum(1) for g in (group, *others)]).amin(0)
    mask = torch.arange(group.grid.length) >= group.grid.length - padded[:, None]
    mask = mask if group.side == "right" else mask.flip(1)
    return replace(group, mask=mask, joint=True) if in_part(mask) else None


def _inferred(
    under: list[Leaf], grid: Grid, paddings: Sequence[Padding | None], pad_ids: Sequence[int]
) -> list[PaddingMask]:
    """The groups of one width; none where some tensor with values of its own belongs to none of them."""
    said = [h for p in paddings for h in hints(View(grid, under, p, pad_ids, labels=True)) if _tells(h)]
    regions = _regions(said)
    aligned = [leaf for leaf in under if leaf.time is not None]
    blank = [leaf for leaf in aligned if constant(leaf.cells) is not None]
    fits = {id(leaf): [n for n, r in enumerate(regions) if empty(leaf, r)] for leaf in aligned if leaf not in blank}
    if not all(fits.values()):
        return []
    values = [leaf for leaf in aligned if id(leaf) in fits and not leaf.two_valued]
    certain = {ns[0] for leaf in values if len(ns := fits[id(leaf)]) == 1}
    members: dict[int, list[Leaf]] = {}
    for leaf in values:
        members.setdefault(_largest(leaf, fits[id(leaf)], certain, regions), []).append(leaf)
    tellers = {n: [h for h in said if torch.equal(h.mask, regions[n])] for n in members}
    for leaf in (leaf for leaf in aligned if id(leaf) in fits and leaf.two_valued):
        known = [n for n in fits[id(leaf)] if n in members]
        own = [n for n in known if any(h.leaf is leaf for h in tellers[n])]
        if known:
            members[(own or sorted(known, key=lambda n: -int(regions[n].sum())))[0]].append(leaf)
    if len(members) == 1:
        next(iter(members.values())).extend(blank)
    return [_group(tellers[n], own, grid, alone=len(members) == 1) for n, own in members.items()]


def _regions(said: Sequence[Hint]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for hint in said:
        if not any(torch.equal(hint.mask, known) for known in found):
            found.append(hint.mask)
    return found


def _tells(hint: Hint) -> bool:
    """Whether a region may be the padding of some tensors: in a part of each row, and not as much in all of them."""
    if not in_part(hint.mask):
        return False
    counts = hint.mask.sum(1)
    return hint.source == "id" or (int(counts.min()) < int(counts.max()) and int(counts.sum()) > 1)


def _largest(leaf: Leaf, fits: list[int], certain: set[int], regions: list[torch.Tensor]) -> int:
    """Of nested regions the larger; of others the one that some other tensor fits alone, as labels that are ignored in
    the prompt and in the padding belong with the ids."""
    best = max(fits, key=lambda n: int(regions[n].sum()))
    if all(not bool((regions[n] & ~regions[best]).any()) for n in fits):
        return best
    sure = [n for n in fits if n in certain]
    if len(sure) == 1:
        return sure[0]
    raise CannotDecide(
        f"{nested.shown(leaf.path)} holds one value over two padded regions, of which neither holds the other: say "
        "which tensors are padded together, as in padding=[Padding(of=(...)), Padding(of=(...))]",
        needs="padding=[Padding(of=...), ...]",
    )


def _group(tellers: list[Hint], own: list[Leaf], grid: Grid, *, alone: bool) -> PaddingMask:
    first = tellers[0]
    values = [leaf for leaf in own if not leaf.two_valued]
    ids = any(leaf.whole and leaf.tensor.dim() == 2 and not is_label(leaf, None) for leaf in values)
    of_ids = ids and not any(leaf.tensor.dim() > 2 for leaf in values)
    by = frozenset(hint.leaf.path for hint in tellers if hint.source != "id")
    of = frozenset(leaf.path for leaf in own)
    name = "" if alone else nested.shown(next((leaf.path for leaf in own if not leaf.two_valued), own[0].path))
    return PaddingMask(
        first.mask, grid, first.source, Proof.EMPTY, by, of_ids, first.reason, of=of, name=name, alone=alone
    )


def _declared(under: list[Leaf], grid: Grid, padding: Padding, pad_ids: Sequence[int]) -> list[PaddingMask]:
    """The group that ``Padding(of=)`` names, by what says in it where padding is."""
    own = [leaf for leaf in under if leaf.time is not None and nested.is_named(leaf.path, padding.of or ())]
    features = [leaf for leaf in under if leaf.time is None and nested.is_named(leaf.path, padding.of or ())]
    if not own:
        return []
    said = [h for h in hints(View(grid, [*own, *features], padding, pad_ids, labels=True)) if in_part(h.mask)]
    said = said or [h for h in _lengths_next_to(under, own, grid, padding) if all(empty(leaf, h.mask) for leaf in own)]
    if not said:
        return []
    same = [h for h in said if torch.equal(h.mask, said[0].mask)]
    return [_group(same, own, grid, alone=False)]


def _lengths_next_to(under: list[Leaf], own: list[Leaf], grid: Grid, padding: Padding) -> Iterator[Hint]:
    """What masks and lengths that the declaration does not name say, for tensors that no id pads."""
    for hint in hints(View(grid, under, padding, labels=True)):
        if hint.source in ("mask", "lengths") and hint.leaf not in own and _tells(hint):
            yield hint


def _each_once(groups: list[PaddingMask]) -> list[PaddingMask]:
    """Each text once: its shifted targets are one position shorter or longer, and padded by as much or one more."""
    found: list[PaddingMask] = []
    for one in groups:
        same = next((n for n, known in enumerate(found) if _is_shifted(one, known)), None)
        if same is None:
            found.append(one)
        else:
            found[same] = replace(found[same], of=found[same].of | one.of)
    return [
        replace(one, others=frozenset(path for other in found if other is not one for path in other.of))
        for one in found
    ]


def _is_shifted(one: PaddingMask, known: PaddingMask) -> bool:
    if abs(one.grid.length - known.grid.length) != 1 or one.side != known.side:
        return False
    shift = one.mask.sum(1) - known.mask.sum(1)
    some = known.mask.any(1) & one.mask.any(1)
    return bool(some.any()) and int(shift[some].min()) == int(shift[some].max()) and int(shift[some].abs().max()) <= 1
