"""Which entries of a whole tensor a rank holds: of a DTensor its shard, of any other tensor all of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.recording.samples import places
from pytest_trainloop.recording.shards import is_distributed, local

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def local_part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same part of a plain tensor of the shape of ``like``."""
    for axis, (first, count) in enumerate(_held(like)):
        whole = whole.narrow(axis, first, count)
    return whole


def sampled(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Of the sample of the whole tensor (``samples.spaced``) the numbers of the entries that this rank holds, and their
    values."""
    held, part = _held(tensor), local(tensor.detach())
    numbers, values = [], []
    for number, place in enumerate(places(math.prod(tensor.shape))):
        at = _coordinates(place, tensor.shape)
        if all(first <= c < first + count for c, (first, count) in zip(at, held, strict=True)):
            numbers.append(number)
            values.append(float(part[tuple(c - first for c, (first, _) in zip(at, held, strict=True))]))
    return tuple(numbers), tuple(values)


def _held(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Along each axis the first place that this rank holds, and how many."""
    held = [(0, size) for size in tensor.shape]
    if not is_distributed(tensor):
        return held
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    for number, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_shard():
            first, count = held[placement.dim]
            part = -(-count // mesh.size(number))
            begin = min(mesh.get_local_rank(number) * part, count)
            held[placement.dim] = first + begin, min(part, count - begin)
    return held


def _coordinates(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    at = []
    for size in reversed(shape):
        at.append(place % size)
        place //= size
    return tuple(reversed(at))
