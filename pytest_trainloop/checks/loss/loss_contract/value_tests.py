"""Tests of values: whether a tensor holds distributions or their logarithms, to rounding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def slack(tensor: torch.Tensor, terms: int) -> float:
    """The rounding error of a sum of probabilities that is 1: each has an error of some units in the last place of its
    dtype, relative to itself, and a softmax in float32 has as much for each of its ``terms``."""
    return 8 * torch.finfo(tensor.dtype).eps + terms * torch.finfo(torch.float32).eps


FIRST = 64
"""Rows that are tested before all are: where the answer is no, most often they show it."""


def sums_to_one(tensor: torch.Tensor, axis: int) -> bool:
    """Whether the entries along an axis are probabilities that sum to 1, everywhere."""
    return _everywhere(tensor, axis, _probabilities)


def logs_of_one(tensor: torch.Tensor, axis: int) -> bool:
    """Whether the entries along an axis are logarithms of such probabilities, everywhere."""
    return _everywhere(tensor, axis, _logarithms)


def _everywhere(tensor: torch.Tensor, axis: int, holds: Callable[[torch.Tensor, float], bool]) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.dim() == 0 or tensor.shape[axis] < 2:
        return False
    rows = _rows(tensor, axis)
    allowed = slack(tensor, tensor.shape[axis])
    return holds(rows[:FIRST].double(), allowed) and holds(rows.double(), allowed)


def _rows(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    moved = tensor.detach().movedim(axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def _probabilities(rows: torch.Tensor, allowed: float) -> bool:
    return bool(rows.min() >= 0) and bool(((rows.sum(1) - 1).abs() <= allowed).all())


def _logarithms(rows: torch.Tensor, allowed: float) -> bool:
    return bool((rows.logsumexp(1).abs() <= _of_logs(allowed, rows)).all())


def _of_logs(allowed: float, rows: torch.Tensor) -> float:
    """The rounding error of a log-sum-exp: logarithms with a relative error of eps change it by eps times the sum of
    p |log p|, which is at most eps log C."""
    return allowed * (1 + math.log(rows.shape[1]))


def exceeds_one(tensor: torch.Tensor, axis: int) -> bool:
    """Whether the exponentials of some row along an axis sum to more than 1: those of no row do, if these are
    logarithms of probabilities or of some of them."""
    rows, allowed = _rows(tensor, axis), slack(tensor, tensor.shape[axis])
    return any(
        bool((part.logsumexp(1) > _of_logs(allowed, part)).any())
        for part in (rows[:FIRST].double(), rows.double())
        if part.numel()
    )


def axis_of_sums(tensor: torch.Tensor, but: int) -> int | None:
    """Another axis along which the exponentials sum to 1."""
    others = [d for d in range(tensor.dim()) if d != but % tensor.dim()]
    return next((d for d in others if tensor.shape[d] > 1 and logs_of_one(tensor, d)), None)


def bounds(tensor: torch.Tensor) -> str:
    wide = tensor.detach().double()
    return f"[{float(wide.min()):.4g}, {float(wide.max()):.4g}]" if wide.numel() else "[]"
