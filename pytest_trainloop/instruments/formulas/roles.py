"""Which values may be which arguments of a form, and whether they hold what it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.instruments.formulas.origins import MOVES, origin
from pytest_trainloop.recording.torch_names import CASTS, CLAMPS, INDEXING, MASKING, MULTIPLICATIONS, RESHAPES

if TYPE_CHECKING:
    from pytest_trainloop.instruments.formulas.form import Argument, Role
    from pytest_trainloop.instruments.tracing.loss_slice import Call, Slice, Value


def plays(value: Value, argument: Argument) -> bool:
    """Whether a value can be this argument at all. Ranges that a project may get wrong are not asked for here."""
    if argument.learned is not None and value.requires_grad is not argument.learned:
        return False
    tensor = value.tensor
    if tensor.is_complex():
        return False
    if argument.role == "classes":
        return not tensor.is_floating_point() and tensor.dtype is not torch.bool
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
    if argument.role == "shares":
        return tensor.dim() > 1 and tensor.shape[-1] > 1 and _sums_to_one(tensor, tensor.dim() - 1)
    return True


def violates(found: Slice, number: int, role: Role) -> str:
    """What a value holds in place of what the role says, "" where nothing is proven: "scores" (what a layer gave,
    outside of [0, 1]), "probabilities", "squashed twice" (a sigmoid or softmax of probabilities), "labels" of 0 and 1,
    "centre" boxes."""
    value, made = origin(found, number)
    entries = found.values[number].tensor
    if not entries.numel():
        return ""
    low, high = float(entries.min()), float(entries.max())
    squashed = made is not None and made.name in {"sigmoid", "softmax"}
    if role == "probabilities" and squashed and made is not None and _squashed(found, made.inputs[0]):
        return "squashed twice"
    if role == "probabilities" and _is_score(found, number):
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


_DISTANCES = frozenset({
    "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "cdist", "pdist", "pairwise_distance", "square", "abs",
    "__abs__", "dist",
})  # fmt: skip


def predicts(found: Slice, number: int) -> bool:
    """Whether a value is made of outputs alone, and is no distance: what the batch's targets go into, but for picks and
    a last mask of 0 and 1, is an error, of which less is better."""
    while (call := found.call_of(number)) is not None and call.inputs and _is_masked(found, call):
        number = next(n for n in call.inputs if found.values[n].requires_grad)
    todo, seen = [number], {number}
    while todo:
        call = found.call_of(todo.pop())
        if call is None:
            continue
        if call.name in _DISTANCES:
            return False
        for n in call.inputs:
            value = found.values[n]
            if value.requires_grad and value.kind != "layer":
                todo.extend({n} - seen)
                seen.add(n)
            elif call.name not in INDEXING and found.from_batch(n):
                return False
    return True


def _is_masked(found: Slice, call: Call) -> bool:
    """Whether a call only leaves out entries of its one learned input, or moves them."""
    learned = [n for n in call.inputs if found.values[n].requires_grad]
    others = [found.values[n].tensor for n in call.inputs if n not in learned]
    keeps = call.name in MOVES or (call.name in MULTIPLICATIONS | MASKING and bool(others))
    return keeps and len(learned) == 1 and all(bool(((t == 0) | (t == 1)).all()) for t in others)


def _is_score(found: Slice, number: int) -> bool:
    """Whether a value is what a layer gave, or a tanh or a clamp of that, where it lies outside of [0, 1]."""
    value, made = origin(found, number, MOVES | CLAMPS)
    if made is not None and made.name != "tanh":
        return False
    if not value.requires_grad or (made is None and value.kind != "layer"):
        return False
    return float(value.tensor.min()) < 0 or float(value.tensor.max()) > 1


def _squashed(found: Slice, number: int) -> bool:
    value, made = origin(found, number)
    return made is not None and made.name in {"sigmoid", "softmax"} and value.requires_grad


def class_axes(found: Slice, prediction: int, target: int) -> tuple[int, int] | None:
    """The axis along which targets are one of several classes, and the other one along which predictions sum to 1; None
    where it is the same, or not sure."""
    p, t = (unflattened(found, n) for n in (prediction, target))
    if p.shape != t.shape or p.dim() < 2 or not t.is_floating_point() or not bool(((t == 0) | (t == 1)).all()):
        return None
    ones = [[d for d in range(x.dim()) if x.shape[d] > 1 and _sums_to_one(x, d)] for x in (t, p)]
    if len(ones[0]) == len(ones[1]) == 1 and ones[0] != ones[1]:
        return ones[0][0], ones[1][0]
    return None


def unflattened(found: Slice, number: int) -> torch.Tensor:
    """A value before it was reshaped."""
    tensor = origin(found, number, RESHAPES | CASTS)[0].tensor
    return tensor if tensor.is_floating_point() else tensor.double()


def _sums_to_one(values: torch.Tensor, axis: int) -> bool:
    return bool(((values.sum(axis) - 1).abs() <= 1e-9).all())


def _by_centres(boxes: torch.Tensor) -> bool:
    """Whether boxes are none when read as two corners, and are some when read as centre, width and height."""
    inverted = (boxes[:, 2] < boxes[:, 0]) | (boxes[:, 3] < boxes[:, 1])
    return bool(inverted.any()) and bool((boxes[:, 2:] >= 0).all())
