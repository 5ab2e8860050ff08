"""Differences between predictions and targets, whatever is made of them: entries that belong to different positions,
errors that cancel in a mean, a distance that is made larger.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_formula.excuses import others_train
from pytest_trainloop.formulas.cut import close, slope
from pytest_trainloop.recording.torch_names import (
    BINARY_LOSSES,
    CASTS,
    DISTANCE_LOSSES,
    MULTIPLICATIONS,
    RESHAPES,
    SUBTRACTIONS,
    TRANSPOSES,
)
from pytest_trainloop.tracing.loss_slice import CannotReplay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.tracing.loss_slice import Call, Slice

MEETINGS = SUBTRACTIONS | MULTIPLICATIONS | DISTANCE_LOSSES | BINARY_LOSSES
"""Functions that compare or multiply entry by entry."""

_BIJECTIVE = RESHAPES | TRANSPOSES | CASTS | frozenset({"contiguous", "squeeze", "unsqueeze", "ravel"})
"""Every entry goes somewhere, and none is repeated."""

ZERO_MEAN = 3
"""Errors of mean 0 that are added."""


def meetings(found: Slice, names: frozenset[str]) -> Iterator[tuple[Call, int, int]]:
    """The calls of these functions that are given a learned value and one of the batch, of one shape, and both of
    these."""
    needed = found.ancestors(found.root)
    for call in found.calls:
        if call.name not in names or not needed.intersection(call.outputs) or len(call.inputs) < 2:
            continue
        one, other = call.inputs[:2]
        learned, data = (one, other) if found.values[one].requires_grad else (other, one)
        if found.values[data].requires_grad or not found.trained(learned) or not found.from_batch(data):
            continue
        if found.values[learned].tensor.shape == found.values[data].tensor.shape:
            yield call, learned, data


@dataclass(frozen=True, slots=True)
class Misaligned:
    """A comparison, entry by entry, of values whose entries lie in another order."""

    call: Call
    learned: int
    mine: tuple[int, ...]
    """The shape that the learned side had before it was reshaped."""
    theirs: tuple[int, ...]
    aligned: tuple[torch.Tensor, ...]
    """For each way to pair the axes, what belongs to each entry of the learned side."""

    def distance(self, learned: torch.Tensor) -> torch.Tensor:
        """That of each entry from what belongs to it, in the best way to pair the axes."""
        return torch.stack([(learned.flatten() - t).abs().mean() for t in self.aligned]).amin(0)


def misaligned(found: Slice) -> Iterator[Misaligned]:
    for call, learned, data in meetings(found, MEETINGS):
        theirs, mine = _layout(found, data), _layout(found, learned)
        if theirs is None or mine is None:
            continue
        at_mine, at_theirs = _coordinates(*mine), _coordinates(*theirs)
        if any(not torch.equal(at_mine[a], at_theirs[b]) for a, b in _named_axes(mine[0], theirs[0])):
            target = torch.empty_like(found.values[data].tensor, dtype=torch.float64).flatten()
            target[theirs[1]] = found.values[data].tensor.double().flatten()
            yield Misaligned(call, learned, mine[0], theirs[0], tuple(_aligned(mine[0], theirs[0], at_mine, target)))


def _aligned(
    mine: tuple[int, ...], theirs: tuple[int, ...], at: list[torch.Tensor], target: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Entries of a target by the places of the learned side, for each way to pair axes of one length."""
    for order in itertools.permutations(range(len(theirs))):
        if all(mine[a] == theirs[b] for a, b in enumerate(order)):
            strides = [math.prod(theirs[b + 1 :]) for b in order]
            yield target[torch.stack([c * s for c, s in zip(at, strides, strict=True)]).sum(0)]


def _layout(found: Slice, number: int) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """The shape of what a value is a reshaped or transposed copy of, and where in it each entry comes from, flat."""
    end = number
    moved = False
    while (call := found.call_of(number)) is not None and call.name in _BIJECTIVE and call.inputs:
        number, moved = call.inputs[0], True
    source = found.values[number].tensor
    places = torch.arange(source.numel(), dtype=torch.float64, device=source.device).reshape(source.shape)
    if not moved:
        return tuple(source.shape), places.long().flatten()
    try:
        (made,) = found.replay({number: places}, [end])
    except CannotReplay:
        return None
    return (tuple(source.shape), made.detach().long().flatten()) if made.numel() == source.numel() else None


def _named_axes(mine: tuple[int, ...], theirs: tuple[int, ...]) -> list[tuple[int, int]]:
    """The axes of both shapes that are surely the same: those whose length no other axis has."""
    if sorted(mine) != sorted(theirs):
        return []
    return [(mine.index(size), theirs.index(size)) for size in set(mine) if size > 1 and mine.count(size) == 1]


def _coordinates(shape: tuple[int, ...], places: torch.Tensor) -> list[torch.Tensor]:
    return [(places // math.prod(shape[d + 1 :])) % size for d, size in enumerate(shape)]


def cancelling(found: Slice) -> Iterator[Call]:
    """Differences of which only the mean is used: with any errors of mean 0 added, the value is the same."""
    for call, _, _ in meetings(found, SUBTRACTIONS):
        (number,) = call.outputs
        error = found.values[number].tensor
        if error.numel() < 2 or not error.is_floating_point() or others_train(found, number):
            continue
        if any(_is_reduced(found, side) for side in call.inputs[:2]):
            continue  # a difference of costs, as a logarithm of one less a logarithm of another
        made = [found.values[found.root].tensor]
        try:
            for seed in range(ZERO_MEAN):
                noise = torch.randn(error.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
                noise = (noise - noise.mean()).to(error.device) * (error.abs().max() + 1)
                made.append(found.replay({number: error + noise}, [found.root])[0].detach())
        except CannotReplay:
            continue
        size = 10 * error.numel() * float(error.abs().max() + 1) + float(made[0].abs().max())
        if all(close(m.sum(), made[0].sum(), size) for m in made[1:]) and _moves(found, number):
            yield call


def _is_reduced(found: Slice, number: int) -> bool:
    """Whether a value has fewer entries than what it was computed of, back to the layers and the batch."""
    size, seen, todo = found.values[number].tensor.numel(), {number}, [number]
    while todo:
        value = found.values[todo.pop()]
        if value.tensor.numel() > size:
            return True
        if value.kind not in ("layer", "batch") and value.made_by is not None:
            new = [n for n in found.calls[value.made_by].inputs if n not in seen]
            seen.update(new)
            todo.extend(new)
    return False


def _moves(found: Slice, number: int) -> bool:
    """Whether the value changes with the mean of the differences."""
    error = found.values[number].tensor
    (moved,) = found.replay({number: error + 1}, [found.root])
    return bool((moved - found.values[found.root].tensor).abs().sum() > 0)


def growing(found: Slice) -> Iterator[tuple[Call, int]]:
    """Differences that make what is backpropagated smaller as they grow, in every entry that has a gradient, both above
    and below 0, with the number of these entries."""
    for call, _, _ in meetings(found, SUBTRACTIONS):
        (number,) = call.outputs
        error = found.values[number].tensor
        if not error.is_floating_point() or not bool((error > 0).any() and (error < 0).any()):
            continue
        leaf = error.clone().requires_grad_()
        try:
            (root,) = found.replay({number: leaf}, [found.root])
        except CannotReplay:
            continue
        gradient = slope(root, (leaf,))
        if gradient is None:
            continue
        along = gradient * error.flatten()
        counted = along != 0
        signs = torch.sign(error.flatten()[counted])
        if (
            bool((along <= 0).all())
            and bool((signs > 0).any() and (signs < 0).any())
            and not others_train(found, number)
        ):
            yield call, int(counted.sum())
