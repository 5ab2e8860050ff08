"""The arguments of kl_div: log-probabilities first, then probabilities (or their logarithms, if it is told)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call
from pytest_trainloop.checks.loss.loss_contract.class_targets import over_the_wrong_axis, softened_twice, twice_softened
from pytest_trainloop.checks.loss.loss_contract.value_tests import bounds, logs_of_one, sums_to_one
from pytest_trainloop.recording.torch_names import SOFTMAXES
from pytest_trainloop.tracing.provenance_queries import LAYERS, Found, across_rows, behind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.tracing.provenance import Node


def divergence(call: Call) -> Iterator[Breach]:
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or not given.numel() or not given.dim():
        return
    axes = _axes(given)
    logs = bool(call.given.get("log_target"))
    swapped = sums_to_one(given, -1) and (logs_of_one(target, -1) or bool((target < 0).any()))
    if swapped and not logs:
        yield _swapped(call)
        return
    yield from _input(call, given, axes)
    yield from _target(call, target, logs=logs)
    yield from _advice(call, given)
    yield from hot(call, call.node("input"), call.node("target"))


def _axes(given: torch.Tensor) -> list[int]:
    return [d for d in range(given.dim()) if given.shape[d] > 1]


def _input(call: Call, given: torch.Tensor, axes: list[int]) -> Iterator[Breach]:
    found = behind(call.node("input"))
    named = "" if found is None else found.node.op
    if any(sums_to_one(given, d) for d in axes):
        yield _breach(
            call,
            "probabilities_as_log_probabilities",
            "probabilities given where log-probabilities are expected: the input of kl_div",
            "its rows sum to 1",
            "give log_softmax(scores) as input",
        )
    elif named == "softmax":
        yield _breach(
            call,
            "probabilities_as_log_probabilities",
            "probabilities given where log-probabilities are expected: the input of kl_div comes from softmax",
            "nothing but moved, cast or scaled entries lies between",
            "give log_softmax(scores) as input",
        )
    elif found is not None and named in LAYERS and not found.clamped and bool((given > 0).any()):
        yield _breach(
            call,
            "logits_as_log_probabilities",
            "raw scores given where log-probabilities are expected: the input of kl_div",
            "it comes from the last layer, and no axis is normalised",
            "give log_softmax(scores, dim=-1) as input",
        )
    elif found is not None and named == "log_softmax" and found.scale == 1:
        yield from _axis(call, given, found)


def _axis(call: Call, given: torch.Tensor, found: Found) -> Iterator[Breach]:
    """Both sides must be distributions over the same axis, and over classes, not over examples."""
    target, place = call.tensor("target"), call.place
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
        one = f"the input sums to 1 along axis {mine}, the target along {theirs}"
        yield Breach(
            cause="wrong_axis",
            summary="the input of kl_div is normalised over the examples"
            if across
            else "the two sides of kl_div are distributions over different axes",
            measured=one,
            shown_by="the sums along each axis",
            culprit="log_softmax",
            where=str(found.node.place or place),
            repair="take both softmaxes along the class axis (dim=-1)",
        )


def _target(call: Call, target: torch.Tensor, *, logs: bool) -> Iterator[Breach]:
    if not target.numel():
        return
    if not logs and bool((target < 0).any()):
        named = behind(call.node("target"))
        raw = named is not None and named.node.op in LAYERS
        yield _breach(
            call,
            "logits_as_probabilities" if raw else "log_target_mismatch",
            f"kl_div is given targets below 0, down to {float(target.min()):.4g}: "
            + ("raw scores, where probabilities are expected" if raw else "log-probabilities need log_target=True"),
            f"target in {bounds(target)}",
            "take the softmax of the teacher's scores" if raw else "pass log_target=True, or give exp() of it",
        )
    elif logs and bool((target >= 0).all()) and any(sums_to_one(target, d) for d in _axes(target)):
        yield _breach(
            call,
            "log_target_mismatch",
            "kl_div is told log_target=True and given probabilities",
            "the target's rows sum to 1",
            "leave log_target out, or give the target's log_softmax",
        )


def _swapped(call: Call) -> Breach:
    return _breach(
        call,
        "arguments_swapped",
        "the arguments of kl_div are swapped: it takes log-probabilities first, then probabilities",
        "the first sums to 1 in every row, the second holds logarithms",
        "kl_div(log_softmax(student), softmax(teacher), reduction='batchmean')",
    )


def _advice(call: Call, given: torch.Tensor) -> Iterator[Breach]:
    side, source = call.given.get("target"), behind(call.node("target"))
    if source is not None and softened_twice(source.node):
        yield twice_softened(call)
    if isinstance(side, torch.Tensor) and side.requires_grad and not call.given["input"].requires_grad:
        yield Breach(
            cause="arguments_swapped",
            level="advice",
            summary="kl_div gets its gradient through the target only: this is the reverse divergence",
            measured="the input has no history, the target has",
            shown_by="which of the two arguments requires grad",
            culprit=call.name,
            where=str(call.place),
            repair="nothing, if the reverse is meant; else kl_div(log_softmax(student), softmax(teacher))",
        )
    if call.reduction == "mean" and given.dim() > 1:
        yield Breach(
            cause="mean_over_elements",
            level="advice",
            summary=f"kl_div(reduction='mean') divides by all {given.numel()} entries, not by the rows",
            measured=f"{given.shape[-1]} times less than the divergence of a row",
            shown_by="the reduction of the call",
            culprit=call.name,
            where=str(call.place),
            repair="reduction='batchmean' is the divergence as it is defined",
        )


def hot(call: Call, *nodes: Node | None) -> Iterator[Breach]:
    """Distillation whose two sides are multiplied by a temperature above 1, which makes them sharper, not softer."""
    sides = [behind(node) for node in nodes]
    inner = [behind(s.node.parents[0]) for s in sides if s is not None and s.node.op in SOFTMAXES]
    scaled = [i for i in inner if i is not None and i.multiplied and i.scale > SHARPER and i.node.op in LAYERS]
    side = "a product" if call.name == "product" else call.name
    if len(scaled) == 2 and scaled[0].scale == scaled[1].scale and not any(i.node.unit for i in scaled):
        yield _breach(
            call,
            "temperature_inverted",
            f"both sides of {side} are softmaxes of scores multiplied by {scaled[0].scale:g}: the temperature is "
            "applied the wrong way round, and makes them sharper",
            "the constants between the last layers and the softmaxes",
            f"divide the scores by the temperature: scores / {scaled[0].scale:g}",
        )


SHARPER = 1.5
"""Factor on the scores of both sides from which they are multiplied by a temperature."""


def _breach(call: Call, cause: str, summary: str, shown_by: str, repair: str) -> Breach:
    given = call.tensor("input")
    return Breach(
        cause=cause,
        summary=summary,
        measured=f"input in {bounds(given)}, value {float(call.out.detach().double().mean()):.4g}"
        if given is not None
        else "",
        shown_by=shown_by,
        culprit=call.name,
        where=str(call.place),
        repair=repair,
        always=True,
    )
