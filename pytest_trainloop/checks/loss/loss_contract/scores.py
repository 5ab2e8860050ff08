"""The input where scores (logits) are expected: by a cross entropy, a log-softmax, a binary loss with logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, at_line, in_module, judges
from pytest_trainloop.checks.loss.loss_contract.value_tests import bounds, logs_of_one, sums_to_one
from pytest_trainloop.recording.torch_names import HALF_OPEN_ACTIVATIONS, NEGATIONS, PRODUCTS
from pytest_trainloop.tracing.provenance_queries import (
    LAYERS,
    Found,
    ancestors,
    behind,
    by_weights,
    inner,
    is_sigmoid,
    layout,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.tracing.provenance import Node

WIDEST = 2.0
"""A range of scores up to which no class can be predicted with confidence: with two classes, the loss cannot fall below
about exp(-2). Soft caps (30 tanh(x / 30)) are far wider."""

COLD = 0.5
"""Factor on cosines below which their whole range is less than 1."""

_NOTHING_BETWEEN = "only casts, reshapes and constant factors lie between"

_REPAIR = {
    "log_softmax": "take log_softmax of the scores, once",
    "logsumexp": "take logsumexp of the scores as they are",
}


@judges("cross_entropy", "log_softmax")
def classes(call: Call) -> Iterator[Judgement]:
    """Scores of one class among several: cross_entropy, log_softmax, logsumexp."""
    found, given = behind(call.node("input")), call.tensor("input")
    if given is None or found is None or not given.is_floating_point():
        return
    axis = class_axis(call)
    count = given.shape[axis] if given.dim() else 1
    if count < 2:
        yield from _single_class(call)
        return
    source = found.node
    if found.learned:
        yield from _temperature(call, found)
        return
    repair = _REPAIR.get(call.name, f"give {call.name} the scores as they are: it takes the softmax itself")
    if (source.op == "softmax" or is_sigmoid(source)) and abs(found.scale) <= WIDEST:
        yield _probabilities(call, source, count, repair)
    elif source.op == "tanh" and 2 * abs(found.scale) <= WIDEST:
        yield _activation(call, source, f"no score leaves [-{found.scale:g}, {found.scale:g}]", repair)
    elif source.op in HALF_OPEN_ACTIVATIONS and found.scale > 0 and not found.shifted:
        yield _activation(call, source, "no class can be given a score below 0", repair)
    elif found.low >= 0 and source.op in LAYERS and not found.shifted:
        yield _clamped(call, repair)
    elif found.dropped is not None and source.op in LAYERS and by_weights(source):
        yield _dropout(call, found.dropped)
    elif source.op in ("log_softmax", "log_sigmoid") and call.name == "cross_entropy":
        if source.op == "log_softmax" and found.scale == 1 and not found.shifted and logs_of_one(given, axis):
            yield call.judged(
                "log_probabilities_as_logits",
                f"cross_entropy is given log-probabilities (of {in_module(source)}): harmless, since their log-softmax "
                "is the same",
                level="advice",
                measured="the exponentials of every row sum to 1",
                shown_by=f"its input comes from log_softmax{at_line(source)}",
                culprit=in_module(source),
                source=source,
            )
    elif found.scale == 1 and sums_to_one(given, axis):
        yield call.judged(
            "probabilities_as_logits",
            f"probabilities given where logits are expected: every row given to {call.name} sums to 1",
            in_every_call=True,
            measured=_lower_bound(call, count),
            shown_by="in every call all entries are at least 0, and all rows sum to 1 to rounding",
            repair=repair,
        )
    yield from _temperature(call, found)


@judges("logsumexp")
def normaliser(call: Call) -> Iterator[Judgement]:
    """A log-sum-exp next to the score of the correct class: a cross entropy written out.

    The gradient at its input then sums to 0 over the classes; that of a soft maximum used for itself does not.
    """
    arrived, axis = call.arrived, call.given.get("dim")
    if arrived is None or not isinstance(axis, int):
        return
    sums, sizes = arrived.double().sum(axis).abs(), arrived.double().abs().sum(axis)
    if bool((sums <= 1e-3 * sizes).all()) and bool((sizes > 0).any()):
        yield from classes(call)


@judges("softplus")
def softplus(call: Call) -> Iterator[Judgement]:
    """A binary cross entropy in its stable form, softplus(s) - y s, of probabilities in place of scores."""
    yield from _sigmoid_again(call, call.node("input"), "give softplus the scores as they are")


@judges("log1p")
def softplus_written_out(call: Call) -> Iterator[Judgement]:
    """The same with log1p(exp(-|s|)) in place of softplus."""
    node = call.node("input")
    for ops in ({"exp"}, NEGATIONS, {"abs"}):
        if node is None or node.op not in ops:
            return
        node = inner(node)
    yield from _sigmoid_again(call, node, "write it with the scores as they are")


def _sigmoid_again(call: Call, node: Node | None, repair: str) -> Iterator[Judgement]:
    found = behind(node)
    if found is not None and is_sigmoid(found.node) and not found.shifted and not found.learned:
        yield _normalised_twice(call, found.node, repair)


@judges("binary_cross_entropy_with_logits", "multilabel_soft_margin_loss", "log_sigmoid")
def binary(call: Call) -> Iterator[Judgement]:
    """Scores of yes or no: binary_cross_entropy_with_logits, multilabel_soft_margin_loss, logsigmoid."""
    found = behind(call.node("input"))
    if found is None or found.learned:
        return
    source = found.node
    repair = f"give {call.name} the scores as they are: it takes the sigmoid itself"
    if (is_sigmoid(source) or source.op in ("softmax", "hardsigmoid")) and abs(found.scale) <= WIDEST:
        if not (found.shifted and found.scale != 1):  # 2 s - 1 is centred again
            yield _normalised_twice(call, source, repair)
    elif source.op in HALF_OPEN_ACTIVATIONS and found.scale > 0 and not found.shifted:
        yield _activation(call, source, "no score can be below 0, and no probability below 0.5", repair)
    elif found.low >= 0 and source.op in LAYERS and not found.shifted:
        yield _clamped(call, repair)
    elif source.op == "tanh" and 2 * abs(found.scale) <= WIDEST and not found.shifted:
        yield _activation(call, source, f"no score leaves [-{found.scale:g}, {found.scale:g}]", repair)
    elif found.dropped is not None and source.op in LAYERS and by_weights(source):
        yield _dropout(call, found.dropped)


@judges("binary_cross_entropy", "log")
def twice(call: Call) -> Iterator[Judgement]:
    """Probabilities of probabilities: the input of a binary cross entropy, or of a logarithm."""
    found = behind(call.node("input"))
    if found is None:
        return
    outer = found.node
    under = behind(inner(outer)) if outer.op == "softmax" or is_sigmoid(outer) else None
    if under is None or abs(under.scale) > WIDEST:
        return
    source = under.node
    if outer.op == "softmax" and source.op == "softmax" and source.dim == outer.dim and source.shape == outer.shape:
        yield _normalised_twice(call, source, "take the softmax once")
    elif is_sigmoid(outer) and (is_sigmoid(source) or source.op == "softmax"):
        yield _normalised_twice(call, source, "take the sigmoid once")
    elif is_sigmoid(outer) and source.op in ("relu", "relu6") and under.scale > 0 and not under.shifted:
        yield _activation(call, source, "no probability can be below 0.5", "the sigmoid takes the scores as they are")


def class_axis(call: Call) -> int:
    """The axis of the classes in the input of a call."""
    given = call.given.get("dim")
    if call.name in ("log_softmax", "logsumexp"):
        return given if isinstance(given, int) else -1
    if call.known is not None:
        return call.known.contract.class_dim
    tensor = call.tensor("input")
    return 1 if tensor is not None and tensor.dim() > 1 else 0


def _range(call: Call) -> str:
    given = call.tensor("input")
    return "" if given is None else f"input in {bounds(given)}"


def _lower_bound(call: Call, count: int) -> str:
    """The loss, and the least that it can be with probabilities of ``count`` classes in place of scores."""
    least = math.log(1 + (count - 1) * math.exp(-1))
    value = f"loss {float(call.out.detach().double().mean()):.4g}; " if call.name == "cross_entropy" else ""
    return f"{value}over {count} classes it cannot fall below {least:.4g}, however confident the model is"


def _probabilities(call: Call, source: Node, count: int, repair: str) -> Judgement:
    name = "sigmoid" if is_sigmoid(source) else source.op
    culprit = f"{name} in {source.module}" if source.module else name
    return call.judged(
        "probabilities_as_logits",
        f"probabilities given where logits are expected: {call.name} is given the result of {culprit}",
        measured=_lower_bound(call, count),
        shown_by=f"its input comes from {source.op}, and {_NOTHING_BETWEEN}{at_line(source)}",
        culprit=culprit,
        source=source,
        repair=repair,
    )


def _normalised_twice(call: Call, source: Node, repair: str) -> Judgement:
    return call.judged(
        "probabilities_as_logits",
        f"probabilities given where logits are expected: the input of {call.name} comes from {in_module(source)}",
        measured=_range(call),
        shown_by=f"{_NOTHING_BETWEEN}{at_line(source)}",
        culprit=in_module(source),
        source=source,
        repair=repair,
    )


def _activation(call: Call, source: Node, why: str, repair: str) -> Judgement:
    return call.judged(
        "activation_on_logits",
        f"{in_module(source)} is applied to the scores given to {call.name}: {why}",
        measured=_range(call),
        shown_by=f"{_NOTHING_BETWEEN}{at_line(source)}",
        culprit=in_module(source),
        source=source,
        repair=f"leave {source.op} out after the last layer; {repair}",
    )


def _clamped(call: Call, repair: str) -> Judgement:
    return call.judged(
        "activation_on_logits",
        f"the scores given to {call.name} are clamped at 0 from below: no class can be given a lower one",
        measured=_range(call),
        shown_by="a clamp lies between the last layer and the loss",
        culprit="clamp",
        repair=f"leave the clamp out; {repair}",
    )


def _single_class(call: Call) -> Iterator[Judgement]:
    """A head with one output under a softmax, which is always 1."""
    found = layout(call.node("input"))
    if (
        call.name in ("log_softmax", "logsumexp")
        or found is None
        or found.features != 1
        or found.moved
        or call.rows < 2
    ):
        return
    given = call.tensor("input")
    yield call.judged(
        "single_class",
        f"{call.name} over one class: its softmax is 1"
        + (" and its loss 0" if call.known is None else "")
        + ", whatever the model returns",
        measured=f"input of shape {tuple(given.shape)}" if given is not None else "",
        shown_by="the last layer has one output, and the class axis has size 1",
    )


def _dropout(call: Call, source: Node) -> Judgement:
    return call.judged(
        "dropout_on_logits",
        f"{in_module(source)} is applied to the scores given to {call.name}: a dropped score is 0, which may be the "
        "largest",
        measured=f"dropout p={source.numbers[0]:g} on the output of the last layer",
        shown_by=f"{_NOTHING_BETWEEN} the layer, the dropout and the loss{at_line(source)}",
        culprit=in_module(source),
        source=source,
    )


@judges("log")
def temperature_inside_logarithm(call: Call) -> Iterator[Judgement]:
    """-log(exp(cosine * t) / sum): the exponentials are a few operations before the logarithm."""
    node = call.node("input")
    exps = [n for n in ancestors(node, 12) if n.op == "exp" and n.parents] if node is not None else []
    inside = [f for f in (behind(n.parents[0]) for n in exps) if f is not None and not f.learned]
    if inside:
        yield from _temperature(call, inside[0])


@judges("cross_entropy", "log_softmax", "logsumexp")
def normalised_over_rows(call: Call) -> Iterator[Judgement]:
    """Cosines of vectors that were normalised over the rows, not each to length 1."""
    found = behind(call.node("input"))
    if found is None or found.node.op not in PRODUCTS or found.node.unit:
        return
    sides = [f.node for f in map(behind, found.node.parents) if f is not None]
    wrong = [n for n in sides if n.op == "normalize" and n.dim == 0 and len(n.shape) == 2 and n.shape[0] == call.rows]
    if wrong and len(wrong) == len(sides) and found.node.shape == (call.rows, call.rows) != wrong[0].shape:
        yield call.judged(
            "wrong_axis",
            f"the similarities given to {call.name} are of vectors normalised over the rows (dim=0), not each to "
            "length 1",
            measured=f"normalize over axis 0 of {wrong[0].shape}",
            shown_by="both factors of the product come from normalize(dim=0), and rows are compared",
            culprit="normalize",
            repair="normalize(x, dim=-1)",
        )


def _temperature(call: Call, found: Found) -> Iterator[Judgement]:
    """Cosines times a number far below 1, which overfit_one_batch cannot see."""
    cosine = found.node.op == "cosine_similarity" or (found.node.op in PRODUCTS and found.node.unit)
    if not cosine or found.shifted or not 0 < abs(found.scale) < COLD:
        return
    yield call.judged(
        "temperature_inverted",
        f"dot products of unit vectors are multiplied by {found.scale:g} before {call.name}: the temperature is a "
        "factor in place of a divisor",
        level="advice" if found.learned else "fault",
        measured=f"all scores lie within {2 * abs(found.scale):.3g} of each other",
        shown_by="both factors of the product have rows of length 1; the constants between it and the loss multiply to "
        f"{found.scale:g}",
        culprit="temperature",
        repair=f"scores / {found.scale:g}: divide by the temperature",
    )
