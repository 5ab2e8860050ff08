"""Probabilities and targets of the binary losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, as_list, judges
from pytest_trainloop.checks.loss.loss_contract.class_targets import over_the_wrong_axis
from pytest_trainloop.checks.loss.loss_contract.value_tests import bounds
from pytest_trainloop.losses.table.lookup import of_torch
from pytest_trainloop.tracing.provenance_queries import LAYERS, Found, behind, inner, is_sigmoid
from pytest_trainloop.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator

SOFTENED = 1.5
"""Targets up to here are in use for a discriminator's real images (smoothed between 0.7 and 1.2)."""

RARE, MANY = 0.05, 200
"""Advice is given below this share of positive labels, from this number of labels on."""


@judges("binary_cross_entropy")
def probabilities(call: Call) -> Iterator[Judgement]:
    """The input of binary_cross_entropy."""
    found, given = behind(call.node("input")), call.tensor("input")
    if found is None or given is None:
        return
    if _is_clamped_layer(found):
        yield _raw_scores(call)
    elif found.node.op == "softmax" and found.node.dim == 0 and call.rows == found.node.shape[0] > 1:
        yield over_the_wrong_axis(call, found.node)
    yield from _saturated(call, given)


@judges("log")
def logarithm(call: Call) -> Iterator[Judgement]:
    """A binary cross entropy written out: the logarithm of raw scores, clamped into (0, 1)."""
    found = behind(call.node("input"))
    if found is not None and found.high <= 1 and _is_clamped_layer(found):
        yield _raw_scores(call)


def _is_clamped_layer(found: Found) -> bool:
    """Whether it is the output of a layer, clamped to [0, 1] and taken for a probability."""
    source, clamped = found.node, found.low >= 0 and found.high <= 1
    if source.op in ("relu", "relu6") and not found.shifted and found.scale == 1 and found.high <= 1:
        under = behind(inner(source))
        clamped, source = True, under.node if under is not None and not under.shifted else source
    of_weights = source.op in LAYERS and any(p.parameter for p in source.parents)
    return clamped and of_weights and not source.unit and not found.shifted and found.scale == 1


def _raw_scores(call: Call) -> Judgement:
    given = call.tensor("input")
    return call.judged(
        "logits_as_probabilities",
        f"raw scores given where probabilities are expected: {call.name} takes the output of the last layer, clamped "
        "to [0, 1]",
        measured="" if given is None else f"input in {bounds(given)}",
        shown_by="no sigmoid lies between the last layer and the loss",
    )


def _saturated(call: Call, given: torch.Tensor) -> Iterator[Judgement]:
    """Probabilities of exactly 0 or 1 that are wrong: the loss is 100 there, and its gradient 0."""
    target, found = call.tensor("target"), behind(call.node("input"))
    if target is None or given.shape != target.shape or found is None or not is_sigmoid(found.node):
        return
    wrong = ((given == 0) & (target > 0)) | ((given == 1) & (target < 1))
    if call.number == 0 and bool(wrong.any()):
        when = f"after {count(call.steps, 'optimizer step')}" if call.steps else "before the first optimizer step"
        yield call.judged(
            "probabilities_saturated",
            f"{float(wrong.double().mean()):.0%} of the probabilities given to binary_cross_entropy are exactly 0 or 1 "
            f"and wrong {when}: their loss is limited to 100 and their gradient is 0",
            level="advice" if call.steps else "fault",  # training may have made them so
            measured=f"{int(wrong.sum())} of {wrong.numel()} entries; input in {bounds(given)}",
            shown_by="the values of the sigmoid at the first call of this line",
            culprit="sigmoid",
        )


@judges(*of_torch("binary"))
def targets(call: Call) -> Iterator[Judgement]:
    """Targets outside of [0, 1]: the loss has no lower bound there."""
    target = call.tensor("target")
    if target is None or not target.numel():
        return
    outside = (target < 0) | (target > 1)
    counted = call.counted()
    if counted is not None and counted.shape == outside.shape:
        outside = outside & counted
    weight = call.tensor("weight")
    if weight is not None and weight.numel() == outside.numel():
        outside = outside & (weight.reshape(outside.shape) != 0)
    if bool(outside.any()):
        yield _outside(call, target, target[outside])
    elif call.given.get("pos_weight") is None and call.given.get("weight") is None:
        yield from _imbalance(call, target)


def _outside(call: Call, target: torch.Tensor, bad: torch.Tensor) -> Judgement:
    softened = bool((bad > 1).all() and (bad <= SOFTENED).all() and (bad != bad.round()).any())
    signs = torch.unique(target).tolist() == [-1.0, 1.0]
    reach = f"targets reach from {float(target.min()):.4g} to {float(target.max()):.4g}"
    return call.judged(
        "target_outside_unit",
        f"{'labels are -1 and 1' if signs else reach}; {call.name} expects targets in [0, 1], and has no lower bound "
        "for others",
        level="advice" if softened else "fault",
        measured=f"{bad.numel()} of {target.numel()} targets outside of [0, 1]: {as_list(bad)}",
        shown_by="the targets that count in the loss",
        culprit="target",
        repair="map the labels: (y + 1) / 2" if signs else "",
    )


def _imbalance(call: Call, target: torch.Tensor) -> Iterator[Judgement]:
    share = float((target > 0.5).double().mean())
    if target.numel() >= MANY and 0 < share < RARE:
        yield call.judged(
            "classes_imbalanced",
            f"{share:.1%} of the labels given to {call.name} are positive, and no pos_weight is given",
            level="advice",
            in_every_call=True,
            measured=f"{int((target > 0.5).sum())} of {target.numel()} labels of a call",
            shown_by="the targets of every recorded call",
            repair=f"pos_weight=negatives / positives (here {1 / share - 1:.0f})",
        )


@judges("multilabel_margin_loss")
def zeros_and_ones(call: Call) -> Iterator[Judgement]:
    """The target of multilabel_margin_loss lists the classes, and ends with -1."""
    target = call.tensor("target")
    if target is None or target.dim() == 0 or target.shape[-1] < 3 or bool((target < 0).any()):
        return
    rows = target.reshape(-1, target.shape[-1])
    if bool((rows <= 1).all()):
        yield call.judged(
            "index_list_expected",
            "multilabel_margin_loss is given zeros and ones, and reads lists of class indices that end with -1",
            in_every_call=True,
            measured=f"target {as_list(rows[0])}",
            shown_by="no row holds -1, and the same indices repeat",
            culprit="target",
        )


@judges(*of_torch("binary", labels=(-1.0, 1.0)))
def signs(call: Call) -> Iterator[Judgement]:
    """Losses whose target is 1 or -1."""
    target = call.tensor("target")
    if target is None or not target.numel():
        return
    zeros = (target == 0) & (target != 1)
    counted = call.counted()
    if counted is not None and counted.shape == zeros.shape:
        zeros = zeros & counted
    if bool(zeros.any()) and not bool((target < 0).any()):
        yield call.judged(
            "signs_expected",
            f"{call.name} is given targets of 0: it expects 1 and -1",
            in_every_call=True,
            measured=f"{int(zeros.sum())} of {target.numel()} targets are 0: {as_list(target)}",
            shown_by="the targets; pairs with target 0 are not pushed apart",
            culprit="target",
        )
