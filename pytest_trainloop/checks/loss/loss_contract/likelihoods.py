"""Variances, rates, and the alignments of CTC."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call, Level, as_list
from pytest_trainloop.checks.loss.loss_contract.class_targets import over_the_wrong_axis
from pytest_trainloop.checks.loss.loss_contract.value_tests import (
    axis_of_sums,
    bounds,
    exceeds_one,
    logs_of_one,
    sums_to_one,
)
from pytest_trainloop.tracing.provenance_queries import LAYERS, behind, constant, layout

if TYPE_CHECKING:
    from collections.abc import Iterator


def variance(call: Call) -> Iterator[Breach]:
    """gaussian_nll_loss takes the variance, not its logarithm."""
    found = behind(call.node("var"))
    var = call.tensor("var")
    if found is not None and var is not None and found.node.op in LAYERS and not found.clamped and not found.shifted:
        yield _breach(
            call,
            "log_variance",
            "gaussian_nll_loss takes a variance, and is given the output of a layer, which may be negative",
            f"var in {bounds(var)}",
            "no exp, softplus or square lies between the layer and the loss",
            "give exp(log_variance), or softplus of the output",
        )


def rate(call: Call) -> Iterator[Breach]:
    """poisson_nll_loss takes the logarithm of a rate unless it is told log_input=False."""
    found, given, target = behind(call.node("input")), call.tensor("input"), call.tensor("target")
    if found is None or given is None or target is None or not given.numel():
        return
    logs = bool(call.given.get("log_input", True))
    if logs and found.node.op in ("exp", "softplus", "relu") and not found.shifted:
        yield _breach(
            call,
            "rate_scale",
            f"poisson_nll_loss takes the logarithm of the rate, and is given what {found.node.op} gives: a rate",
            f"input in {bounds(given)}",
            f"its input comes from {found.node.op}, and log_input is True",
            "give the scores before it, or pass log_input=False",
        )
    elif not logs and bool((given < 0).any()):
        yield _breach(
            call,
            "rate_scale",
            f"poisson_nll_loss is told log_input=False and given rates below 0, down to {float(given.min()):.4g}",
            f"input in {bounds(given)}",
            "the values of its input",
            "leave log_input at True, or give exp or softplus of the scores",
        )
    if bool((target < 0).any()):
        yield _breach(
            call,
            "target_out_of_range",
            f"poisson_nll_loss is given targets below 0, down to {float(target.min()):.4g}: counts are expected",
            f"target in {bounds(target)}",
            "the values of the target",
            "give counts as they are, without standardising them",
        )


def alignment(call: Call) -> Iterator[Breach]:
    """ctc_loss."""
    given = call.tensor("log_probs")
    if given is None or not given.numel():
        return
    found = behind(call.node("log_probs"))
    if sums_to_one(given, -1):
        yield _input(call, given, "probabilities_as_log_probabilities", "probabilities")
    elif found is not None and found.node.op == "log_softmax":
        if not logs_of_one(given, -1) and axis_of_sums(given, -1) is not None:
            yield over_the_wrong_axis(call, found.node)
    elif exceeds_one(given, -1):
        yield _input(call, given, "logits_as_log_probabilities", "raw scores")
    yield from _axes(call)
    yield from _lengths(call, given)


def _axes(call: Call) -> Iterator[Breach]:
    """Steps of one row must come from one row of the last layer's output, or from one step of all rows."""
    found = layout(call.node("log_probs"))
    if found is None or found.position.dim() != 3 or found.picked or len(found.leading) != 2:
        return
    moving = [at for at in found.coordinates(found.position.select(2, 0)) if not constant(at, 0)]
    if len(moving) > 1:
        yield _breach(
            call,
            "class_axis",
            f"the steps that ctc_loss reads as one row come from several rows: {found.layer.shape} was reshaped to "
            f"{tuple(call.given['log_probs'].shape)}, not transposed",
            f"axis 0 of {tuple(call.given['log_probs'].shape)} runs over entries of several rows",
            "the same moves made with the entries' numbers",
            "transpose(0, 1) brings (N, T, C) to (T, N, C)",
        )


def _input(call: Call, given: torch.Tensor, cause: str, what: str) -> Breach:
    return _breach(
        call,
        cause,
        f"{what} given where log-probabilities are expected: ctc_loss",
        f"input in {bounds(given)}",
        "the sums over the last axis",
        "give log_softmax(scores, dim=-1), as (T, N, C)",
    )


def _lengths(call: Call, given: torch.Tensor) -> Iterator[Breach]:
    rows = list(_labels(call))
    inputs = _ints(call.given.get("input_lengths"))
    blank = int(call.given.get("blank", 0))
    blanks = [n for n, row in enumerate(rows) if blank in row]
    if blanks:
        row = rows[blanks[0]]
        yield _breach(
            call,
            "blank_in_targets",
            f"{len(blanks)} of {len(rows)} targets of ctc_loss hold {blank}, which is the blank",
            f"target {as_list(torch.tensor(row, dtype=torch.float64))} within its length",
            "the labels within target_lengths",
            f"number the labels without {blank}, or give another blank=",
        )
    short = [(n, i) for n, i in enumerate(inputs[: len(rows)]) if i < _needed(rows[n])]
    dropped = bool(call.given.get("zero_infinity")) and len(short) < len(rows)
    if short:
        n, have = short[0]
        yield _breach(
            call,
            "alignment_impossible",
            f"{len(short)} of {len(rows)} targets of ctc_loss are longer than their inputs: no alignment exists, and "
            + ("they are left out" if call.given.get("zero_infinity") else "the loss is infinite"),
            f"{_needed(rows[n])} frames needed for {len(rows[n])} labels, {have} given, of {given.shape[0]}",
            "labels and repeats within target_lengths, against input_lengths",
            "check the lengths (frames after downsampling, labels without padding), or use fewer downsampling steps",
            level="advice" if dropped else "fault",
        )
    classes = given.shape[-1]
    beyond = [row for row in rows if any(label >= classes or label < 0 for label in row)]
    if beyond:
        yield _breach(
            call,
            "target_out_of_range",
            f"ctc_loss is given labels up to {max(map(max, beyond))} and has classes 0 to {classes - 1}",
            f"target {as_list(torch.tensor(beyond[0], dtype=torch.float64))} within its length",
            "the labels within target_lengths",
            "widen the head, or remap the labels",
        )


def _needed(row: list[int]) -> int:
    """Frames that an alignment takes: one for each label, and a blank between two equal ones."""
    return len(row) + sum(a == b for a, b in itertools.pairwise(row))


def _labels(call: Call) -> Iterator[list[int]]:
    targets = call.given.get("targets")
    lengths = _ints(call.given.get("target_lengths"))
    if not isinstance(targets, torch.Tensor):
        return
    values = targets.detach().tolist()
    start = 0
    for n, length in enumerate(lengths):
        if targets.dim() == 2 and n < len(values):
            yield values[n][:length]
        elif targets.dim() == 1:
            yield values[start : start + length]
            start += length


def _ints(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [int(v) for v in value.detach().reshape(-1).tolist()]
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else []


def _breach(
    call: Call, cause: str, summary: str, measured: str, shown_by: str, repair: str, *, level: Level = "fault"
) -> Breach:
    return Breach(
        cause=cause,
        level=level,
        summary=summary,
        measured=measured,
        shown_by=shown_by,
        culprit=call.name,
        where=str(call.place),
        repair=repair,
    )
