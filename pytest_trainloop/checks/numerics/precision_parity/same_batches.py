"""The batches of one run, given to another in another precision: what they hold is the loop's data, however it was
rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 32
"""Batches that are kept at most: more are not taken before a first step."""


class SameBatches:
    """``keep`` and ``put`` are to be used as ``RunPlan.before_item``, in this order."""

    def __init__(self) -> None:
        self._kept: dict[int, list[torch.Tensor]] = {}

    def keep(self, number: int, item: Any) -> None:
        if number < MOST:
            self._kept[number] = [t.detach().clone() for t in _dense(item)]

    def put(self, number: int, item: Any) -> None:
        """Overwrite what the batch holds by what the same batch held, where both are of one shape."""
        for tensor, kept in zip(_dense(item), self._kept.get(number, []), strict=False):
            if tensor.shape == kept.shape and tensor.is_floating_point() == kept.is_floating_point():
                with torch.no_grad():
                    tensor.copy_(kept)


def _dense(item: Any) -> Iterator[torch.Tensor]:
    return (t for t in nested.tensors(item) if t.layout is torch.strided)
