"""Gradients of whole tensors as one vector, in float64.

A tensor of more than ``MOST`` entries is folded: its entries are added up, with random signs, into ``MOST`` places. The
map is linear and always the same, so a weighted sum of gradients is the same weighted sum of vectors, and a gradient
that is not zero gives a vector that is not zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.recording.samples import as_real

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 16_384


def flat(gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each gradient as a vector; zeros, in the shape of ``like``, where it is None."""
    return [_folded(torch.zeros_like(t) if g is None else g) for g, t in zip(gradients, like, strict=True)]


def _folded(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    values = as_real(values).reshape(-1).to(device="cpu", dtype=torch.float64)
    if len(values) <= MOST:
        return values.clone()
    random = torch.Generator().manual_seed(len(values))
    signs = torch.randint(0, 2, values.shape, generator=random).to(torch.float64) * 2 - 1
    padded = torch.zeros(math.ceil(len(values) / MOST) * MOST, dtype=torch.float64)
    padded[: len(values)] = values * signs
    return padded.view(-1, MOST).sum(0)
