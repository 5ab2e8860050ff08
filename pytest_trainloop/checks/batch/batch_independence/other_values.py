"""A batch with other values in some of its rows, or its rows in another order: of the same shapes, and as valid.

Values come from another row of the same batch. What says where data is stays as it is: masks, lengths, and the places
of ignored labels and of padding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.values import plain, two_valued, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pytest_trainloop.declare.nested import Path

_LENGTHS = re.compile(r"len|size|count|num|offset|ptr|seqlens|mask|position", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OtherValues:
    """These rows with the values of others.

    ``paths``: the tensors that change; None for all. ``position``: the one entry of each row that changes, counted
    through all axes; None for all. ``floats_only``: whole numbers stay, where a loop's control flow depends on them.
    """

    rows: tuple[int, ...]
    paths: frozenset[Path] | None = None
    position: int | None = None
    floats_only: bool = False
    spared: tuple[int, ...] = ()
    """Rows that give no values either, so that a row gets the same ones whichever others change with it."""
    with_masks: bool = False
    """Whether masks and lengths change with the rest of a row."""

    def apply(self, batch: Any, count: int, axis: int = 0) -> Any:
        """A fresh batch; ``count`` rows lie along ``axis``."""

        def change(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            kept = self.paths is not None and path not in self.paths
            if kept or not has_rows(tensor, count, axis) or not (self.with_masks or changes(path, tensor, axis)):
                return tensor
            if self.floats_only and not tensor.is_floating_point():
                return tensor
            return _with_rows_of(tensor, self, axis)

        return _fresh(batch, change)


@dataclass(frozen=True, slots=True)
class OtherOrder:
    """Row i is what row ``order[i]`` was, in the tensors at these paths; None for all."""

    order: tuple[int, ...]
    paths: frozenset[Path] | None = None

    def apply(self, batch: Any, count: int, axis: int = 0) -> Any:
        """A fresh batch; ``count`` rows lie along ``axis``."""
        if self.paths is None:
            return nested.take(batch, self.order, axis)

        def change(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            if path not in (self.paths or ()) or not has_rows(tensor, count, axis):
                return tensor
            return tensor.index_select(axis, torch.tensor(self.order, device=tensor.device))

        return _fresh(batch, change)


Change = OtherValues | OtherOrder


def has_rows(tensor: torch.Tensor, count: int, axis: int) -> bool:
    return plain(tensor) and tensor.dim() > axis and tensor.shape[axis] == count


def changes(path: Path, tensor: torch.Tensor, axis: int) -> bool:
    """Whether rows of this tensor may take each other's values: no mask, and no lengths. Of 0 and 1 only what adds up
    to 1 in each row (one of several classes), or is one number a row (a label)."""
    name = nested.last_name(path)
    if not tensor.is_floating_point() and _LENGTHS.search(name):
        return False
    if not two_valued(tensor):
        return True
    by_rows = tensor.detach().movedim(axis, 0).reshape(tensor.shape[axis], -1).double()
    named = re.search(r"mask|done|terminated|truncated|valid|attention", name, re.IGNORECASE) is not None
    return not named and (by_rows.shape[1] == 1 or bool((by_rows.sum(1) == 1).all()))


def entries_that_change(tensor: torch.Tensor, row: int, axis: int) -> list[int]:
    """The entries of a row, counted through all axes, that some other row has another value for."""
    by_rows = tensor.detach().movedim(axis, 0)
    differ = [_in_place_of(by_rows[row], other) != by_rows[row] for other in by_rows]
    return [int(at) for at in torch.stack(differ).any(0).flatten().nonzero()]


def _with_rows_of(tensor: torch.Tensor, asked: OtherValues, axis: int) -> torch.Tensor:
    """The tensor with these rows as others are that are none of them: the next ones that differ, at the one entry where
    it is one."""
    rows, position, kept = asked.rows, asked.position, {*asked.rows, *asked.spared}
    fresh = tensor.detach().clone()
    by_rows = fresh.movedim(axis, 0)
    old = tensor.detach().movedim(axis, 0)
    changed = torch.ones(old[0].shape, dtype=torch.bool, device=old.device)
    if position is not None:
        changed = (torch.arange(changed.numel(), device=old.device) == position).view(changed.shape)
    for row in rows:
        others = [(row + n) % len(old) for n in range(1, len(old)) if (row + n) % len(old) not in kept]
        new = old[next((o for o in others if not torch.equal(old[o], old[row])), row)]
        if position is not None:
            given = (_in_place_of(old[row], old[o]) for o in others)
            new = next((g for g in given if bool((g != old[row])[changed].any())), new)
        by_rows[row] = torch.where(changed, _in_place_of(old[row], new), old[row])
    return fresh.requires_grad_(tensor.requires_grad)


def _in_place_of(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """One row's values in place of another's, but for whole numbers that are left alone in either."""
    return torch.where(_left_alone(old) | _left_alone(new), old, new) if whole(old) else new


def _left_alone(values: torch.Tensor) -> torch.Tensor:
    """Ignored labels, and the ends of rows of ids that hold one value."""
    kept = values < 0
    if values.dim() == 1 and len(values) > 1:
        for ends in (values, values.flip(0)):
            run = (ends == ends[0]).long().cumprod(0).bool()
            if int(run.sum()) > 1:
                kept = kept | (run if ends is values else run.flip(0))
    return kept


def _fresh(batch: Any, change: Callable[[Path, torch.Tensor], torch.Tensor]) -> Any:
    new = {id(tensor): made for path, tensor in nested.paths(batch) if (made := change(path, tensor)) is not tensor}
    return nested.replaced(batch, new)


def roll(count: int, by: int = 1) -> tuple[int, ...]:
    """The order in which each row takes the place of the row ``by`` further on."""
    return tuple((row - by) % count for row in range(count))


def rows_that_differ(batch: Any, order: Sequence[int], paths: Collection[Path], axis: int) -> set[int]:
    """The rows that hold other values where the tensors at these paths are put into another order."""
    found: set[int] = set()
    for path, tensor in nested.paths(batch):
        if path in paths and has_rows(tensor, len(order), axis):
            by_rows = tensor.detach().movedim(axis, 0)
            found |= {i for i, source in enumerate(order) if not torch.equal(by_rows[i], by_rows[source])}
    return found
