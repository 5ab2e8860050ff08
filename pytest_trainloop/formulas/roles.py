"""Which values may be which arguments of a form, and whether they hold what it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.recording.torch_names import CASTS, INDEXING, VIEWS

if TYPE_CHECKING:
    from pytest_trainloop.formulas.form import Argument, Role
    from pytest_trainloop.tracing.loss_slice import Call, Slice, Value

_MOVES = VIEWS | CASTS | INDEXING


def plays(value: Value, argument: Argument) -> bool:
    """Whether a value can be this argument at all. Ranges that a project may get wrong are not asked for here."""
    if argument.learned is not None and value.requires_grad is not argument.learned:
        return False
    tensor = value.tensor
    if argument.role == "classes":
        return not tensor.is_floating_point() and tensor.dtype is not torch.bool and not tensor.is_complex()
    if argument.role == "labels":
        return bool((tensor >= 0).all()) and bool((tensor <= 1).all())
    if argument.role == "signs":
        return bool(((tensor == -1) | (tensor == 0) | (tensor == 1)).all())
    if not tensor.is_floating_point():
        return False
    if argument.role == "boxes":
        return tensor.dim() >= 1 and 4 in (tensor.shape[-1], tensor.shape[0])
    if argument.role == "positive":
        return bool((tensor > 0).all())
    return True


def origin(found: Slice, number: int) -> tuple[Value, Call | None]:
    """The value that this one's entries come from, past reshapes, casts and indexing, and the call that made it."""
    for _ in range(100):
        call = found.call_of(number)
        if call is None or call.name not in _MOVES or not call.inputs:
            break
        number = call.inputs[0]
    return found.values[number], found.call_of(number)


def violates(found: Slice, number: int, role: Role) -> str:
    """What a value holds in place of what the role says, "" where nothing is proven: "scores" (what a layer gave, or
    values outside of [0, 1] by its origin), "probabilities", "labels" of 0 and 1, "centre" boxes."""
    value, made = origin(found, number)
    entries = found.values[number].tensor
    if not entries.numel():
        return ""
    low, high = float(entries.min()), float(entries.max())
    squashed = made is not None and made.name in {"sigmoid", "softmax"}
    if role == "probabilities" and value.kind == "layer" and value.requires_grad and (low < 0 or high > 1):
        return "scores"
    if role == "log_probabilities" and value.kind == "layer" and value.requires_grad and high > 0:
        return "scores"
    if role == "scores" and squashed and value.requires_grad:
        return "probabilities"
    if role == "corner_boxes" and not found.values[number].requires_grad:
        return "centre" if entries.shape[-1] == 4 and _by_centres(entries.reshape(-1, 4)) else ""
    if role == "signs" and low == 0 and high == 1 and bool(((entries == 0) | (entries == 1)).all()):
        return "labels" if not found.values[number].requires_grad else ""
    return ""


def _by_centres(boxes: torch.Tensor) -> bool:
    """Whether boxes are none when read as two corners, and are some when read as centre, width and height."""
    inverted = (boxes[:, 2] < boxes[:, 0]) | (boxes[:, 3] < boxes[:, 1])
    return bool(inverted.any()) and bool((boxes[:, 2:] >= 0).all())
