"""What in a batch could say where its rows end: runs of one id, masks, lengths."""

from __future__ import annotations

import torch


def runs(mask: torch.Tensor) -> torch.Tensor | None:
    """The mask, if it is true only for runs at the ends or the beginnings of rows, and nowhere for a whole batch."""
    mask = mask.bool()
    if mask.dim() != 2 or not bool(mask.any()) or bool(mask.all()):
        return None
    return mask if trailing(mask) or leading(mask) else None


def trailing(mask: torch.Tensor) -> bool:
    """Whether it is true only at the ends of rows."""
    return bool((mask.long().flip(1).cummin(1).values.flip(1).bool() == mask).all())


def leading(mask: torch.Tensor) -> bool:
    """Whether it is true only at the beginnings of rows."""
    return bool((mask.long().cummin(1).values.bool() == mask).all())


def is_binary(tensor: torch.Tensor) -> bool:
    """Whether it holds zeros and ones only."""
    return not tensor.is_complex() and bool(((tensor == 0) | (tensor == 1)).all())


def are_lengths(tensor: torch.Tensor, most: int) -> bool:
    """Whether these may be the lengths of rows with so many positions at most, some of them shorter."""
    if tensor.is_floating_point() or tensor.dtype is torch.bool:
        return False
    return bool((tensor > 0).all()) and int(tensor.max()) <= most + 1 and int(tensor.min()) < most


def beyond(lengths: torch.Tensor, positions: int) -> torch.Tensor:
    """Which positions lie beyond the lengths."""
    return torch.arange(positions, device=lengths.device)[None] >= lengths[:, None]
