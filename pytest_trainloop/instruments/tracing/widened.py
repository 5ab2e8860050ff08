"""A slice of an observed run in float64: what its layers gave and its batch, widened, and its calls made again.

The run itself is in the loop's own precision, in which no form agrees to half of the digits of float64. What the layers
gave is a point like any other: at it, and at those drawn around it, the calls between are one function.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay, Slice
from pytest_trainloop.recording.function_mode import aside
from pytest_trainloop.recording.torch_internals import tree_map
from pytest_trainloop.runs.float64 import WIDER

if TYPE_CHECKING:
    from pytest_trainloop.instruments.tracing.loss_slice import Call

_CASTS = {"float": torch.Tensor.double, "half": torch.Tensor.double, "bfloat16": torch.Tensor.double}


def widened(found: Slice) -> Slice | None:
    """The slice in float64, in which calls that cast to a lower precision cast to float64; None where the device has no
    float64. What a call gave that cannot be made again (one that draws) stays as it was, and is widened."""
    calls = tuple(map(_wide_call, found.calls))
    try:
        values = [replace(v, tensor=_wide(v.tensor)) for v in found.values]
    except (RuntimeError, TypeError) as error:
        reraise_raised(error)
        return None
    wide = Slice(tuple(values), calls, found.root, found.step, found.place)
    made: dict[int, torch.Tensor] = {}
    with aside(), torch.no_grad():
        for call in calls:
            try:
                wide.again(call, made)
            except CannotReplay:
                continue
    for number, tensor in made.items():
        values[number] = replace(values[number], tensor=_wide(tensor))
    return replace(wide, values=tuple(values))


def _wide_call(call: Call) -> Call:
    args, kwargs = tree_map(_wide, call.args), tree_map(_wide, call.kwargs)
    func = _CASTS.get(call.name, call.func) if len(call.inputs) == 1 else call.func
    return replace(call, func=func, args=args, kwargs=kwargs)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return WIDER.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in WIDER:
        return value.detach().to(WIDER[value.dtype])
    return value
