"""Small batches that can be learned, others on every call: drawn from torch's global generator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def points(rows: int = 8, width: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Noisy points around one centre per class, with class indices."""
    labels = torch.randint(classes, (rows,))
    return 2.0 * torch.eye(classes, width)[labels] + 0.3 * torch.randn(rows, width), labels


def curves(rows: int = 8, width: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and one smooth real target for each."""
    inputs = torch.randn(rows, width)
    return inputs, torch.sin(inputs[:, :2].sum(1, keepdim=True)) + 0.5 * inputs[:, 2:3]


def images(rows: int = 8, size: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    """One-channel images whose bright quadrant is the class."""
    labels = torch.randint(classes, (rows,))
    pictures = 0.3 * torch.randn(rows, 1, size, size)
    half = size // 2
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        top, left = half * (label // 2 % 2), half * (label % 2)
        picture[0, top : top + half, left : left + half] += 1.0
    return pictures, labels


def tokens(rows: int = 6, length: int = 8, vocabulary: int = 16) -> Tensor:
    """Sequences that count upwards by one or by two from a random start; id 0 never occurs."""
    start = torch.randint(vocabulary - 1, (rows, 1))
    stride = torch.randint(1, 3, (rows, 1))
    return (start + stride * torch.arange(length)) % (vocabulary - 1) + 1


def series(rows: int = 6, length: int = 10, width: int = 3) -> Tensor:
    """Sine waves of random phase."""
    phase = 6.0 * torch.rand(rows, 1, width)
    return torch.sin(0.6 * torch.arange(length).view(1, -1, 1) + phase)


def fresh(draw: Callable[[], Any]) -> Callable[[int], list[Any]]:
    """What ``TrainLoop.batches`` takes: a function that draws n different batches."""
    return lambda n: [draw() for _ in range(n)]
