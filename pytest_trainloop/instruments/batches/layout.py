"""Where each position of a batch comes from, and the batch rebuilt with another layout of positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.whose import present
from pytest_trainloop.declare import nested

if TYPE_CHECKING:
    from pytest_trainloop.instruments.batches.roles import Part, Roles

MaskKind = Literal["bool", "int", "float", "additive"]

_DTYPES = {"bool": torch.bool, "int": torch.int64, "float": torch.float32, "additive": torch.float32}


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of a batch, as (rows, positions)."""

    source: torch.Tensor
    """The position of the original batch that each one comes from; -1 for a new one."""
    real: torch.Tensor
    """Which positions are no padding."""
    seed: int | None = None
    """The seed of values at padded positions, where they are not those of the batch."""

    @classmethod
    def of(cls, roles: Roles) -> Layout:
        """The positions as they are."""
        padded = present(roles.padded, "which positions are padding")
        rows, length = padded.shape
        return cls(torch.arange(length).expand(rows, length), ~padded)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.real.sum(1))

    def wider(self, left: int, right: int) -> Layout:
        pad = torch.nn.functional.pad
        return replace(self, source=pad(self.source, (left, right), value=-1), real=pad(self.real, (left, right)))

    def trimmed(self) -> Layout:
        """The positions that are real in every row."""
        kept = self.real.all(0)
        return replace(self, source=self.source[:, kept], real=self.real[:, kept])

    def cut(self, row: int, length: int, side: str) -> Layout:
        """A row cut to ``length`` real positions: the first, or the last where padding is on the left."""
        at = self.real[row].nonzero().flatten()
        lost = at[: len(at) - length] if side == "left" else at[length:]
        source, real = self.source.clone(), self.real.clone()
        source[row, lost], real[row, lost] = -1, False
        return replace(self, source=source, real=real)


def rebuilt(batch: Any, roles: Roles, layout: Layout, mask: MaskKind | None) -> Any:
    """A fresh batch with this layout, and its masks of this kind."""
    new: dict[int, torch.Tensor] = {}
    source = None if layout.seed is None else torch.Generator().manual_seed(layout.seed)
    for part in roles.parts:
        if part.role == "mask":
            new[id(part.tensor)] = _mask(part, layout, mask)
        elif part.role == "lengths":
            new[id(part.tensor)] = torch.tensor(layout.lengths).to(part.tensor)
        elif part.time is not None and id(part.tensor) not in new:
            new[id(part.tensor)] = _laid_out(part, layout, source)
    return nested.replaced(batch, new)


def _back(part: Part, cells: torch.Tensor) -> torch.Tensor:
    restored = cells.movedim((0, 1), part.axes).contiguous()
    return restored.to(part.tensor.device).requires_grad_(part.tensor.requires_grad)


def _laid_out(part: Part, layout: Layout, source: torch.Generator | None) -> torch.Tensor:
    old, device = part.cells, part.tensor.device
    rows = torch.arange(len(old), device=device)[:, None]
    cells = old[rows, layout.source.clamp(min=0).to(device)]
    fill = present(part.fill, "what is at padded positions")
    cells[(layout.source < 0).to(device)] = torch.tensor(fill, dtype=torch.float64).to(old)
    if source is not None and part.role in ("ids", "features"):
        real = layout.real.to(device)
        cells[~real] = _others(old[real], cells[~real].shape, source)
    return _back(part, cells)


def _others(seen: torch.Tensor, shape: torch.Size, source: torch.Generator) -> torch.Tensor:
    """Values for padded positions: ids among those that occur, numbers of the size of those that occur."""
    if seen.is_floating_point():
        size = max(1.0, float(seen.abs().max()) if seen.numel() else 1.0)
        return (size * torch.randn(shape, generator=source)).to(seen)
    values = seen.flatten()
    return values[torch.randint(len(values), shape, generator=source).to(values.device)]


def _mask(part: Part, layout: Layout, kind: MaskKind | None) -> torch.Tensor:
    """The mask of this layout, in its own kind or in another of the same meaning."""
    real, fill = present(part.real, "what a mask has at real positions"), present(part.fill, "and at padded ones")
    dtype = part.tensor.dtype
    if kind is not None:
        if kind not in _DTYPES:
            raise UsageError(f"a mask has no kind {kind!r}: there are {', '.join(_DTYPES)}")
        if abs(fill) > 1 and kind != "additive":
            raise UsageError(
                f"{part.name} is added to scores: whether 1 would mark real or padded positions in a mask as "
                f"{kind} is not known; pass masks=() or masks=['additive']"
            )
        dtype = _DTYPES[kind]
        real, fill = (0.0, float("-inf")) if kind == "additive" else (real, fill)
    made = torch.full(layout.real.shape, fill, dtype=torch.float64).masked_fill(layout.real, real).to(dtype)
    return _back(part, made)
