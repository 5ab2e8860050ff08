"""What the operations that a function mode sees are given and write to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.recording.samples import readable

if TYPE_CHECKING:
    from collections.abc import Iterable


def floats(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The dense floating ones that hold entries which can be read."""
    return [t for t in tensors if t.is_floating_point() and t.layout is torch.strided and t.numel() and readable(t)]


def in_place(name: str) -> bool:
    """Whether an operation of this name writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
