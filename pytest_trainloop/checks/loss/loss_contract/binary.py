"""Probabilities and targets of the binary losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call, as_list
from pytest_trainloop.checks.loss.loss_contract.class_targets import over_the_wrong_axis
from pytest_trainloop.checks.loss.loss_contract.value_tests import bounds
from pytest_trainloop.tracing.provenance_queries import LAYERS, Found, behind, inner, is_sigmoid

if TYPE_CHECKING:
    from collections.abc import Iterator

SOFTENED = 1.5
"""Targets up to here are in use for a discriminator's real images (smoothed between 0.7 and 1.2)."""

RARE, MANY = 0.05, 200
"""Share of positive labels below which advice is given, and the labels it takes."""


def probabilities(call: Call) -> Iterator[Breach]:
    """The input of binary_cross_entropy."""
    found, given = behind(call.node("input")), call.tensor("input")
    if found is None or given is None:
        return
    if raw(found):
        yield _raw(call)
    elif found.node.op == "softmax" and found.node.dim == 0 and call.rows == found.node.shape[0] > 1:
        yield over_the_wrong_axis(call, found.node)
    yield from _saturated(call)


def logarithm(call: Call) -> Iterator[Breach]:
    """A binary cross entropy written out: the logarithm of raw scores, clamped into (0, 1)."""
    found = behind(call.node("input"))
    if found is not None and found.high <= 1 and raw(found):
        yield _raw(call)


def raw(found: Found) -> bool:
    """Whether it is the output of a layer, cut off below 0 and above 1, that is taken for a probability."""
    source, cut = found.node, found.low >= 0 and found.high <= 1
    if source.op in ("relu", "relu6") and not found.shifted and found.scale == 1 and found.high <= 1:
        under = behind(inner(source))
        cut, source = True, under.node if under is not None and not under.shifted else source
    of_weights = source.op in LAYERS and any(p.parameter for p in source.parents)
    return cut and of_weights and not source.unit and not found.shifted and found.scale == 1


def _raw(call: Call) -> Breach:
    given = call.tensor("input")
    return Breach(
        cause="logits_as_probabilities",
        summary=f"raw scores given where probabilities are expected: {call.name} takes the output of the last layer, "
        "cut off at 0 and 1",
        measured=f"input in {bounds(given)}" if given is not None else "",
        shown_by="no sigmoid lies between the last layer and the loss",
        culprit=call.name,
        where=str(call.place),
        repair="use binary_cross_entropy_with_logits on the scores as they are",
    )


def _saturated(call: Call) -> Iterator[Breach]:
    """Probabilities of exactly 0 or 1 that are wrong: the loss is 100 there, and its gradient nothing."""
    given, target = call.tensor("input"), call.tensor("target")
    found = behind(call.node("input"))
    if given is None or target is None or given.shape != target.shape or found is None or not is_sigmoid(found.node):
        return
    wrong = ((given == 0) & (target > 0)) | ((given == 1) & (target < 1))
    share = float(wrong.double().mean()) if wrong.numel() else 0.0
    if not share or call.number > 0:
        return
    yield Breach(
        cause="probabilities_saturated",
        summary=f"{share:.0%} of the probabilities given to binary_cross_entropy are exactly 0 or 1, and wrong, before "
        "the first step: their loss is cut off at 100 and their gradient is nothing",
        measured=f"{int(wrong.sum())} of {wrong.numel()} entries; input in {bounds(given)}",
        shown_by="the values of the sigmoid at the first call",
        culprit="sigmoid",
        where=str(call.place),
        repair="use binary_cross_entropy_with_logits, which keeps the gradient; look at the size of the scores",
    )


def targets(call: Call) -> Iterator[Breach]:
    """Targets outside of [0, 1]: the loss has no lower bound there."""
    target = call.tensor("target")
    if target is None or not target.numel():
        return
    outside = (target < 0) | (target > 1)
    counts = call.counts()
    if counts is not None and counts.shape == outside.shape:
        outside = outside & counts
    weight = call.tensor("weight")
    if weight is not None and weight.numel() == outside.numel():
        outside = outside & (weight.reshape(outside.shape) != 0)
    bad = target[outside]
    if bad.numel():
        softened = bool((bad > 1).all() and (bad <= SOFTENED).all() and (bad != bad.round()).any())
        yield _outside(call, target, bad, softened=softened)
    elif call.given.get("pos_weight") is None and call.given.get("weight") is None:
        yield from _imbalance(call, target)


def _outside(call: Call, target: torch.Tensor, bad: torch.Tensor, *, softened: bool) -> Breach:
    values = torch.unique(target)
    signs = values.numel() == 2 and values.tolist() == [-1.0, 1.0]
    reach = f"targets reach from {float(target.min()):.4g} to {float(target.max()):.4g}"
    what = "labels are -1 and 1" if signs else reach
    return Breach(
        cause="target_outside_unit",
        level="advice" if softened else "fault",
        summary=f"{what}; {call.name} expects targets in [0, 1], and has no lower bound for others",
        measured=f"{bad.numel()} of {target.numel()} targets outside of [0, 1]: {as_list(bad)}",
        shown_by="the targets that count in the loss",
        culprit="target",
        where=str(call.place),
        repair="map the labels: (y + 1) / 2" if signs else "bring targets to [0, 1]; for other values use mse_loss",
    )


def _imbalance(call: Call, target: torch.Tensor) -> Iterator[Breach]:
    share = float((target > 0.5).double().mean())
    if target.numel() >= MANY and 0 < share < RARE:
        yield Breach(
            cause="classes_imbalanced",
            level="advice",
            always=True,
            summary=f"{share:.1%} of the labels given to {call.name} are positive, and no pos_weight is given",
            measured=f"{target.numel()} labels a call",
            shown_by="the targets of every watched call",
            culprit=call.name,
            where=str(call.place),
            repair=f"nothing, if that is meant; else pos_weight=negatives / positives (here {1 / share - 1:.0f})",
        )


def hot_lists(call: Call) -> Iterator[Breach]:
    """The target of multilabel_margin_loss lists the classes, and ends with -1."""
    target = call.tensor("target")
    if target is None or target.dim() == 0 or target.shape[-1] < 3 or bool((target < 0).any()):
        return
    rows = target.reshape(-1, target.shape[-1])
    if bool((rows <= 1).all()):
        yield Breach(
            cause="index_list_expected",
            summary="multilabel_margin_loss is given zeros and ones, and reads lists of class indices that end with -1",
            measured=f"target {as_list(rows[0])}",
            shown_by="no -1 in any row, and the same indices again and again",
            culprit="target",
            where=str(call.place),
            repair="list the classes and fill up with -1; for zeros and ones use multilabel_soft_margin_loss",
            always=True,
        )


def signs(call: Call) -> Iterator[Breach]:
    """Losses whose target is 1 or -1."""
    target = call.tensor("target")
    if target is None or not target.numel():
        return
    zeros = (target == 0) & (target != 1)
    counts = call.counts()
    if counts is not None and counts.shape == zeros.shape:
        zeros = zeros & counts
    if bool(zeros.any()) and not bool((target < 0).any()):
        yield Breach(
            cause="signs_expected",
            summary=f"{call.name} is given targets of 0: it expects 1 and -1",
            measured=f"{int(zeros.sum())} of {target.numel()} targets are 0: {as_list(target)}",
            shown_by="the targets; what has target 0 is not pushed apart",
            culprit="target",
            where=str(call.place),
            repair="map the labels: 2 * y - 1",
            always=True,
        )
