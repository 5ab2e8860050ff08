"""The tensors of one batch and their roles: what is declared, and what leaves places out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.grids import Leaf
from pytest_trainloop.batches.padding_hints import is_label
from pytest_trainloop.batches.values import additive, constant, in_part, left_out, plain, trailing, two_valued, whole
from pytest_trainloop.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.nested import Path

EVENTS = re.compile(r"done|terminat|truncat|reset|first|last|next", re.IGNORECASE)
"""Names of flags of single steps: the places behind them count."""
PADS = re.compile(r"pad|ignore", re.IGNORECASE)

NEEDED = {
    "mask": "a mask of two values (0 and 1, True and False, 0 and -inf)",
    "padding_mask": "a mask of two values (0 and 1, True and False)",
    "lengths": "whole numbers, one for each row",
    "weights": "a number for each row, or for each position of each row",
    "segments": "whole numbers for each entry, or borders",
    "graph": "edges as whole numbers of shape (2, edges), or an adjacency (nodes, nodes)",
}


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """Places where the batch says that nothing counts. ``cells``: true there, by the leading axes of ``contents``.
    ``promise``: which declaration says so, empty where none does."""

    teller: str
    cells: torch.Tensor
    known: str
    promise: str
    contents: tuple[Path, ...] = ()


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
                    f"{NEEDED[role]} is needed"
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
        found = [*self._declared(), *self._padded()]
        contents: dict[int, list[Path]] = {n: [] for n in range(len(found))}
        for path, tensor in self.tensors.items():
            if two_valued(tensor) or self.roles.get(path, "inputs") != "inputs":
                continue
            fits = {n: v for n, one in enumerate(found) if (v := aligned(tensor, one.cells)) is not None}
            if fits and any(found[n].promise == "roles" for n in fits):
                fits = {n: v for n, v in fits.items() if found[n].promise == "roles"}
            own = [n for n, view in fits.items() if constant(view[found[n].cells.to(view.device)]) is not None]
            # of two masks of one shape a tensor belongs to the one over whose places it holds one value
            chosen = own if len(own) == 1 else list(fits) if len(fits) == 1 else []
            for n in chosen:
                contents[n].append(path)
        return [
            LeftOut(one.teller, one.cells, one.known, one.promise, tuple(contents[n]))
            for n, one in enumerate(found)
            if contents[n]
        ]

    def _declared(self) -> Iterator[LeftOut]:
        for path, role in self.roles.items():
            tensor, name = self.tensors[path], nested.shown(path)
            if role in ("mask", "padding_mask"):
                cells = left_out(tensor) if role == "mask" else tensor != 0
                cells = cells.view([size for axis, size in enumerate(cells.shape) if not axis or size > 1])
                value = "0 or False" if role == "padding_mask" else "not 0" if additive(tensor) else "0"
                known = f"{name} is {'not ' if role == 'padding_mask' else ''}{value} there"
                yield from _one(name, cells, known, "roles")
            elif role == "lengths":
                longest = int(tensor.max())
                if any(t.dim() > 1 and t.shape[:2] == (self.rows, longest) for t in self.tensors.values()):
                    cells = torch.arange(longest, device=tensor.device)[None] >= tensor.view(-1, 1)
                    yield from _one(name, cells, f"{name} ends before it", "roles")

    def _padded(self) -> Iterator[LeftOut]:
        """Where a mask or lengths that are not declared say the same as an id that stands there alone: the declared
        ``pad_id``, or any one value."""
        paddings = self.loop.padding.all if self.loop.padding else ()
        pads = {p.pad_id for p in paddings if p.pad_id is not None}
        known: list[torch.Tensor] = [one.cells for one in self._declared()]
        for path, tensor in self.tensors.items():
            name = next((key for key in reversed(path) if isinstance(key, str)), "")
            if path in self.roles or EVENTS.search(name):
                continue
            if two_valued(tensor) and tensor.dim() == 2 and len(tensor) == self.rows:
                empty = tensor != 0 if additive(tensor) or PADS.search(name) else tensor == 0
                behind = empty.long().flip(1).cumprod(1).flip(1).bool()
                cells = behind if bool(behind.any()) else empty.long().cumprod(1).bool()
                says = "mask" in name
            elif whole(tensor) and tensor.shape == (self.rows,) and self.rows > 1 and "len" in name.lower():
                cells = torch.arange(int(tensor.max()), device=tensor.device)[None] >= tensor[:, None]
                says = True
            else:
                continue
            if not bool(cells.any()) or not in_part(cells) or any(torch.equal(cells, one) for one in known):
                continue
            filled = [
                values
                for p, ids in self.tensors.items()
                if whole(ids) and ids.shape == cells.shape and not two_valued(ids) and not is_label(Leaf(p, ids), None)
                for values in [_only_there(ids, cells)]
                if values
            ]
            declared = any(pads & values for values in filled)
            uneven = int(cells.sum(1).min()) < int(cells.sum(1).max())
            if declared or (says and uneven and any(len(values) == 1 for values in filled)):
                known.append(cells)
                pad = (
                    f"the declared pad_id {min(pads)} stands there and nowhere else"
                    if declared
                    else "one id stands there"
                )
                shown = nested.shown(path)
                yield LeftOut(
                    shown, cells, f"{shown} leaves these places out, and {pad}", "padding" if declared else ""
                )


def aligned(tensor: torch.Tensor, cells: torch.Tensor) -> torch.Tensor | None:
    """The tensor as (cells, ...); None where it has no entry for each of them. Pictures may have channels first."""
    shape = tuple(cells.shape)
    if tuple(tensor.shape[: len(shape)]) == shape:
        return tensor
    if len(shape) > 2 and (tensor.shape[0], *tensor.shape[2:]) == shape:
        return tensor.movedim(1, -1)
    return None


def fill_of(tensor: torch.Tensor, cells: torch.Tensor) -> set[float]:
    """The values that a tensor has at these places, some of them where there are many."""
    view = aligned(tensor, cells)
    return set() if view is None else set(torch.unique(view[cells.to(view.device)])[:64].tolist())


def first_places(cells: torch.Tensor, contents: list[torch.Tensor]) -> torch.Tensor:
    """The first place that is left out in each row: it may end a text, and be trained as such, unless the last real
    ids are one value in all rows, which then ends it already."""
    nothing = torch.zeros_like(cells)
    if cells.dim() != 2 or not trailing(cells.cpu()):
        return nothing
    at = (~cells).sum(1)
    rows = ((at > 0) & (at < cells.shape[1])).nonzero().flatten()
    for tensor in contents:
        if whole(tensor) and tensor.shape == cells.shape and len(rows) > 2:
            last = tensor[rows, at[rows] - 1]
            if constant(last) is not None and not bool((tensor[rows, at[rows]] == last).any()):
                return nothing
    nothing[rows, at[rows]] = True
    return nothing


def _one(name: str, cells: torch.Tensor, known: str, promise: str) -> Iterator[LeftOut]:
    if bool(cells.any()) and not bool(cells.all()):
        yield LeftOut(name, cells, known, promise)


def _only_there(ids: torch.Tensor, cells: torch.Tensor) -> set[float]:
    """The ids that stand at these places and nowhere else."""
    inside, outside = (set(torch.unique(ids[where])[:4096].tolist()) for where in (cells, ~cells))
    return inside - outside


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
