"""A part of a batch (some positions, some rows) in the tensors that a step makes of the whole batch and of the part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.instruments.gradients.tolerances import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Sequence

SHIFT = 2
"""Positions that a loop may drop or add: for targets that are shifted, for a token that represents the row."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Of ``total`` entries along an axis those in ``kept`` are the part."""

    total: int
    kept: Sequence[int]

    def places(self, size: int, part: int, *, inner: bool = False) -> torch.Tensor | None:
        """Where the part lies on an axis of ``size`` entries that has ``part`` of them in the other run; None where
        the sizes do not say. Other axes may be flattened into this one: outside of it, or ``inner`` ones."""
        fewer = self.total - len(self.kept)
        several, rest = divmod(size - part, fewer) if fewer else (0, 1)
        if rest or several < 1 or size % several:
            return None
        length, real = size // several, part // several
        added, at = length - self.total, torch.tensor(list(self.kept))
        if abs(added) > SHIFT:
            return None
        if added > 0:  # before the first, or behind the last
            more = torch.arange(added)
            at = torch.cat([at, at[-1:] + 1 + more]) if self.kept[0] == 0 else torch.cat([more, at + added])
        at = at[:real]
        if several == 1:
            return at
        one = torch.arange(several)
        return (at[:, None] * several + one if inner else one[:, None] * length + at).flatten()

    def axes(self, shape: Sequence[int], part: Sequence[int], *, inner: bool = False) -> dict[int, torch.Tensor] | None:
        """The part's places along each axis that was cut; None where the shapes do not say."""
        found = {}
        for axis, (size, less) in enumerate(zip(shape, part, strict=False)):
            at = self.places(size, less, inner=inner) if size != less else None
            if at is not None:
                found[axis] = at
            elif size != less:
                return None
        return found if len(shape) == len(part) else None

    def take(self, tensor: torch.Tensor, part: Sequence[int], *, inner: bool = False) -> torch.Tensor | None:
        """The part of a tensor, in this shape."""
        axes = self.axes(tensor.shape, part, inner=inner)
        for axis, at in (axes or {}).items():
            tensor = tensor.index_select(axis, at.to(tensor.device))
        return None if axes is None else tensor

    def has_rest(self, tensor: torch.Tensor, part: Sequence[int]) -> bool | None:
        """Whether a tensor has anything but zeros outside of the part, in whichever order its axes were flattened. None
        where the shapes do not say."""
        for inner in (False, True):
            axes, rest = self.axes(tensor.shape, part, inner=inner), tensor
            for axis, at in (axes or {}).items():
                rest = rest.index_fill(axis, at.to(tensor.device), 0)
            if axes is None or not bool(rest.any()):
                return None if axes is None else False
        return True

    def alone(self, tensor: torch.Tensor, part: Sequence[int]) -> torch.Tensor:
        """The tensor with 0 outside of the part; as it is where the shapes do not say."""
        taken = self.take(tensor, part)
        return tensor if taken is None else self.put(taken, tensor, alone=True)

    def put(self, new: torch.Tensor, old: torch.Tensor, *, inner: bool = False, alone: bool = False) -> torch.Tensor:
        """``old`` with ``new`` in its part. Pairs of the part and the rest become 0; so does the rest if ``alone``."""
        axes = self.axes(old.shape, new.shape, inner=inner) or {}
        inside, outside = (torch.ones(old.shape, dtype=torch.bool, device=old.device) for _ in range(2))
        for axis, at in axes.items():
            along = torch.zeros(old.shape[axis], dtype=torch.bool, device=old.device)
            at = at.to(old.device)
            along[at] = True
            along = along.reshape([-1 if a == axis else 1 for a in range(old.dim())])
            inside, outside = inside & along, outside & ~along
            shape = [old.shape[a] if a == axis else size for a, size in enumerate(new.shape)]
            new = new.new_zeros(shape).index_copy(axis, at, new)
        kept = torch.zeros_like(old) if alone else torch.where(outside, old, torch.zeros_like(old))
        return torch.where(inside, new, kept) if axes else new


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors agree but for rounding. NaN equals itself."""
    if one.shape != other.shape or not other.numel():
        return one.shape == other.shape
    one, other = one.detach(), other.detach()
    if not other.is_floating_point() or torch.equal(one, other):
        return torch.equal(one, other)
    largest = other.abs().nan_to_num(0.0, 0.0, 0.0).max()
    bound = float(ROUNDING * torch.finfo(other.dtype).eps * largest)
    return bool(torch.isclose(one, other, rtol=0.0, atol=bound, equal_nan=True).all())
