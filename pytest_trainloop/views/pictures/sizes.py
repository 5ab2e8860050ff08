"""How large the entries of a tensor are: counts by half a power of ten, and those that are 0 or not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.recording.samples import as_real

if TYPE_CHECKING:
    from collections.abc import Iterable

A_DECADE = 2
"""Bins for a factor of ten."""

ENDS = 30
"""Entries beyond 1e-30 and 1e30 are counted there."""

SAMPLED = 1 << 14
"""Entries of a tensor that are looked at: in equal distances, so that a share is right to about a hundredth."""


@dataclass(slots=True)
class Sizes:
    """How many entries there are of each size."""

    bins: dict[int, float] = field(default_factory=dict)
    """By half a power of ten, from 0 for 1 to 3.2: 2 for 10 to 32, -1 for 0.32 to 1."""
    zero: float = 0.0
    not_finite: float = 0.0

    @property
    def entries(self) -> float:
        return sum(self.bins.values()) + self.zero + self.not_finite

    def add(self, other: Sizes) -> None:
        for size, count in other.bins.items():
            self.bins[size] = self.bins.get(size, 0.0) + count
        self.zero += other.zero
        self.not_finite += other.not_finite


def sizes(tensor: torch.Tensor) -> Sizes:
    """The sizes of a strided or sparse tensor's entries; of many entries a sample, counted as all of them."""
    dense = tensor.coalesce().values() if tensor.is_sparse else tensor
    real = as_real(dense)
    flat = real.detach().reshape(-1)
    taken = flat[:: max(1, -(-flat.numel() // SAMPLED))].double().abs()
    each = flat.numel() / max(taken.numel(), 1)
    finite = taken.isfinite()
    positive = taken[finite & (taken > 0)]
    bins = (positive.log10() * A_DECADE).floor().clamp(-ENDS * A_DECADE, ENDS * A_DECADE).long()
    values, counts = torch.unique(bins, return_counts=True)
    found = Sizes(not_finite=each * float((~finite).sum()), zero=each * float((taken == 0).sum()))
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        found.bins[value] = each * count
    return found


def norm(tensor: torch.Tensor) -> float:
    """The Euclidean norm of a strided or sparse tensor, in float64."""
    dense = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(dense.detach().to(_wide(dense))))


def joined(norms: Iterable[float]) -> float:
    """The norm of tensors joined, from theirs."""
    return math.sqrt(sum(norm**2 for norm in norms))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
