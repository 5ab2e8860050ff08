"""Variances, rates, and the alignments of CTC."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, as_list, judges
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

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.tracing.provenance import Node


@judges("gaussian_nll_loss")
def variance(call: Call) -> Iterator[Judgement]:
    """gaussian_nll_loss takes the variance, not its logarithm."""
    found, var = behind(call.node("var")), call.tensor("var")
    if found is not None and var is not None and found.node.op in LAYERS and not found.clamped and not found.shifted:
        yield call.judged(
            "log_variance",
            "gaussian_nll_loss takes a variance, and is given the output of a layer, which may be negative",
            measured=f"var in {bounds(var)}",
            shown_by="no exp, softplus or square lies between the layer and the loss",
        )


@judges("poisson_nll_loss")
def rate(call: Call) -> Iterator[Judgement]:
    """poisson_nll_loss takes the logarithm of a rate, or with log_input=False the rate."""
    found, given, target = behind(call.node("input")), call.tensor("input"), call.tensor("target")
    if found is None or given is None or target is None or not given.numel():
        return
    logs = bool(call.given.get("log_input", True))
    if logs and found.node.op in ("exp", "softplus", "relu") and not found.shifted:
        yield call.judged(
            "rate_scale",
            f"poisson_nll_loss takes the logarithm of the rate, and is given the result of {found.node.op}: a rate",
            measured=f"input in {bounds(given)}",
            shown_by=f"its input comes from {found.node.op}, and log_input is True",
            repair=f"give the scores before {found.node.op}, or pass log_input=False",
        )
    elif not logs and bool((given < 0).any()):
        yield call.judged(
            "rate_scale",
            f"poisson_nll_loss with log_input=False is given rates below 0, down to {float(given.min()):.4g}",
            measured=f"input in {bounds(given)}",
            shown_by="the values of its input",
            repair="leave log_input at True, or give exp or softplus of the scores",
        )
    if bool((target < 0).any()):
        yield call.judged(
            "target_out_of_range",
            f"poisson_nll_loss is given targets below 0, down to {float(target.min()):.4g}: counts are expected",
            measured=f"target in {bounds(target)}",
            shown_by="the values of the target",
            repair="give the counts without standardising them",
        )


@judges("ctc_loss")
def ctc_input(call: Call) -> Iterator[Judgement]:
    """The log-probabilities of ctc_loss."""
    given, found = call.tensor("log_probs"), behind(call.node("log_probs"))
    if given is None or not given.numel():
        return
    if sums_to_one(given, -1):
        yield _no_log_probabilities(call, given, "probabilities_as_log_probabilities", "probabilities")
    elif found is not None and found.node.op == "log_softmax":
        if not logs_of_one(given, -1) and axis_of_sums(given, -1) is not None:
            yield over_the_wrong_axis(call, found.node)
    elif exceeds_one(given, -1):
        yield _no_log_probabilities(call, given, "logits_as_log_probabilities", "raw scores")


def _no_log_probabilities(call: Call, given: torch.Tensor, cause: str, what: str) -> Judgement:
    return call.judged(
        cause,
        f"{what} given where log-probabilities are expected: ctc_loss",
        measured=f"input in {bounds(given)}",
        shown_by="the sums over the last axis",
        repair="give log_softmax(scores, dim=-1), as (T, N, C)",
    )


@judges("ctc_loss")
def ctc_axes(call: Call) -> Iterator[Judgement]:
    """Steps of one row must come from one row of the last layer's output, or from one step of all rows."""
    given, found = call.tensor("log_probs"), layout(call.node("log_probs"))
    if given is None or not given.numel():
        return
    if found is None or found.position.dim() != 3 or found.picked or len(found.leading) != 2:
        return
    varying = [at for at in found.coordinates(found.position.select(2, 0)) if not constant(at, 0)]
    if len(varying) > 1:
        shape = tuple(given.shape)
        yield call.judged(
            "class_axis",
            f"the steps that ctc_loss reads as one row come from several rows: {found.layer.shape} was reshaped to "
            f"{shape}, not transposed",
            measured=f"axis 0 of {shape} runs over entries of several rows",
            shown_by="the same reshapes applied to the indices of the entries",
            repair="transpose(0, 1) brings (N, T, C) to (T, N, C)",
        )


@judges("ctc_loss")
def ctc_targets(call: Call) -> Iterator[Judgement]:
    """The labels of ctc_loss and the lengths."""
    given, rows = call.tensor("log_probs"), list(_labels(call))
    if given is None or not given.numel():
        return
    blank = int(call.given.get("blank", 0))
    with_blank = [row for row in rows if blank in row]
    if with_blank:
        yield call.judged(
            "blank_in_targets",
            f"{len(with_blank)} of {len(rows)} targets of ctc_loss hold {blank}, which is the blank",
            measured=f"target {_listed(with_blank[0])} within its length",
            shown_by="the labels within target_lengths",
            repair=f"number the labels without {blank}, or give another blank=",
        )
    yield from _short_inputs(call, rows, given.shape[0])
    classes = given.shape[-1]
    beyond = [row for row in rows if any(label >= classes or label < 0 for label in row)]
    if beyond:
        yield call.judged(
            "target_out_of_range",
            f"ctc_loss is given labels up to {max(map(max, beyond))} and has classes 0 to {classes - 1}",
            measured=f"target {_listed(beyond[0])} within its length",
            shown_by="the labels within target_lengths",
            repair="widen the head, or remap the labels",
        )


def _short_inputs(call: Call, rows: list[list[int]], given: int) -> Iterator[Judgement]:
    """Targets that are longer than their inputs, of which ``given`` frames are there: by their lengths, or in truth.

    The longest row of a batch has all frames, but for rounding. Counted after one more step of downsampling than the
    model makes it has half of them, rounded up, at most.
    """
    lengths = _ints(call.given.get("input_lengths"))
    short = [(row, frames) for row, frames in zip(rows, lengths, strict=False) if frames < _frames_needed(row)]
    if not short:
        return
    row, frames = max(short, key=lambda pair: _frames_needed(pair[0]))
    needed, longest, dropped = _frames_needed(row), max(lengths), bool(call.given.get("zero_infinity"))
    miscounted = needed <= given and longest <= (given + 1) // 2
    if miscounted:
        repair = f"input_lengths is too small: give the lengths after the model (here up to {given})"
    elif needed > given:
        repair = (
            f"the model gives {given} frames, and {needed} are needed: use fewer downsampling steps; or target_lengths "
            "counts padding as labels"
        )
    else:
        repair = (
            "check input_lengths (frames after the model) and target_lengths (labels without padding); if both are "
            "right, leave such rows out"
        )
    yield call.judged(
        "alignment_impossible",
        f"{len(short)} of {len(rows)} targets of ctc_loss are longer than their inputs: no alignment exists, and "
        + ("they are left out" if dropped else "the loss is infinite"),
        level="advice" if dropped and len(short) < len(rows) else "fault",
        measured=f"log_probs has {given} frames, input_lengths says {frames}, and {len(row)} labels need {needed}"
        + (" (a blank stands between equal ones)" if needed > len(row) else ""),
        shown_by="labels and repeats within target_lengths, against input_lengths",
        repair=repair,
        change=_computed_at(call.node("input_lengths")) if miscounted else None,
    )


def _computed_at(node: Node | None) -> Place | None:
    """The line that computed whole numbers; what only moves or casts them is passed over."""
    while node is not None and node.moves and node.parents:
        node = node.parents[0]
    return None if node is None else node.place


def _listed(row: list[int]) -> str:
    return as_list(torch.tensor(row, dtype=torch.float64))


def _frames_needed(row: list[int]) -> int:
    """The frames of the shortest alignment: one for each label, and a blank between two equal ones."""
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
