"""An autocast put around a loop that has none, as its project would: around the forward pass, not around backward."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.runs.run import RunPlan


def around_all(plan: RunPlan, device: str) -> RunPlan:
    """The plan with ``fit`` under autocast in bfloat16."""
    outer = plan.contexts
    return replace(plan, contexts=lambda watch: (*outer(watch), _autocast(device)))


@contextlib.contextmanager
def _autocast(device: str) -> Iterator[None]:
    with torch.autocast(device, dtype=torch.bfloat16), _NotAroundBackward(device):
        yield


class _NotAroundBackward(TorchFunctionMode):
    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            with torch.autocast(self._device, enabled=False):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
