"""The tensors of one batch and their roles: what is declared, and what leaves places out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.grids import Leaf
from pytest_trainloop.instruments.batches.padding_hints import is_label
from pytest_trainloop.instruments.batches.values import (
    additive,
    constant,
    in_part,
    left_out,
    plain,
    trailing,
    two_valued,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.declare.nested import Path

EVENTS = re.compile(r"done|terminat|truncat|reset|first|last|next", re.IGNORECASE)
"""Names of flags of single steps: the places behind them count."""
PADS = re.compile(r"pad|ignore", re.IGNORECASE)

NEEDED = {
    "mask": "a mask of two values (0 and 1, True and False, 0 and -inf) is",
    "padding_mask": "a mask of two values (0 and 1, True and False) is",
    "lengths": "whole numbers, one for each row, are",
    "weights": "a number for each row, or for each position of each row, is",
    "segments": "whole numbers for each entry, or borders, are",
    "graph": "edges as whole numbers of shape (2, edges), or an adjacency (nodes, nodes), are",
}


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """Places where nothing counts. ``cells``: true there, by rows and positions. ``known``: what says so.
    ``pad``: the declared id at these places, where this is the promise. ``region``: all that the teller leaves out.
    """

    teller: str
    cells: torch.Tensor
    region: torch.Tensor
    known: str
    pad: int | None = None
    contents: tuple[Path, ...] = ()
    also: tuple[str, ...] = ()
    """Further tensors that say the same."""


@dataclass(slots=True, eq=False)
class RoleBatch:
    """One batch of a loop. Raises ``UsageError`` where a tensor cannot have the role that is declared."""

    loop: TrainLoop
    batch: Any
    tensors: dict[Path, torch.Tensor] = field(init=False)
    roles: dict[Path, str] = field(init=False)
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {path: t.detach() for path, t in nested.paths(self.batch) if plain(t) and not t.is_complex()}
        axis = self.loop.batch_dim if isinstance(self.loop.batch_dim, int) else 0
        self.rows = nested.rows(self.batch, axis)
        named = [] if self.loop.roles is None else self.loop.roles.named
        self.roles = {p: role for role, name in named for p in self.tensors if nested.is_named(p, [name])}
        for path, role in self.roles.items():
            tensor = self.tensors[path]
            if not _fits(role, tensor, self.rows, axis):
                held = (
                    f"{len(torch.unique(tensor))} values" if role.endswith("mask") else f"{self.rows} rows in the batch"
                )
                raise UsageError(
                    f"TrainLoop.roles: {role} names {nested.shown(path)}, {nested.describe(tensor)} with {held}; "
                    f"{NEEDED[role]} needed"
                )

    def with_(self, edits: Mapping[Path, torch.Tensor]) -> Any:
        """A fresh copy of the batch with other tensors in some places."""
        return nested.mapped(
            nested.copy(self.batch),
            lambda path, old: edits[path].clone() if path in edits else old,
            lambda value: isinstance(value, torch.Tensor),
        )

    def left_out(self) -> list[LeftOut]:
        """Where something is left out, declared places first, each with the tensors that have values there."""
        found: list[LeftOut] = []
        for one in (*self._declared(), *self._padded()):
            same = next((n for n, known in enumerate(found) if torch.equal(known.cells, one.cells)), None)
            if same is None:
                found.append(one)
            else:
                found[same] = replace(found[same], also=(*found[same].also, one.teller))
        contents: dict[int, list[Path]] = {n: [] for n in range(len(found))}
        for path, tensor in self.tensors.items():
            if two_valued(tensor) or self.roles.get(path, "inputs") != "inputs":
                continue
            fits = [n for n, one in enumerate(found) if tensor.shape[:2] == one.cells.shape]
            fits = [n for n in fits if found[n].pad is None] or fits
            own = [n for n in fits if constant(tensor[found[n].cells]) is not None]
            # of two masks of one shape a tensor belongs to the one over whose places it holds one value
            chosen = own if len(own) == 1 else fits if len(fits) == 1 else []
            for n in chosen:
                contents[n].append(path)
        return [replace(one, contents=tuple(contents[n])) for n, one in enumerate(found) if contents[n]]

    def _declared(self) -> Iterator[LeftOut]:
        for path, role in self.roles.items():
            tensor, name = self.tensors[path], nested.shown(path)
            if role in ("mask", "padding_mask"):
                cells = left_out(tensor) if role == "mask" else tensor != 0
                cells = cells.reshape([size for axis, size in enumerate(cells.shape) if not axis or size > 1])
                known = f"{name} {'masks' if role == 'padding_mask' or additive(tensor) else 'is 0 at'} these places"
            elif role == "lengths":
                cells = torch.arange(int(tensor.max()), device=tensor.device)[None] >= tensor.view(-1, 1)
                known = f"rows end before these places, by {name}"
            else:
                continue
            if cells.dim() == 2 and bool(cells.any()) and not bool(cells.all()):
                yield LeftOut(name, cells, cells, known)

    def _padded(self) -> Iterator[LeftOut]:
        """Where the declared ``pad_id`` occurs, and a mask or lengths that are not declared leave these places out."""
        # a mask tells padding better than other tensors of two values, as types of tokens
        for path, tensor in sorted(self.tensors.items(), key=lambda item: "mask" not in str(item[0][-1:]).lower()):
            name, shown = nested.last_name(path), nested.shown(path)
            if path in self.roles or EVENTS.search(name):
                continue
            if two_valued(tensor) and tensor.dim() == 2:
                behind, before = _at_ends(name, tensor)
                region = behind if bool(behind.any()) else before
            elif whole(tensor) and tensor.shape == (self.rows,) and self.rows > 1 and bool((tensor > 0).all()):
                region = torch.arange(int(tensor.max()), device=tensor.device)[None] >= tensor[:, None]
            else:
                continue
            for pad, cells in self._pads(region):
                said = f"the declared pad_id {pad} is at these places only, and {shown} leaves them out"
                yield LeftOut(shown, cells, region, said, pad)

    def masked_numbers(self) -> Iterator[LeftOut]:
        """Numbers by position (log-probabilities, advantages) that differ behind the ends of rows, by a tensor that is
        called a mask."""
        for path, tensor in self.tensors.items():
            name, shown = nested.last_name(path), nested.shown(path)
            if "mask" not in name.lower() or EVENTS.search(name) or not two_valued(tensor) or tensor.dim() != 2:
                continue
            cells, _ = _at_ends(name, tensor)
            if not bool(cells.any()) or bool(cells.all(1).any()):
                continue
            of_shape = [(p, t) for p, t in self.tensors.items() if t.is_floating_point() and t.shape == tensor.shape]
            numbers = tuple(p for p, t in of_shape if not two_valued(t) and constant(t[cells]) is None)
            if len(numbers) > 1:
                yield LeftOut(shown, cells, cells, "", contents=numbers)

    def _pads(self, region: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Where a declared id occurs, by each tensor of ids that has it in this region and nowhere else."""
        for path, ids in self.tensors.items():
            leaf = Leaf(path, ids)
            if not whole(ids) or ids.shape != region.shape or leaf.two_valued or is_label(leaf, None):
                continue
            for padding in self.loop.padding.all if self.loop.padding else ():
                cells = torch.eq(ids, padding.pad_id) if padding.pad_id is not None else torch.zeros_like(region)
                about = padding.dim == 1 and (not padding.of or nested.is_named(path, padding.of))
                if about and bool(cells.any()) and in_part(cells) and not bool((cells & ~region).any()):
                    yield int(padding.pad_id or 0), cells


def first_places(out: LeftOut, contents: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """The first place that is left out behind the end of each row, which may be the end of a text and trained as such.
    And whether it is not: the last real ids are one value in all rows, which ends the texts already."""
    cells = out.cells if trailing(out.cells.cpu()) else out.region
    first = torch.zeros_like(cells)
    if not trailing(cells.cpu()):
        return first, False
    at = (~cells).sum(1)
    rows = ((at > 0) & (at < cells.shape[1])).nonzero().flatten()
    first[rows, at[rows]] = True
    for tensor in contents:
        if whole(tensor) and tensor.shape == cells.shape and len(rows) > 2:
            last = tensor[rows, at[rows] - 1]
            if constant(last) is not None and not bool((tensor[rows, at[rows]] == last).any()):
                return first, True
    return first, False


def _at_ends(name: str, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a mask of this name leaves out what is behind the ends of rows, and what is before their beginnings."""
    empty = (mask != 0 if additive(mask) or PADS.search(name) else mask == 0).long()
    return empty.flip(1).cumprod(1).flip(1).bool(), empty.cumprod(1).bool()


def _fits(role: str, tensor: torch.Tensor, rows: int, axis: int) -> bool:
    if role in ("mask", "padding_mask"):
        return two_valued(tensor) and tensor.dim() > 0
    if role == "lengths":
        return whole(tensor) and tensor.numel() == rows and int(tensor.min()) >= 0
    if role == "weights":
        return tensor.dim() > axis and tensor.shape[axis] == rows
    if role == "segments":
        return whole(tensor) and tensor.dim() in (1, 2)
    if role == "graph":
        pairs = whole(tensor) and tensor.dim() == 2 and len(tensor) == 2
        return pairs or (tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2])
    return True
