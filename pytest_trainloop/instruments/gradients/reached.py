"""Which parts of the inputs each part of the outputs depends on: rows, positions or segments, as a table of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.core.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

MOST_PARTS = 24
"""Parts that are looked at: the first ones."""


@dataclass(slots=True)
class Reached:
    """Plain numbers: nothing of the loop's is kept."""

    sizes: tuple[tuple[float, ...] | None, ...] = ()
    """For each output part the largest entry of its gradient in each input part, over the largest in any of them;
    None for a part without outputs."""
    parts: int = 0
    """How many there are, also beyond ``MOST_PARTS``."""

    def note(self, parts: int, gradients: Callable[[int], Iterable[torch.Tensor]]) -> None:
        """Take the gradients of each output part, whose first axis is that of the input parts; nothing where torch
        refuses one."""
        try:
            self.sizes = tuple(_sizes(gradients(part)) for part in range(min(parts, MOST_PARTS)))
        except RuntimeError as error:
            reraise_raised(error)
            return
        self.parts = parts


def _sizes(gradients: Iterable[torch.Tensor]) -> tuple[float, ...] | None:
    """Several inputs have sizes of their own: each counts by its share of the largest."""
    found: list[float] = []
    for gradient in gradients:
        each = (
            gradient.detach().double().abs().flatten(1) if gradient.dim() > 1 else gradient.detach().double()[:, None]
        )
        largest = float(each.max()) if each.numel() else 0.0
        shares = [value / largest if largest else 0.0 for value in each.amax(1).tolist()[:MOST_PARTS]]
        found = [max(pair) for pair in zip(found, shares, strict=True)] if found else shares
    return tuple(found) or None
