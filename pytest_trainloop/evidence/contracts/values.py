"""What the entries of a tensor say by themselves: distributions, their logarithms, and how they are off."""

from __future__ import annotations

import torch


def slack(tensor: torch.Tensor, terms: int) -> float:
    """What rounding may make of a sum of so many probabilities that is 1: each is off by some units of its own dtype
    in the last place, relative to itself, and a softmax in float32 by as much for each term summed."""
    return 8 * torch.finfo(tensor.dtype).eps + terms * torch.finfo(torch.float32).eps


def sums_to_one(tensor: torch.Tensor, axis: int) -> bool:
    """Whether the entries along an axis are probabilities that sum to 1, everywhere."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.dim() == 0 or tensor.shape[axis] < 2:
        return False
    wide = tensor.detach().double()
    if not bool(wide.min() >= 0):
        return False
    return bool(((wide.sum(axis) - 1).abs() <= slack(tensor, tensor.shape[axis])).all())


def logs_of_one(tensor: torch.Tensor, axis: int) -> bool:
    """Whether they are logarithms of such."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.dim() == 0 or tensor.shape[axis] < 2:
        return False
    wide = tensor.detach().double()
    off = wide.logsumexp(axis).abs()
    rounding = slack(tensor, tensor.shape[axis]) + torch.finfo(tensor.dtype).eps * float(
        wide.nan_to_num(neginf=0.0).abs().max()
    )
    return bool((off <= rounding).all())


def exceeds_one(tensor: torch.Tensor, axis: int) -> float:
    """The share of rows along an axis whose exponentials sum to more than 1: none, if these are logarithms of
    probabilities or of some of them."""
    wide = tensor.detach().double()
    rounding = slack(tensor, tensor.shape[axis]) + torch.finfo(tensor.dtype).eps * float(
        wide.nan_to_num(neginf=0.0, posinf=0.0).abs().max() if wide.numel() else 0.0
    )
    over = wide.logsumexp(axis) > rounding
    return float(over.double().mean()) if over.numel() else 0.0


def axis_of_sums(tensor: torch.Tensor, but: int) -> int | None:
    """Another axis along which the exponentials sum to 1."""
    others = [d for d in range(tensor.dim()) if d != but % tensor.dim()]
    return next((d for d in others if tensor.shape[d] > 1 and logs_of_one(tensor, d)), None)


def bounds(tensor: torch.Tensor) -> str:
    wide = tensor.detach().double()
    return f"[{float(wide.min()):.4g}, {float(wide.max()):.4g}]" if wide.numel() else "[]"
