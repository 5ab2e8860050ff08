"""What is given where scores (logits) are due: to a cross entropy, a log-softmax, a binary loss with logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call
from pytest_trainloop.checks.loss.loss_contract.value_tests import bounds, logs_of_one, sums_to_one
from pytest_trainloop.recording.torch_names import HALF_OPEN_ACTIVATIONS, PRODUCTS
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
"""A range of scores up to which no class can be told with certainty: with two classes exp(-2) is left of the loss. Soft
caps (30 tanh(x / 30)) are far wider."""

COLD = 0.5
"""Factor on cosines below which their whole range is less than 1."""

_REPAIR = {
    "cross_entropy": "give cross_entropy the scores as they are: it takes the log-softmax itself",
    "log_softmax": "take log_softmax of the scores, once",
    "logsumexp": "take logsumexp of the scores as they are",
}


def classes(call: Call) -> Iterator[Breach]:
    """Scores of one class in several: cross_entropy, log_softmax, logsumexp."""
    node, given = call.node("input"), call.tensor("input")
    found = behind(node)
    if given is None or found is None or not given.is_floating_point():
        return
    axis = class_axis(call)
    count = given.shape[axis] if given.dim() else 1
    if count < 2:
        yield from _one_class(call)
        return
    source = found.node
    if found.learned:
        yield from _temperature(call, found)
        return
    repair = _REPAIR.get(call.name, _REPAIR["cross_entropy"])
    if source.op == "softmax" and abs(found.scale) <= WIDEST:
        yield _probabilities(call, source, f"softmax{_at(source)}", count, repair)
    elif is_sigmoid(source) and abs(found.scale) <= WIDEST:
        yield _probabilities(call, source, f"sigmoid{_at(source)}", count, repair)
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
            yield _harmless(call, source)
    elif found.scale == 1 and sums_to_one(given, axis):
        yield _by_value(call, count, repair)
    yield from _temperature(call, found)


def normaliser(call: Call) -> Iterator[Breach]:
    """A log-sum-exp beside the score of the right class: a cross entropy written out. The gradient that arrives at its
    input sums to nothing over the classes; that of a soft maximum taken for itself does not."""
    arrived, axis = call.arrived, call.given.get("dim")
    if arrived is None or not isinstance(axis, int):
        return
    sums, sizes = arrived.double().sum(axis).abs(), arrived.double().abs().sum(axis)
    if bool((sums <= 1e-3 * sizes).all()) and bool((sizes > 0).any()):
        yield from classes(call)


def softplus(call: Call) -> Iterator[Breach]:
    """A binary cross entropy in its stable form, softplus(s) - y s, of what is a probability already."""
    found = behind(call.node("input"))
    if found is not None and is_sigmoid(found.node) and not found.shifted and not found.learned:
        yield _squashed_twice(call, found.node, "give softplus the scores as they are")


def written_out(call: Call) -> Iterator[Breach]:
    """The same with log1p(exp(-|s|)) for the softplus."""
    node = call.node("input")
    for op in (("exp",), ("neg", "__neg__"), ("abs",)):
        if node is None or node.op not in op:
            return
        node = inner(node)
    found = behind(node)
    if found is not None and is_sigmoid(found.node) and not found.shifted and not found.learned:
        yield _squashed_twice(call, found.node, "write it with the scores as they are")


def binary(call: Call) -> Iterator[Breach]:
    """Scores of yes or no: binary_cross_entropy_with_logits, multilabel_soft_margin_loss, logsigmoid."""
    found = behind(call.node("input"))
    if found is None or found.learned:
        return
    source = found.node
    repair = f"give {call.name} the scores as they are: it takes the sigmoid itself"
    if (is_sigmoid(source) or source.op in ("softmax", "hardsigmoid")) and abs(found.scale) <= WIDEST:
        if not (found.shifted and found.scale != 1):  # 2 s - 1 is centred again
            yield _squashed_twice(call, source, repair)
    elif source.op in HALF_OPEN_ACTIVATIONS and found.scale > 0 and not found.shifted:
        yield _activation(call, source, "no score can be below 0, and no probability below a half", repair)
    elif found.low >= 0 and source.op in LAYERS and not found.shifted:
        yield _clamped(call, repair)
    elif source.op == "tanh" and 2 * abs(found.scale) <= WIDEST and not found.shifted:
        yield _activation(call, source, f"no score leaves [-{found.scale:g}, {found.scale:g}]", repair)
    elif found.dropped is not None and source.op in LAYERS and by_weights(source):
        yield _dropout(call, found.dropped)


def twice(call: Call) -> Iterator[Breach]:
    """Probabilities that were made of probabilities: a binary cross entropy, or a logarithm, of a squashed squash."""
    found = behind(call.node("input"))
    if found is None:
        return
    outer = found.node
    under = behind(inner(outer)) if outer.op == "softmax" or is_sigmoid(outer) else None
    if under is None or abs(under.scale) > WIDEST:
        return
    source = under.node
    if outer.op == "softmax" and source.op == "softmax" and source.dim == outer.dim and source.shape == outer.shape:
        yield _squashed_twice(call, source, "take the softmax once")
    elif is_sigmoid(outer) and (is_sigmoid(source) or source.op == "softmax"):
        yield _squashed_twice(call, source, "take the sigmoid once")
    elif is_sigmoid(outer) and source.op in ("relu", "relu6") and under.scale > 0 and not under.shifted:
        yield _activation(call, source, "no probability can be below a half", "take the activation off the last layer")


def class_axis(call: Call) -> int:
    given = call.given.get("dim")
    if call.name in ("log_softmax", "logsumexp"):
        return given if isinstance(given, int) else -1
    tensor = call.tensor("input")
    return 1 if tensor is not None and tensor.dim() > 1 else 0


def _at(source: Node) -> str:
    return f" in {source.module}" if source.module else ""


def _line(source: Node) -> str:
    return f"; {source.op} at {source.place.file}:{source.place.line}" if source.place else ""


def _probabilities(call: Call, source: Node, what: str, count: int, repair: str) -> Breach:
    least = math.log(1 + (count - 1) * math.exp(-1))
    return Breach(
        cause="probabilities_as_logits",
        summary=f"probabilities given where logits are expected: {call.name} is given what {what} gives",
        measured=_least(call, least, count),
        shown_by=f"its input comes from {source.op} with nothing but moved, cast or scaled entries between"
        + _line(source),
        culprit=what,
        where=str(source.place or call.place),
        repair=repair,
    )


def _least(call: Call, least: float, count: int) -> str:
    value = f"loss {float(call.out.detach().double().mean()):.4g}; " if call.name == "cross_entropy" else ""
    return f"{value}over {count} classes it cannot fall below {least:.4g}, however sure the model is"


def _by_value(call: Call, count: int, repair: str) -> Breach:
    return Breach(
        cause="probabilities_as_logits",
        summary=f"probabilities given where logits are expected: every row given to {call.name} sums to 1",
        measured=_least(call, math.log(1 + (count - 1) * math.exp(-1)), count),
        shown_by="in every call all entries are at least 0, and all rows sum to 1 to rounding",
        culprit=call.name,
        where=str(call.place),
        repair=repair,
        always=True,
    )


def _squashed_twice(call: Call, source: Node, repair: str) -> Breach:
    given = call.tensor("input")
    return Breach(
        cause="probabilities_as_logits",
        summary=f"probabilities given where logits are expected: {call.name} is given what comes from "
        f"{source.op}{_at(source)}",
        measured=f"input in {bounds(given)}" if given is not None else "",
        shown_by="nothing but moved, cast or scaled entries lies between" + _line(source),
        culprit=f"{source.op}{_at(source)}",
        where=str(source.place or call.place),
        repair=repair,
    )


def _activation(call: Call, source: Node, why: str, repair: str) -> Breach:
    given = call.tensor("input")
    return Breach(
        cause="activation_on_logits",
        summary=f"the scores given to {call.name} pass {source.op}{_at(source)} last: {why}",
        measured=f"input in {bounds(given)}" if given is not None else "",
        shown_by="nothing but moved, cast or scaled entries lies between" + _line(source),
        culprit=f"{source.op}{_at(source)}",
        where=str(source.place or call.place),
        repair=f"leave {source.op} out after the last layer; {repair}",
    )


def _clamped(call: Call, repair: str) -> Breach:
    given = call.tensor("input")
    return Breach(
        cause="activation_on_logits",
        summary=f"the scores given to {call.name} are clamped at 0 from below: no class can be given a lower one",
        measured=f"input in {bounds(given)}" if given is not None else "",
        shown_by="a clamp lies between the last layer and the loss",
        culprit="clamp",
        where=str(call.place),
        repair=f"leave the clamp out; {repair}",
    )


def _one_class(call: Call) -> Iterator[Breach]:
    """A head of one output under a softmax, which is 1 whatever it gives."""
    found = layout(call.node("input"))
    if call.name != "cross_entropy" or found is None or found.features != 1 or found.moved:
        return
    if call.rows < 2:
        return
    given = call.tensor("input")
    yield Breach(
        cause="single_class",
        summary="cross_entropy over one class: its softmax is 1 and its loss 0, whatever the model gives",
        measured=f"input of shape {tuple(given.shape)}" if given is not None else "",
        shown_by="the last layer has one output, and the class axis has size 1",
        culprit=call.name,
        where=str(call.place),
        repair="give the head one output for each class, or use binary_cross_entropy_with_logits",
    )


def _dropout(call: Call, source: Node) -> Breach:
    return Breach(
        cause="dropout_on_logits",
        summary=f"the scores given to {call.name} pass dropout{_at(source)} last: a dropped score is 0, which may be "
        "the best",
        measured=f"dropout p={source.numbers[0]:g} on the output of the last layer",
        shown_by="nothing but moved, cast or scaled entries lies between the layer, the dropout and the loss"
        + _line(source),
        culprit=f"dropout{_at(source)}",
        where=str(source.place or call.place),
        repair="put the dropout before the last layer",
    )


def _harmless(call: Call, source: Node) -> Breach:
    return Breach(
        cause="log_probabilities_as_logits",
        level="advice",
        summary=f"cross_entropy is given log-probabilities{_at(source)}: harmless, since it takes their log-softmax, "
        "which changes nothing",
        measured="the exponentials of every row sum to 1",
        shown_by=f"its input comes from log_softmax{_line(source)}",
        culprit=f"log_softmax{_at(source)}",
        where=str(source.place or call.place),
        repair="leave log_softmax out, or use nll_loss",
    )


def hand_written(call: Call) -> Iterator[Breach]:
    """-log(exp(cosine * t) / sum): the exponentials are a few operations before the logarithm."""
    node = call.node("input")
    exps = [n for n in ancestors(node, 12) if n.op == "exp" and n.parents] if node is not None else []
    inside = [f for f in (behind(n.parents[0]) for n in exps) if f is not None and not f.learned]
    if inside:
        yield from _temperature(call, inside[0])


def over_the_batch(call: Call) -> Iterator[Breach]:
    """Cosines of vectors that were normalised over the rows, not each for itself."""
    found = behind(call.node("input"))
    if found is None or found.node.op not in PRODUCTS or found.node.unit:
        return
    sides = [f.node for f in map(behind, found.node.parents) if f is not None]
    wrong = [n for n in sides if n.op == "normalize" and n.dim == 0 and len(n.shape) == 2 and n.shape[0] == call.rows]
    if wrong and len(wrong) == len(sides) and found.node.shape == (call.rows, call.rows) != wrong[0].shape:
        yield Breach(
            cause="wrong_axis",
            summary=f"the similarities given to {call.name} are of vectors normalised over the rows (dim=0), not "
            "each to length 1",
            measured=f"normalize over axis 0 of {wrong[0].shape}",
            shown_by="both factors of the product come from normalize(dim=0), and rows are compared",
            culprit="normalize",
            where=str(call.place),
            repair="normalize(x, dim=-1)",
        )


def _temperature(call: Call, found: Found) -> Iterator[Breach]:
    """Cosines times a number far below 1 (overfit_one_batch cannot see it)."""
    cosine = found.node.op == "cosine_similarity" or (found.node.op in PRODUCTS and found.node.unit)
    if not cosine or found.shifted or not 0 < abs(found.scale) < COLD:
        return
    yield Breach(
        cause="temperature_inverted",
        level="advice" if found.learned else "fault",
        summary=f"cosines are multiplied by {found.scale:g} before {call.name}: the temperature is applied the wrong "
        "way round",
        measured=f"all scores lie within {2 * abs(found.scale):.3g} of each other",
        shown_by="both factors of the product have rows of length 1; the constants between it and the loss make "
        f"{found.scale:g}",
        culprit="temperature",
        where=str(call.place),
        repair=f"divide by the temperature: cosines / {found.scale:g}",
    )
