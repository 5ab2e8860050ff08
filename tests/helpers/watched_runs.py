"""Tiny training code to watch, and readers of what was recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from pytest_trainloop.recording.events import Backward, Event, TensorSample
    from pytest_trainloop.recording.record import Record


def net() -> nn.Sequential:
    """Parameters "0.weight", "0.bias", "2.weight", "2.bias", the same on every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def net_and_sgd() -> tuple[nn.Sequential, torch.optim.SGD]:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(count: int, rows: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` different batches, the same on every call."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, rows, 3, generator=generator)
    targets = torch.randn(count, rows, 2, generator=generator)
    return list(zip(inputs, targets, strict=True))


def values(sample: TensorSample | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The sampled entries of a sample, flat in memory order: all of them where the tensor has few."""
    assert sample is not None
    return torch.frombuffer(bytearray(sample.raw), dtype=dtype)


def code(events: list[Event]) -> list[str]:
    """The user's source line of each event."""
    return [event.place.code for event in events]


def arrived(record: Record, backward: Backward) -> set[str]:
    """The names of the parameters that got a gradient in this pass."""
    return set(record.names(backward.arrivals))


def names(record: Record) -> list[str]:
    return [parameter.name for parameter in record.parameters]
