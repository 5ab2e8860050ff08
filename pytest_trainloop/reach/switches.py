"""The switches of the process that change how a model trains."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.reach.slots import OfProcess
from pytest_trainloop.recording.autocast import leave_open, open_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator


def switches() -> Iterator[tuple[str, OfProcess]]:
    """Each switch as it is read in code, with the slot that reads and writes it."""
    yield "torch.is_grad_enabled()", OfProcess(torch.is_grad_enabled, torch.set_grad_enabled)
    yield "torch.get_default_dtype()", OfProcess(torch.get_default_dtype, torch.set_default_dtype)
    yield (
        "torch.is_anomaly_enabled()",
        OfProcess(
            torch.is_anomaly_enabled,
            lambda on: torch.autograd.set_detect_anomaly(on, torch.is_anomaly_check_nan_enabled()),
        ),
    )
    yield (
        "torch.are_deterministic_algorithms_enabled()",
        OfProcess(torch.are_deterministic_algorithms_enabled, _set_deterministic),
    )
    yield (
        "torch.get_float32_matmul_precision()",
        OfProcess(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    )
    for device in ("cpu", "cuda"):
        yield (
            f"torch.is_autocast_enabled({device!r})",
            OfProcess(
                functools.partial(torch.is_autocast_enabled, device),
                functools.partial(_set_autocast, device),
            ),
        )
    for name in ("benchmark", "deterministic", "enabled"):
        yield (
            f"torch.backends.cudnn.{name}",
            OfProcess(
                functools.partial(getattr, torch.backends.cudnn, name),
                functools.partial(setattr, torch.backends.cudnn, name),
            ),
        )


def _set_deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _set_autocast(device: str, on: bool) -> None:
    """Also leave the block that was entered and not left: while it is open, casts of weights outlive the weights."""
    if torch.is_autocast_enabled(device) != on:
        torch.set_autocast_enabled(device, on)
        leave_open(max(0, open_blocks() + (1 if on else -1)))
