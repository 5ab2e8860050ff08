"""Which positions of a batch are padding, as far as the batch proves it.

By a pad id (declared, or one that an embedding leaves out), by a mask or by lengths. A mask may be of other things
(segments, prompts, observations, tokens to predict), so padding is only what holds nothing: in padded places every
tensor of the batch that has rows and positions holds one and the same value, or positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.padding_marks import are_lengths, beyond, is_binary, runs, trailing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.loop import Padding

Source = Literal["id", "mask", "lengths"]


@dataclass(frozen=True, slots=True)
class Padded:
    """``mask`` says which of (rows, positions) are padding: all on one side. ``rows`` is the axis of the rows, ``ids``
    tells that what is padded are ids rather than features."""

    mask: torch.Tensor
    source: Source
    ids: bool
    rows: int

    @property
    def left(self) -> bool:
        return not trailing(self.mask)

    @property
    def positions(self) -> int:
        return self.mask.shape[1]

    def lengths(self) -> list[int]:
        """How many positions of each row are real."""
        return [int(n) for n in (~self.mask).sum(1)]


def find(batch: Any, rows: int, declared: Padding | None, pads: Sequence[int]) -> list[Padded]:
    """The padding of a batch whose rows lie along the axis ``rows``: one for each length to which something is padded,
    as source and target are. ``pads`` are ids that embeddings leave out."""
    held = _Batch(batch, rows)
    known = [declared.pad_id] if declared is not None and declared.pad_id is not None else list(pads)
    found: dict[int, Padded] = {}
    for source, mask in held.candidates(known):
        told_by_one = source != "id" and (len(set((~mask).sum(1).tolist())) == 1 or int(mask.sum()) < 2)
        near = any(abs(known_length - mask.shape[1]) < 2 for known_length in found)  # targets that are shifted
        if not near and not told_by_one and held.holds_nothing(mask):
            found[mask.shape[1]] = Padded(mask, source, held.has_ids(mask), rows)
    return list(found.values())


def plain(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch whose entries can be compared."""
    return [
        t
        for t in nested.tensors(batch)
        if t.layout is torch.strided and not t.is_nested and not t.is_meta and not t.is_quantized and not t.is_complex()
    ]


def time_axes(tensor: torch.Tensor, rows: int, count: int, positions: int) -> list[int]:
    """The axes of a tensor along which so many positions lie, beside ``count`` rows: one, or the two of a square
    mask."""
    if tensor.dim() < 2 or tensor.dim() <= rows or tensor.shape[rows] != count:
        return []
    axes = [a for a in range(tensor.dim()) if a != rows and tensor.shape[a] == positions]
    return axes[-2:] if len(axes) > 1 and axes[-2:] == [tensor.dim() - 2, tensor.dim() - 1] else axes[:1]


class _Batch:
    """The tensors of a batch, as rows and positions."""

    def __init__(self, batch: Any, rows: int) -> None:
        self._tensors = plain(batch)
        self._rows = rows
        self._count = nested.rows(batch, rows)

    def candidates(self, pads: Sequence[int]) -> Iterator[tuple[Source, torch.Tensor]]:
        """Where padding may be: what a mask or lengths say first, since a pad id may also end a text."""
        flat = [
            self._laid(t)
            for t in self._tensors
            if t.dim() == 2 and t.shape[self._rows : self._rows + 1] == (self._count,)
        ]
        for tensor in flat:
            if is_binary(tensor):
                yield from (("mask", found) for end in (0, 1) if (found := runs(tensor == end)) is not None)
        sizes = dict.fromkeys(
            s for t in self._tensors for a, s in enumerate(t.shape) if t.dim() > 1 and a != self._rows
        )
        for tensor in self._tensors:
            if tensor.shape == (self._count,):
                yield from (("lengths", beyond(tensor, size)) for size in sizes if are_lengths(tensor, size))
        for tensor in flat:
            if not tensor.is_floating_point():
                yield from (("id", found) for pad in pads if (found := runs(tensor == pad)) is not None)

    def holds_nothing(self, mask: torch.Tensor) -> bool:
        """Whether all that lies in these places is one value of each tensor, or positions, and some of it is data."""
        aligned = [t for t in self._aligned(mask.shape[1]) if t is not None]
        return any(not is_binary(t) for t in aligned) and all(_is_empty(t, mask) for t in aligned)

    def has_ids(self, mask: torch.Tensor) -> bool:
        features = any(t.dim() > 2 or t.is_floating_point() for t in self._aligned(mask.shape[1]) if not is_binary(t))
        return not features

    def _aligned(self, positions: int) -> Iterator[torch.Tensor]:
        """Tensors with rows and then so many positions; square masks are left out."""
        for tensor in self._tensors:
            axes = time_axes(tensor, self._rows, self._count, positions)
            if len(axes) == 1:
                yield tensor.movedim((self._rows, axes[0]), (0, 1))

    def _laid(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._rows == 0 else tensor.T


def _is_empty(tensor: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether one value stands in all of these places, or positions: counted alike in all rows, or up to a length."""
    values = tensor[mask]
    if bool((values == values[:1]).all()):
        return True
    if tensor.is_floating_point() or tensor.dim() != 2:
        return False
    if bool((tensor.diff(dim=1) == 1).all()) and bool((tensor == tensor[:1]).all()):
        return True
    lengths = (~mask).sum(1, keepdim=True).expand_as(tensor)[mask]
    return bool((values == lengths - 1).all()) or bool((values == lengths).all())
