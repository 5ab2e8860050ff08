"""Conditions under which runs in two precisions can be compared: the same batches, an autocast as a project would write
it, and a loss scale at which the first gradient fits."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.memory_layout import write
from pytest_trainloop.recording.events import ScalerCall
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_internals import is_transformed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.run import RunPlan

MOST_BATCHES = 32
"""Batches that are kept: a first step needs fewer."""

HALVINGS = 26
"""Steps that a scaler may skip before it has found its scale: 2^16 has come to 2^-10 by then."""

LEAST_SCALE = 2.0**-10
"""The last scale that is tried. One at which a later step fitted may be too large for the first."""


class SameBatches:
    """The batches of one run, repeated in another: they are the loop's data, however they were rounded. ``keep`` and
    ``put`` are for ``RunPlan.before_item``, in this order."""

    def __init__(self) -> None:
        self._kept: dict[int, list[torch.Tensor]] = {}

    def keep(self, number: int, item: Any) -> None:
        if number < MOST_BATCHES:
            self._kept[number] = [t.detach().clone() for t in _dense(item)]

    def put(self, number: int, item: Any) -> None:
        """Overwrite the tensors of a batch by those of the same batch in the first run, where shapes agree."""
        for tensor, kept in zip(_dense(item), self._kept.get(number, []), strict=False):
            if tensor.shape == kept.shape and tensor.is_floating_point() == kept.is_floating_point():
                with torch.no_grad():
                    write(tensor, kept)


def _dense(item: Any) -> Iterator[torch.Tensor]:
    return (t for t in nested.tensors(item) if t.layout is torch.strided)


def under_autocast(plan: RunPlan, device: str) -> RunPlan:
    """The plan with ``fit`` under autocast in bfloat16, but for its backward passes."""
    outer = plan.contexts
    return replace(plan, contexts=lambda watch: (*outer(watch), _autocast(device)))


@contextlib.contextmanager
def _autocast(device: str) -> Iterator[None]:
    with torch.autocast(device, dtype=torch.bfloat16), NoAutocastInBackward(device):
        yield


class NoAutocastInBackward(FunctionMode):
    """Backward passes are made as outside of the autocast block that they are called in."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        differentiates = func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
        if differentiates and not is_transformed():  # functorch differentiates its own backward passes once more
            with torch.autocast(self._device, enabled=False):
                return passed_on(func, args, kwargs)
        return passed_on(func, args, kwargs)


def fitting_scale(record: Record) -> float:
    """The loss scale at the first step that was made of the optimizer that attempted one first; the last scale to try
    where none was made."""
    scale, first = 1.0, None
    for call in record.of(ScalerCall):
        if call.what == "scale" and 0.0 < call.factor < math.inf:
            scale = call.factor
        if call.what == "step":
            first = call.optimizer if first is None else first
            if call.stepped and call.optimizer == first:
                return scale
    return LEAST_SCALE
