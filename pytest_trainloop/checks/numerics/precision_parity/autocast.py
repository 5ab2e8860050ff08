"""An autocast put around a loop that has none, as its project would: around the forward pass, not around backward."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.function_mode import FunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.runs.run import RunPlan


def around_all(plan: RunPlan, device: str) -> RunPlan:
    """The plan with ``fit`` under autocast in bfloat16."""
    outer = plan.contexts
    return replace(plan, contexts=lambda watch: (*outer(watch), _autocast(device)))


@contextlib.contextmanager
def _autocast(device: str) -> Iterator[None]:
    with torch.autocast(device, dtype=torch.bfloat16), _NotAroundBackward(device):
        yield


class _NotAroundBackward(FunctionMode):
    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            with torch.autocast(self._device, enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)
