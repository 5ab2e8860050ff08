"""Calls that torch itself refuses: what was given, what is expected, and by how much it is off."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract import binary, broadcasting
from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call, as_list
from pytest_trainloop.checks.loss.loss_contract.value_tests import bounds
from pytest_trainloop.recording.torch_names import BINARY_LOSSES, CLASS_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLASSES = CLASS_LOSSES | {"multi_margin_loss"}


def refused(call: Call, error: Exception) -> Iterator[Breach]:
    """Why a loss function raised, where its arguments tell."""
    if call.name == "embedding":
        yield from _ids(call, error)
        return
    if call.name == "ctc_loss":
        yield _breach(call, error, "lengths_refused", "the lengths given to ctc_loss do not fit its input and targets",
                      "input_lengths count frames of the log-probabilities (after downsampling), target_lengths labels",
                      culprit="lengths")  # fmt: skip
        return
    given, target = call.tensor("input"), call.tensor("target")
    known = [] if given is None or target is None else list(_known(call, error, given, target))
    yield from known or _shapes(call, error)


def _known(call: Call, error: Exception, given: torch.Tensor, target: torch.Tensor) -> Iterator[Breach]:
    wider = next(broadcasting.weights(call), None)
    if wider is not None:
        yield replace(wider, shown_by=f"torch raised: {error}")
    elif call.name == "gaussian_nll_loss" and "negative" in str(error):
        yield _breach(call, error, "log_variance", "gaussian_nll_loss takes a variance, and is given negative values",
                      "give exp(log_variance), or softplus of the output", culprit="var")  # fmt: skip
    elif "weight tensor should be defined" in str(error):
        yield _weights(call, error, given)
    elif call.name in _CLASSES:
        yield from _classes(call, error, given, target)
    elif given.shape != target.shape and (call.name in BINARY_LOSSES or given.dim() != target.dim()):
        yield _breach(call, error, "target_shape",
                      f"{call.name} is given targets of shape {tuple(target.shape)} for an input of "
                      f"{tuple(given.shape)}: the shapes must be equal",
                      "squeeze(-1) the output, or unsqueeze(-1) the target", culprit="target")  # fmt: skip
    elif call.name == "binary_cross_entropy" and _outside(given):
        yield _breach(call, error, "logits_as_probabilities",
                      f"raw scores given where probabilities are expected: binary_cross_entropy takes {bounds(given)}",
                      "use binary_cross_entropy_with_logits on the scores as they are")  # fmt: skip
    elif call.name == "binary_cross_entropy" and _outside(target):
        yield from binary.targets(call)
    elif not target.is_floating_point() or target.dtype != given.dtype:
        yield wrong_dtype(call, error)


def _weights(call: Call, error: Exception, given: torch.Tensor) -> Breach:
    weight = call.tensor("weight")
    count = given.shape[1] if given.dim() > 1 else given.shape[0]
    have = "" if weight is None else f" of shape {tuple(weight.shape)}"
    return _breach(call, error, "weight_shape", f"{call.name} has {count} classes and is given a weight{have}",
                   f"give one weight for each class, of shape ({count},)", culprit="weight")  # fmt: skip


def _shapes(call: Call, error: Exception) -> Iterator[Breach]:
    """Shapes that differ where nothing else explains that torch refuses the call."""
    given = {name: tuple(v.shape) for name, v in call.given.items() if isinstance(v, torch.Tensor) and v.dim()}
    about_shapes = any(word in str(error).lower() for word in ("size", "shape", "dim"))
    if about_shapes and len(set(given.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in given.items())
        yield _breach(call, error, "target_shape", f"{call.name} is given tensors that do not fit: {listed}",
                      "bring all of them to one shape", culprit="target")  # fmt: skip


def wrong_dtype(call: Call, error: Exception | None) -> Breach:
    given, target = call.tensor("input"), call.tensor("target")
    have = "" if target is None else str(target.dtype).removeprefix("torch.")
    need = "" if given is None else str(given.dtype).removeprefix("torch.")
    need = "int64" if call.name in _CLASSES else need
    cast = "target.long()" if need == "int64" else "target.to(output.dtype)"
    return _breach(call, error, "target_dtype", f"{call.name} is given {have} targets, and takes {need}", cast,
                   culprit="target")  # fmt: skip


def _outside(given: torch.Tensor) -> bool:
    return bool(given.numel()) and bool(((given < 0) | (given > 1)).any())


def _classes(call: Call, error: Exception, given: torch.Tensor, target: torch.Tensor) -> Iterator[Breach]:
    expected = (given.shape[0], *given.shape[2:]) if given.dim() > 1 else ()
    count = given.shape[1] if given.dim() > 1 else given.shape[0]
    if tuple(target.shape) == expected:
        if target.dtype != torch.int64:
            yield wrong_dtype(call, error)
        else:
            yield from _range(call, error, target, count)
    elif given.dim() > 2 and tuple(target.shape) == tuple(given.shape[:-1]):
        yield _breach(call, error, "class_axis",
                      f"{call.name} takes axis 1 of {tuple(given.shape)} for the classes; the targets of "
                      f"{tuple(target.shape)} say that they are on the last axis",
                      "transpose the classes to axis 1, or flatten(0, 1) with flattened targets")  # fmt: skip
    elif target.shape == given.shape and not target.is_floating_point():
        hot = bool(((target == 0) | (target == 1)).all())
        yield _breach(call, error, "target_shape",
                      f"{call.name} is given {'one-hot ' if hot else ''}integers of shape {tuple(target.shape)}: it "
                      f"takes one class index for each row, {expected}",
                      "target.argmax(1), or target.float() for class probabilities", culprit="target")  # fmt: skip
    else:
        yield _breach(call, error, "target_shape",
                      f"{call.name} is given targets of shape {tuple(target.shape)} for scores of "
                      f"{tuple(given.shape)}: it takes class indices of shape {expected}",
                      "target.squeeze(-1)" if target.numel() == torch.Size(expected).numel()
                      else "one class index for each row", culprit="target")  # fmt: skip


def _range(call: Call, error: Exception, target: torch.Tensor, count: int) -> Iterator[Breach]:
    ignored = call.given.get("ignore_index", -100)
    kept = target[target != ignored]
    if not kept.numel():
        return
    low, high = int(kept.min()), int(kept.max())
    if low >= 0 and high < count:
        return
    if low < 0:
        hint, repair = f"; ignore_index is {ignored}", f"pass ignore_index={low}, or label what is left out {ignored}"
    elif low == 1 and high == count:
        hint, repair = f": they are 1 to {count}, off by one", "count labels from 0: target - 1"
    else:
        hint, repair = f": the head is {high + 1 - count} too narrow, or labels need a map", "remap labels to 0 ... C-1"
    yield _breach(call, error, "target_out_of_range",
                  f"{call.name} is given labels {low} to {high} and has classes 0 to {count - 1}{hint}", repair,
                  culprit="target", measured=f"labels seen {as_list(torch.unique(kept))}")  # fmt: skip


def _ids(call: Call, error: Exception) -> Iterator[Breach]:
    ids, weight = call.tensor("input"), call.tensor("weight")
    if ids is None or weight is None or not ids.numel() or ids.is_floating_point():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= weight.shape[0]:
        yield _breach(call, error, "ids_out_of_range",
                      f"the embedding{' ' + call.module if call.module else ''} has rows 0 to {weight.shape[0] - 1} "
                      f"and is given ids {low} to {high}",
                      "resize the embedding to the tokenizer (resize_token_embeddings), or map the ids",
                      culprit=call.module or "embedding")  # fmt: skip


def _given(call: Call) -> str:
    tensors = {name: v for name, v in call.given.items() if isinstance(v, torch.Tensor)}
    return ", ".join(f"{n} {tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for n, v in tensors.items())


def _breach(
    call: Call, error: Exception | None, cause: str, summary: str, repair: str, *, culprit: str = "", measured: str = ""
) -> Breach:
    message = "" if error is None else str(error).strip().partition("\n")[0]
    return Breach(
        cause=cause,
        summary=summary,
        measured=measured or _given(call),
        shown_by=f"torch raised: {message[:160]}" if message else "the dtypes of the call",
        culprit=culprit or call.name,
        where=str(call.place),
        repair=repair,
    )
