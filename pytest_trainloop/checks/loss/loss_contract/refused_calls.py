"""Calls for which torch raises: what was given, and what is expected."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract import binary, broadcasting
from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, as_list
from pytest_trainloop.checks.loss.loss_contract.value_tests import bounds
from pytest_trainloop.recording.torch_names import BINARY_LOSSES, CLASS_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLASSES = CLASS_LOSSES | {"multi_margin_loss"}


def raised(call: Call, error: Exception) -> Iterator[Judgement]:
    """Why a loss function raised, where its arguments show it."""
    if call.name == "embedding":
        yield from _ids(call, error)
        return
    if call.name == "ctc_loss":
        yield _judged(call, error, "lengths_refused", "the lengths given to ctc_loss do not fit its input and targets",
                      culprit="lengths")  # fmt: skip
        return
    given, target = call.tensor("input"), call.tensor("target")
    known = [] if given is None or target is None else list(_known(call, error, given, target))
    yield from known or _shapes(call, error)


def _known(call: Call, error: Exception, given: torch.Tensor, target: torch.Tensor) -> Iterator[Judgement]:
    wider = next(broadcasting.weights(call), None) if call.name not in CLASS_LOSSES else None
    if wider is not None:
        yield replace(wider, finding=replace(wider.finding, shown_by=f"torch raised: {error}"))
    elif call.name == "gaussian_nll_loss" and "negative" in str(error):
        yield _judged(call, error, "log_variance", "gaussian_nll_loss takes a variance, and is given negative values",
                      culprit="var")  # fmt: skip
    elif "weight tensor should be defined" in str(error):
        yield _weights(call, error, given)
    elif call.name in _CLASSES:
        yield from _classes(call, error, given, target)
    elif given.shape != target.shape and (call.name in BINARY_LOSSES or given.dim() != target.dim()):
        yield _judged(call, error, "target_shape",
                      f"{call.name} is given targets of shape {tuple(target.shape)} for an input of "
                      f"{tuple(given.shape)}: the shapes must be equal",
                      culprit="target")  # fmt: skip
    elif call.name == "binary_cross_entropy" and _outside(given):
        summary = f"raw scores given where probabilities are expected: binary_cross_entropy takes {bounds(given)}"
        yield _judged(call, error, "logits_as_probabilities", summary)
    elif call.name == "binary_cross_entropy" and _outside(target):
        yield from binary.targets(call)
    elif not target.is_floating_point() or target.dtype != given.dtype:
        yield _wrong_dtype(call, error)


def _weights(call: Call, error: Exception, given: torch.Tensor) -> Judgement:
    weight = call.tensor("weight")
    count = given.shape[1] if given.dim() > 1 else given.shape[0]
    have = "" if weight is None else f" of shape {tuple(weight.shape)}"
    return _judged(call, error, "weight_shape", f"{call.name} has {count} classes and is given a weight{have}",
                   repair=f"give one weight for each class, of shape ({count},)", culprit="weight")  # fmt: skip


def _shapes(call: Call, error: Exception) -> Iterator[Judgement]:
    """Shapes that differ, where nothing else explains that torch raises."""
    given = {name: tuple(v.shape) for name, v in call.given.items() if isinstance(v, torch.Tensor) and v.dim()}
    about_shapes = any(word in str(error).lower() for word in ("size", "shape", "dim"))
    if about_shapes and len(set(given.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in given.items())
        yield _judged(call, error, "target_shape", f"{call.name} is given tensors that do not fit: {listed}",
                      repair="give all of them one shape", culprit="target")  # fmt: skip


def _wrong_dtype(call: Call, error: Exception) -> Judgement:
    given, target = call.tensor("input"), call.tensor("target")
    have = "" if target is None else str(target.dtype).removeprefix("torch.")
    need = "" if given is None else str(given.dtype).removeprefix("torch.")
    need = "int64" if call.name in _CLASSES else need
    cast = "target.long()" if need == "int64" else "target.to(output.dtype)"
    return _judged(call, error, "target_dtype", f"{call.name} is given {have} targets, and takes {need}", repair=cast,
                   culprit="target")  # fmt: skip


def _outside(given: torch.Tensor) -> bool:
    return bool(given.numel()) and bool(((given < 0) | (given > 1)).any())


def _classes(call: Call, error: Exception, given: torch.Tensor, target: torch.Tensor) -> Iterator[Judgement]:
    expected = (given.shape[0], *given.shape[2:]) if given.dim() > 1 else ()
    count = given.shape[1] if given.dim() > 1 else given.shape[0]
    if tuple(target.shape) == expected:
        if target.dtype != torch.int64:
            yield _wrong_dtype(call, error)
        else:
            yield from _range(call, error, target, count)
    elif given.dim() > 2 and tuple(target.shape) == tuple(given.shape[:-1]):
        yield _judged(call, error, "class_axis",
                      f"{call.name} takes axis 1 of {tuple(given.shape)} for the classes; the targets of "
                      f"{tuple(target.shape)} say that they are on the last axis")  # fmt: skip
    elif target.shape == given.shape and not target.is_floating_point():
        hot = bool(((target == 0) | (target == 1)).all())
        yield _judged(call, error, "target_shape",
                      f"{call.name} is given {'one-hot ' if hot else ''}integers of shape {tuple(target.shape)}: it "
                      f"takes one class index for each row, {expected}",
                      repair="target.argmax(1), or target.float() for class probabilities",
                      culprit="target")  # fmt: skip
    else:
        yield _judged(call, error, "target_shape",
                      f"{call.name} is given targets of shape {tuple(target.shape)} for scores of "
                      f"{tuple(given.shape)}: it takes class indices of shape {expected}",
                      repair="target.squeeze(-1)" if target.numel() == torch.Size(expected).numel()
                      else "one class index for each row", culprit="target")  # fmt: skip


def _range(call: Call, error: Exception, target: torch.Tensor, count: int) -> Iterator[Judgement]:
    ignored = call.given.get("ignore_index", -100)
    kept = target[target != ignored]
    if not kept.numel():
        return
    low, high = int(kept.min()), int(kept.max())
    if low >= 0 and high < count:
        return
    kinds = torch.unique(kept[(kept < 0) | (kept >= count)])
    if low < 0:
        hint, repair = f"; ignore_index is {ignored}", _negative(kinds, ignored)
    elif low == 1 and high == count:
        hint, repair = f": they are 1 to {count}, off by one", "count labels from 0: target - 1"
    else:
        hint, repair = f": the head is {high + 1 - count} too narrow, or labels need a map", "remap labels to 0 ... C-1"
    yield _judged(call, error, "target_out_of_range",
                  f"{call.name} is given labels {low} to {high} and has classes 0 to {count - 1}{hint}", repair=repair,
                  culprit="target", measured=f"labels seen {as_list(torch.unique(kept))}")  # fmt: skip


def _negative(kinds: torch.Tensor, ignored: int) -> str:
    """One label may be that of what is left out; ignoring it would hide a class that the map of names lacks."""
    look = "look where these labels come from: a map of names that lacks a class gives one label to all of them"
    if len(kinds) > 1:
        return look
    kind = int(kinds[0])
    return f"{look}\nif {kind} is the label of what is left out: ignore_index={kind}, or label it {ignored}"


def _ids(call: Call, error: Exception) -> Iterator[Judgement]:
    ids, weight = call.tensor("input"), call.tensor("weight")
    if ids is None or weight is None or not ids.numel() or ids.is_floating_point():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= weight.shape[0]:
        yield _judged(call, error, "ids_out_of_range",
                      f"the embedding{' ' + call.module if call.module else ''} has rows 0 to {weight.shape[0] - 1} "
                      f"and is given ids {low} to {high}",
                      culprit=call.module or "embedding")  # fmt: skip


def _judged(
    call: Call, error: Exception, cause: str, summary: str, *, repair: str = "", culprit: str = "", measured: str = ""
) -> Judgement:
    tensors = {name: v for name, v in call.given.items() if isinstance(v, torch.Tensor)}
    given = ", ".join(f"{n} {tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for n, v in tensors.items())
    return call.judged(
        cause,
        summary,
        measured=measured or given,
        shown_by=f"torch raised: {str(error).strip().partition(chr(10))[0][:160]}",
        culprit=culprit,
        repair=repair,
    )
