"""The distance of neighbouring values of a dtype, and how far a learning rate still rises."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.recording.events import Step

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record


def lr_growth(record: Record, index: int) -> float:
    """By how much a warm-up still raises the rate of the parameter's group: peak over the mean of the rates seen;
    infinity where it rises to what is not known."""
    for optimizer in record.optimizers:
        if index not in optimizer.parameters:
            continue
        group = optimizer.groups[optimizer.parameters.index(index)]
        lrs = [s.lrs[group] for s in record.of(Step) if s.optimizer == optimizer.index and group < len(s.lrs)]
        peak = optimizer.peak_lrs[group] if group < len(optimizer.peak_lrs) else math.nan
        seen = sum(lrs) / len(lrs) if lrs else 0.0
        if len(lrs) > 1 and lrs[-1] > lrs[-2] and not peak > lrs[-1]:
            return math.inf  # it still rises, and nobody knows where to
        return max(1.0, peak / seen) if seen > 0 and peak > 0 else 1.0
    return 1.0


def spacings(points: torch.Tensor, dtype: str) -> torch.Tensor:
    """The distance of each value to the next larger one of its dtype."""
    info = torch.finfo(getattr(torch, dtype))
    return info.eps * torch.exp2(torch.floor(torch.log2(points.abs().clamp_min(info.tiny))))
