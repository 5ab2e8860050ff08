"""The arguments of kl_div: log-probabilities, then probabilities (or with ``log_target`` their logarithms)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, judges
from pytest_trainloop.checks.loss.loss_contract.class_targets import over_the_wrong_axis, softmax_of_softmax
from pytest_trainloop.checks.loss.loss_contract.value_tests import bounds, logs_of_one, sums_to_one
from pytest_trainloop.recording.torch_names import SOFTMAXES
from pytest_trainloop.tracing.provenance_queries import LAYERS, Found, across_rows, behind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.tracing.provenance import Node

SHARPER = 1.5
"""Factor on the scores of both sides from which it is a temperature."""


@judges("kl_div")
def divergence(call: Call) -> Iterator[Judgement]:
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or not given.numel() or not given.dim():
        return
    logs = bool(call.given.get("log_target"))
    swapped = sums_to_one(given, -1) and (logs_of_one(target, -1) or bool((target < 0).any()))
    if swapped and not logs:
        yield _judged(
            call,
            "arguments_swapped",
            "the arguments of kl_div are swapped: it takes log-probabilities first, then probabilities",
            "the first sums to 1 in every row, the second holds logarithms",
        )
        return
    yield from _input(call, given)
    yield from _target(call, target, logs=logs)
    yield from _advice(call, given)
    yield from sharpened(call, call.node("input"), call.node("target"))


def _sums_to_one_somewhere(tensor: torch.Tensor) -> bool:
    return any(sums_to_one(tensor, d) for d in range(tensor.dim()) if tensor.shape[d] > 1)


def _input(call: Call, given: torch.Tensor) -> Iterator[Judgement]:
    found = behind(call.node("input"))
    named = "" if found is None else found.node.op
    if _sums_to_one_somewhere(given):
        yield _judged(
            call,
            "probabilities_as_log_probabilities",
            "probabilities given where log-probabilities are expected: the input of kl_div",
            "its rows sum to 1",
        )
    elif named == "softmax":
        yield _judged(
            call,
            "probabilities_as_log_probabilities",
            "probabilities given where log-probabilities are expected: the input of kl_div comes from softmax",
            "only casts, reshapes and constant factors lie between",
        )
    elif found is not None and named in LAYERS and not found.clamped and bool((given > 0).any()):
        yield _judged(
            call,
            "logits_as_log_probabilities",
            "raw scores given where log-probabilities are expected: the input of kl_div",
            "it comes from the last layer, and no axis is normalised",
        )
    elif found is not None and named == "log_softmax" and found.scale == 1:
        yield from _different_axes(call, given, found)


def _different_axes(call: Call, given: torch.Tensor, found: Found) -> Iterator[Judgement]:
    """Sides that are distributions over different axes, or over examples in place of classes."""
    target = call.tensor("target")
    if target is None or target.shape != given.shape:
        return
    if not any(logs_of_one(given, d) for d in range(given.dim())):
        if sums_to_one(target, -1) and across_rows(found.node):
            yield over_the_wrong_axis(call, found.node)
        return
    mine = [d for d in range(given.dim()) if logs_of_one(given, d)]
    theirs = [d for d in range(target.dim()) if sums_to_one(target, d) or logs_of_one(target, d)]
    across = found.node.dim == 0 and call.rows == given.shape[0] and across_rows(found.node)
    if (mine and theirs and not set(mine) & set(theirs)) or across:
        yield call.judged(
            "wrong_axis",
            "the input of kl_div is normalised over the examples"
            if across
            else "the two sides of kl_div are distributions over different axes",
            measured=f"the input sums to 1 along axis {mine}, the target along {theirs}",
            shown_by="the sums along each axis",
            culprit="log_softmax",
            source=found.node,
            repair="take both softmaxes along the class axis (dim=-1)",
        )


def _target(call: Call, target: torch.Tensor, *, logs: bool) -> Iterator[Judgement]:
    if not target.numel():
        return
    if not logs and bool((target < 0).any()):
        source = behind(call.node("target"))
        below = f"kl_div is given targets below 0, down to {float(target.min()):.4g}"
        if source is not None and source.node.op in LAYERS:
            cause, summary = "logits_as_probabilities", f"{below}: raw scores, where probabilities are expected"
            repair = "take the softmax of the teacher's scores"
        else:
            cause, summary, repair = "log_target_mismatch", f"{below}: log-probabilities need log_target=True", ""
        yield _judged(call, cause, summary, f"target in {bounds(target)}", repair)
    elif logs and bool((target >= 0).all()) and _sums_to_one_somewhere(target):
        yield _judged(
            call,
            "log_target_mismatch",
            "kl_div is given probabilities with log_target=True",
            "the target's rows sum to 1",
            "leave log_target out, or give the target's log_softmax",
        )


def _advice(call: Call, given: torch.Tensor) -> Iterator[Judgement]:
    yield from softmax_of_softmax(call)
    target = call.given.get("target")
    if isinstance(target, torch.Tensor) and target.requires_grad and not call.given["input"].requires_grad:
        yield call.judged(
            "arguments_swapped",
            "the gradient of kl_div goes through the target only: this is the reverse divergence",
            level="advice",
            measured="the input has no history, the target has",
            shown_by="which of the two arguments requires grad",
            repair="kl_div(log_softmax(student), softmax(teacher))",
        )
    if call.reduction == "mean" and given.dim() > 1:
        yield call.judged(
            "mean_over_elements",
            f"kl_div(reduction='mean') divides by all {given.numel()} entries, not by the rows",
            level="advice",
            measured=f"{given.shape[-1]} times less than the divergence of a row",
            shown_by="the reduction of the call",
        )


def sharpened(call: Call, *nodes: Node | None) -> Iterator[Judgement]:
    """Distillation whose two sides are multiplied by a temperature above 1, which makes them sharper, not softer."""
    sides = [behind(node) for node in nodes]
    inner = [behind(s.node.parents[0]) for s in sides if s is not None and s.node.op in SOFTMAXES]
    scaled = [i for i in inner if i is not None and i.multiplied and i.scale > SHARPER and i.node.op in LAYERS]
    if len(scaled) == 2 and scaled[0].scale == scaled[1].scale and not any(i.node.unit for i in scaled):
        yield _judged(
            call,
            "temperature_inverted",
            f"both sides of {'a product' if call.name == 'product' else call.name} are softmaxes of scores multiplied "
            f"by {scaled[0].scale:g}: the temperature is a factor in place of a divisor, and makes them sharper",
            "the constants between the last layers and the softmaxes",
            f"divide the scores by the temperature: scores / {scaled[0].scale:g}",
        )


def _judged(call: Call, cause: str, summary: str, shown_by: str, repair: str = "") -> Judgement:
    given = call.tensor("input")
    value = float(call.out.detach().double().mean())
    measured = "" if given is None else f"input in {bounds(given)}, value {value:.4g}"
    return call.judged(cause, summary, in_every_call=True, measured=measured, shown_by=shown_by, repair=repair)
