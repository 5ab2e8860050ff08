"""What a backpropagated value makes of one of the values that it was computed of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.tracing.loss_slice import CannotReplay

if TYPE_CHECKING:
    from pytest_trainloop.tracing.loss_slice import Slice


def slope_at(part: Slice, number: int, size: float) -> torch.Tensor | None:
    """The derivative of what is backpropagated by a value, with random numbers of a size added to it.

    None where the calls between cannot be made again.
    """
    made = part.values[number].tensor
    random = torch.Generator().manual_seed(3)
    noise = torch.randn(made.shape, generator=random, dtype=torch.float64).to(made)
    given = (made + size * noise).requires_grad_()
    try:
        (root,) = part.replay({number: given}, [part.root])
    except CannotReplay:
        return None
    if not root.requires_grad or root.numel() != 1:
        return None
    (slope,) = torch.autograd.grad(root, given, allow_unused=True)
    return slope
