"""What the operations that a function mode sees are given and write to."""

from __future__ import annotations

from typing import Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.recording.samples import readable


def floats(value: Any) -> list[torch.Tensor]:
    """The dense floating tensors in a nest that hold entries which can be read."""
    return [
        t
        for t in nested.tensors(value)
        if t.is_floating_point() and t.layout is torch.strided and t.numel() and readable(t)
    ]


def in_place(name: str) -> bool:
    """Whether an operation of this name writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
