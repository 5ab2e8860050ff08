"""What the values of one tensor of a batch say: one value only, those of a mask, whole numbers."""

from __future__ import annotations

import torch

FAR = -1e4
"""A mask that is added to scores has at most this at padded positions: half precision masks are made with it."""


def plain(tensor: torch.Tensor) -> bool:
    """Whether the entries of a tensor can be compared with each other and indexed."""
    return tensor.layout is torch.strided and not (
        tensor.is_nested or tensor.is_meta or tensor.is_quantized or tensor.numel() == 0
    )


def whole(tensor: torch.Tensor) -> bool:
    """Whether these are whole numbers, as ids and labels are."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def binary(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds booleans, or zeros and ones only."""
    values = tensor.detach()
    return values.dtype is torch.bool or (not values.is_complex() and bool(((values == 0) | (values == 1)).all()))


def additive(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a mask that is added to scores: 0, and one number far below it or -inf."""
    values = tensor.detach()
    if not values.is_floating_point() or values.numel() == 0:
        return False
    low = values.min()
    return float(low) <= FAR and bool(((values == 0) | (values == low)).all())


def two_valued(tensor: torch.Tensor) -> bool:
    """Whether a tensor has only values of a mask."""
    return tensor.numel() > 0 and (binary(tensor) or additive(tensor))


def left_out(mask: torch.Tensor) -> torch.Tensor:
    """The entries that a mask usually leaves out: those that are 0, or, of one that is added to scores, are not."""
    return mask.detach() != 0 if additive(mask) else mask.detach() == 0


def all_equal(values: torch.Tensor) -> bool:
    """Whether all entries along the first axis are the same; NaN equals itself. False for no entries."""
    if len(values) == 0:
        return False
    same = values == values[:1]
    if values.is_floating_point():
        same = same | (values.isnan() & values[:1].isnan())
    return bool(same.all())


def constant(values: torch.Tensor) -> float | None:
    """The one value of a tensor, None where it has several or none. NaN equals itself."""
    flat = values.flatten()
    return float(flat[0]) if all_equal(flat) else None


def at_one_end(mask: torch.Tensor) -> bool:
    """Whether (rows, positions) is true for some positions and not for all, and only at the ends of rows, or only at
    their beginnings."""
    return bool(mask.any()) and not bool(mask.all()) and (trailing(mask) or trailing(mask.flip(1)))


def trailing(mask: torch.Tensor) -> bool:
    """Whether (rows, positions) is true only at the ends of rows."""
    return bool((mask.long().flip(1).cummin(1).values.flip(1).bool() == mask).all())


def in_part(mask: torch.Tensor) -> bool:
    """Whether (rows, positions) is true for some positions of a row and not for all of them."""
    return bool((mask.any(1) & ~mask.all(1)).any())


def count_up(cells: torch.Tensor) -> bool:
    """Whether all rows of (rows, positions) are 0, 1, 2, ...: positions."""
    places = torch.arange(cells.shape[1], device=cells.device) if cells.dim() == 2 else None
    return places is not None and len(places) > 1 and bool((cells == places).all())
