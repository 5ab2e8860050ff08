"""What each argument of a loss function is to hold, and how it is seen that it holds something else.

``judge`` reads as the table of losses does: an argument is judged by the word that the table has for it.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_contract import tokens
from pytest_trainloop.checks.loss.loss_contract.calls import both_grow, bounds, dtype, listed, named
from pytest_trainloop.checks.loss.loss_contract.ctc import ctc
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.torch_names import (
    BINARY_LOSSES,
    CLASS_LOSSES,
    CONVOLUTIONS,
    DISTANCE_LOSSES,
    HALF_OPEN_ACTIVATIONS,
    NEGATIONS,
    PRODUCTS,
    SIGN_LOSSES,
    SOFTMAXES,
)
from pytest_trainloop.tracing.tape_queries import (
    across_rows,
    axis_of,
    behind,
    by_weights,
    constant,
    dropout_rate,
    inner,
    is_sigmoid,
    layout,
    made_of,
    of_unit_rows,
    unmoved,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_contract.calls import LossCall
    from pytest_trainloop.finding import Finding
    from pytest_trainloop.tracing.tape import Value
    from pytest_trainloop.tracing.tape_queries import Found

    Findings = Iterator[Finding]

WIDEST = 2.0
"""A range of scores up to which no class can be predicted with confidence: with two classes, the loss cannot fall below
about exp(-2). Soft caps (30 tanh(x / 30)) are far wider."""
COLD = 0.5
"""Factor on cosines below which their whole range is less than 1."""
SHARPER = 1.5
"""Factor on the scores of both sides from which it is a temperature."""
WIDER, LABELS = 8, 100
"""Advice is given for a head this many times wider than the classes in use, from this number of labels on."""
SOFTENED = 1.5
"""Targets up to here are in use for a discriminator's real images (smoothed between 0.7 and 1.2)."""
RARE, MANY = 0.05, 200
"""Advice is given below this share of positive labels, from this number of labels on."""
LEAST = 16
"""Entries from which all of one sign are no accident of an untrained net."""
FAR = 100.0
"""How many times wider than its images a range is that is meant for others: bytes have 255 times that of [0, 1]."""

TAKES_LOG_SOFTMAX = frozenset({"cross_entropy", "log_softmax"})
TAKES_SIGMOID = frozenset({"binary_cross_entropy_with_logits", "multilabel_soft_margin_loss", "log_sigmoid"})
_INSERTS = frozenset({"unsqueeze", "__getitem__", "view", "reshape", "unflatten", "expand"})
_POSITIVE = frozenset({"exp", "softplus", "relu", "sigmoid", "square", "abs", "expm1"})
_DEVIATION = re.compile(r",\s*(?:var\s*=\s*)?((?:\w+\.)*(?!\w*log)\w*(?:std|sigma|stddev)\w*)\s*[,)]")
"""An argument that is one name, called a deviation; not its square or logarithm."""
_BETWEEN = "only casts, reshapes and constant factors lie between"


def judge(call: LossCall) -> Findings:
    name, takes = call.name, call.takes
    if call.error is not None:
        yield from refused(call)
        return
    if call.known is not None:
        yield from of_table(call)
    elif name in TAKES_LOG_SOFTMAX | TAKES_SIGMOID:
        yield from scores(call)
    elif takes.get("input") == "probabilities":
        yield from probabilities(call)
    elif name in ("nll_loss", "ctc_loss", "gather"):
        yield from log_probabilities(call)
    if name in CLASS_LOSSES:
        yield from axis_of_classes(call)
        yield from class_indices(call)
        yield from class_probabilities(call)
        yield from class_weights(call)
    if call.of_torch and takes.get("target") == "binary":
        yield from two_labels(call)
        yield from entry_weights(call)
    if name in DISTANCE_LOSSES | SIGN_LOSSES | {"kl_div", "gaussian_nll_loss"}:
        yield from broadcast(call)
    if name in CLASS_LOSSES | DISTANCE_LOSSES | {"binary_cross_entropy_with_logits"}:
        yield from tokens.padding(call)
    of_name = BY_NAME.get(name)
    if of_name is not None:
        yield from of_name(call)
    yield from sign(call)


def of_table(call: LossCall) -> Findings:
    """A function of a library, or of the project, that a contract says of what it takes."""
    assert call.known is not None
    contract = call.known.contract
    for name, word in contract.arguments.items():
        if not isinstance(call.given.get(name), torch.Tensor):
            continue
        found: list[Finding] = []
        if word in ("logits", "class_logits"):
            found = [*scores(call), *(axis_of_classes(call) if call.over_classes and call.class_dim == 1 else ())]
        elif word in BY_WORD:
            found = list(BY_WORD[word](call))
        elif word in BY_WORD_AND_NAME:
            found = list(BY_WORD_AND_NAME[word](call, name))
        if found:
            yield found[0]  # what is wrong with the first argument leaves nothing to say of the others
            return
    if call.unstepped:
        yield call.finds("criterion_not_trained", names=", ".join(call.unstepped), culprit=call.unstepped[0])
    n = len(call.weights) if contract.pairwise and call.weights is not None and call.weights.dim() == 2 else 0
    if n > 1 and call.weights is not None and call.weights.shape[1] == n and all_alike(call.weights):
        yield call.finds("broadcast/table", pairs=n * n, rows=n)


# Values


def slack(tensor: torch.Tensor, terms: int) -> float:
    """The rounding error of a sum of probabilities that is 1: each has an error of some units in the last place of its
    dtype, relative to itself, and a softmax in float32 has as much for each of its ``terms``."""
    return 8 * torch.finfo(tensor.dtype).eps + terms * torch.finfo(torch.float32).eps


def _rows(tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
    """Rows along an axis: some first, which most often show that the answer is no, then all."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.dim() == 0 or tensor.shape[axis] < 2:
        return []
    moved = tensor.detach().movedim(axis, -1)
    flat = moved.reshape(-1, moved.shape[-1])
    return [flat[:64].double(), flat.double()]


def sums_to_one(tensor: torch.Tensor, axis: int) -> bool:
    """Whether the entries along an axis are probabilities that sum to 1, everywhere."""
    rows = _rows(tensor, axis)
    return bool(rows) and all(
        bool(r.min() >= 0) and bool(((r.sum(1) - 1).abs() <= slack(tensor, r.shape[1])).all()) for r in rows
    )


def _log_sums(tensor: torch.Tensor, axis: int) -> list[tuple[torch.Tensor, float]]:
    """The log-sum-exp of rows, and its rounding error: logarithms with a relative error of eps change it by eps times
    the sum of p |log p|, which is at most eps log C."""
    return [(r.logsumexp(1), slack(tensor, r.shape[1]) * (1 + math.log(r.shape[1]))) for r in _rows(tensor, axis)]


def logs_of_one(tensor: torch.Tensor, axis: int) -> bool:
    """Whether the entries along an axis are logarithms of such probabilities, everywhere."""
    sums = _log_sums(tensor, axis)
    return bool(sums) and all(bool((s.abs() <= allowed).all()) for s, allowed in sums)


def exceeds_one(tensor: torch.Tensor, axis: int) -> bool:
    """Whether the exponentials of some row sum to more than 1: those of logarithms of probabilities never do."""
    return any(bool((s > allowed).any()) for s, allowed in _log_sums(tensor, axis))


def _axes(holds: Any, tensor: torch.Tensor) -> set[int]:
    return {d for d in range(tensor.dim()) if holds(tensor, d)}


# Scores


def scores(call: LossCall) -> Findings:
    """The input where scores are expected: of one class among several, or of yes or no."""
    found, given, classes = behind(call.values.get("input")), call.tensor("input"), call.over_classes
    if found is None or given is None or not given.is_floating_point():
        return
    count = given.shape[call.class_dim] if given.dim() and classes else 2
    if count < 2:
        at = layout(call.values["input"]) if call.name not in SOFTMAXES | {"logsumexp"} else None
        if at is not None and at.features == 1 and not at.moved and call.step.rows > 1:
            yield call.finds("single_class")
        return
    if found.learned:
        yield from inverted_temperature(call, found)
        return
    source, op, own = found.value, found.op, "softmax" if classes else "sigmoid"
    otherwise = {
        "log_softmax": "take log_softmax of the scores, once",
        "logsumexp": "take logsumexp of the scores as they are",
    }.get(call.name, f"give {call.name} the scores as they are: it takes the {own} itself")
    if (is_sigmoid(source) or op in ("softmax", "hardsigmoid")) and abs(found.scale) <= WIDEST:
        if classes or not (found.shifted and found.scale != 1):  # 2 s - 1 is centred again
            yield given_probabilities(call, source, otherwise)
    elif op == "tanh" and 2 * abs(found.scale) <= WIDEST and (classes or not found.shifted):
        yield activation(call, source, f"no score leaves [-{found.scale:g}, {found.scale:g}]", otherwise)
    elif op in HALF_OPEN_ACTIVATIONS and found.scale > 0 and not found.shifted:
        why = "class can be given a score below 0" if classes else "score can be below 0, and no probability below 0.5"
        yield activation(call, source, f"no {why}", otherwise)
    elif found.low >= 0 and found.is_layer and not found.shifted:
        yield call.finds("activation_on_logits/clamp", culprit="clamp", otherwise=otherwise)
    elif found.dropped is not None and found.is_layer and by_weights(source):
        rate = dropout_rate(found.dropped.call)
        yield call.finds("dropout_on_logits", source=found.dropped, rate=rate)
    elif call.name == "cross_entropy" and op == "log_softmax" and found.scale == 1 and not found.shifted:
        if logs_of_one(given, call.class_dim):
            yield call.finds("log_probabilities_as_logits", source=source, level="advice")
    elif classes and op not in ("log_softmax", "log_sigmoid") and found.scale == 1:
        if sums_to_one(given, call.class_dim):
            yield given_probabilities(call, None, otherwise)
    if classes and call.known is None:
        yield from inverted_temperature(call, found)
        yield from normalised_over_rows(call, found)


def given_probabilities(call: LossCall, source: Value | None, repair: str) -> Finding:
    """Probabilities in place of scores: a loss over classes has a least value then."""
    least, flags = "", other_flags(call, "probabilities")
    if call.over_classes and (classes := call.given["input"].shape[call.class_dim]):
        low = math.log(1 + (classes - 1) * math.exp(-1))
        least = f"over {classes} classes it cannot fall below {low:.4g}, however confident the model is"
        if call.of_torch:
            least = f"loss {float(call.out.detach().double().mean()):.4g}; {least}"
    repair = f"{repair}; or {flags}" if flags else repair
    if source is None:
        return call.finds("probabilities_as_logits/sums", least=least, repair=repair)
    name = named(source).replace(source.op, "sigmoid" if is_sigmoid(source) else source.op)
    return call.finds("probabilities_as_logits", source=source, culprit=name, least=least, repair=repair)


def activation(call: LossCall, source: Value, why: str, otherwise: str) -> Finding:
    return call.finds("activation_on_logits", source=source, why=why, op=source.op, otherwise=otherwise)


def written_out(call: LossCall) -> Findings:
    """Parts of cross entropies that are written out: a log-sum-exp next to the score of the correct class, softplus(s)
    - y s, and the same with log1p(exp(-|s|))."""
    value = call.values["input"]
    if call.name == "logsumexp":
        # the gradient at its input sums to 0 over the classes then; that of a soft maximum for itself does not
        if call.arrived is not None:
            sums, sizes = call.arrived.double().sum(-1).abs(), call.arrived.double().abs().sum(-1)
            if bool((sums <= 1e-3 * sizes).all()) and bool((sizes > 0).any()):
                yield from scores(call)
        return
    for ops in ({"exp"}, NEGATIONS, {"abs"}) if call.name == "log1p" else ():
        step = inner(value)
        if value.op not in ops or step is None:
            return
        value = step
    found = behind(value)
    if found is not None and is_sigmoid(found.value) and not found.shifted and not found.learned:
        yield given_probabilities(call, found.value, "write it with the scores as they are")


def inverted_temperature(call: LossCall, found: Found) -> Findings:
    """Cosines times a number far below 1, which overfit_one_batch cannot see."""
    scale, cosine = found.scale, found.op == "cosine_similarity"
    if not found.shifted and 0 < abs(scale) < COLD and (cosine or of_unit_rows(found.value)):
        level = "advice" if found.learned else "fault"
        wording = "temperature_inverted/cosines"
        yield call.finds(wording, scale=scale, width=2 * abs(scale), culprit="temperature", level=level)


def sharpened(call: LossCall, *values: Value | None) -> Findings:
    """Distillation whose two sides are multiplied by a temperature above 1, which makes them sharper, not softer."""
    sides = [behind(v) for v in values]
    under = [behind(s.value.parents[0]) for s in sides if s is not None and s.op in SOFTMAXES]
    scaled = [u for u in under if u is not None and u.multiplied and u.scale > SHARPER and u.is_layer]
    if len(scaled) == 2 and scaled[0].scale == scaled[1].scale and not any(of_unit_rows(u.value) for u in scaled):
        yield call.finds("temperature_inverted", scale=scaled[0].scale)


def normalised_over_rows(call: LossCall, found: Found) -> Findings:
    """Cosines of vectors that were normalised over the rows, not each to length 1."""
    rows = call.step.rows
    sides = [f.value for f in map(behind, found.value.parents) if f is not None] if found.op in PRODUCTS else []
    wrong = [v for v in sides if v.op == "normalize" and axis_of(v) == 0 and len(v.shape) == 2 and v.shape[0] == rows]
    if wrong and len(wrong) == len(sides) and found.value.shape == (rows, rows) != wrong[0].shape:
        if not of_unit_rows(found.value):
            yield call.finds("wrong_axis/rows", culprit="normalize")


# Probabilities and their logarithms


def probabilities(call: LossCall) -> Findings:
    """The input of a binary cross entropy, of a logarithm, and of losses of libraries that take probabilities."""
    found, given = behind(call.values.get("input")), call.tensor("input")
    if given is None or not given.numel() or not given.is_floating_point():
        return
    raw, of_log = False, call.name == "log"
    if call.known is not None:
        raw = bool(((given < 0) | (given > 1 + 8 * torch.finfo(given.dtype).eps)).any())
        if not raw and found is not None and found.is_layer and by_weights(found.value):
            raw = not (found.clamped or found.shifted or of_unit_rows(found.value))
    elif found is not None:
        raw = is_clamped_layer(found) and (not of_log or found.high <= 1)
    if raw:
        clamped = ", clamped to [0, 1]" if found is not None and found.clamped else ""
        yield call.finds("logits_as_probabilities", clamped=clamped, repair=other_flags(call, "logits"))
    elif found is not None and found.op == "softmax" and over_another_axis(call, found, given):
        yield over_the_wrong_axis(call, found.value)
    elif found is not None:
        yield from normalised_twice(call, found)
    if of_log:
        exps = [v for v in made_of(call.values["input"], 12) if v.op == "exp" and v.parents]
        inside = [f for f in (behind(v.parents[0]) for v in exps) if f is not None and not f.learned]
        yield from inverted_temperature(call, inside[0]) if inside else ()
    elif call.name == "binary_cross_entropy":
        yield from saturated(call, given)


def is_clamped_layer(found: Found) -> bool:
    """Whether it is the output of a layer, clamped to [0, 1] and taken for a probability."""
    source, clamped = found.value, found.low >= 0 and found.high <= 1
    if source.op in ("relu", "relu6") and found.high <= 1:
        under = behind(inner(source))
        clamped, source = True, under.value if under is not None and not under.shifted else source
    layer = source.op in PRODUCTS | CONVOLUTIONS | {"addmm"} and any(p.parameter for p in source.parents)
    return clamped and layer and not found.shifted and found.scale == 1 and not of_unit_rows(source)


def over_another_axis(call: LossCall, found: Found, given: torch.Tensor) -> bool:
    """Whether a softmax runs along another axis than that of the classes, or over the rows of yes or no."""
    source, axis = found.value, axis_of(found.value)
    if call.name == "binary_cross_entropy":
        return axis == 0 and call.step.rows == source.shape[0] > 1
    if call.known is None or not call.over_classes or found.scale != 1 or given.dim() < 2:
        return False
    other = source.shape == given.shape and axis != call.class_dim % given.dim()
    return other and given.shape[call.class_dim] > 1 and not sums_to_one(given, call.class_dim)


def normalised_twice(call: LossCall, found: Found) -> Findings:
    """Probabilities of probabilities."""
    outer = found.value
    under = behind(inner(outer)) if outer.op == "softmax" or is_sigmoid(outer) else None
    if under is None or abs(under.scale) > WIDEST:
        return
    source = under.value
    if outer.op == "softmax" and source.op == "softmax":
        if axis_of(source) == axis_of(outer) and source.shape == outer.shape:
            yield given_probabilities(call, source, "take the softmax once")
    elif is_sigmoid(outer) and (is_sigmoid(source) or source.op == "softmax"):
        yield given_probabilities(call, source, "take the sigmoid once")
    elif is_sigmoid(outer) and source.op in ("relu", "relu6") and under.scale > 0 and not under.shifted:
        yield activation(call, source, "no probability can be below 0.5", "the sigmoid takes the scores as they are")


def saturated(call: LossCall, given: torch.Tensor) -> Findings:
    """Probabilities of exactly 0 or 1 that are wrong: the loss is 100 there, and its gradient 0."""
    target, found = call.tensor("target"), behind(call.values.get("input"))
    if target is None or given.shape != target.shape or found is None or not is_sigmoid(found.value):
        return
    wrong = ((given == 0) & (target > 0)) | ((given == 1) & (target < 1))
    if call.number == 0 and (count := int(wrong.sum())):
        share = count / wrong.numel()
        yield call.finds("probabilities_saturated", share=share, count=count, all=wrong.numel(), culprit="sigmoid")


def log_probabilities(call: LossCall) -> Findings:
    """The input of nll_loss and ctc_loss, and what labels are gathered from."""
    name = "log_probs" if call.name == "ctc_loss" else "input"
    given, value = call.tensor(name), call.values.get(name)
    axis = -1 if call.name == "ctc_loss" else call.class_dim
    found = behind(value)
    if given is None or not given.numel() or given.dim() == 0 or given.shape[axis] < 2 or found is None:
        return
    if call.name == "gather":
        yield from gathered(call, found)
        return
    repair = f"give log_softmax of the scores along axis {axis}"
    if sums_to_one(given, axis):
        yield call.finds("probabilities_as_log_probabilities", repair=repair)
    elif found.op == "log_softmax" and call.known is None:
        others = {d for d in _axes(logs_of_one, given) if d != axis % given.dim()}
        if not logs_of_one(given, axis) and (others or across_rows(found.value)):
            yield over_the_wrong_axis(call, found.value)
    elif exceeds_one(given, axis) and bool((given > 0).any()) and not normalised_elsewhere(call, axis):
        if not any("log" in v.op for v in made_of(value, 12)):  # of densities, which may be above 1, or of odds
            yield call.finds("logits_as_log_probabilities", repair=repair if call.name != "nll_loss" else "")


def normalised_elsewhere(call: LossCall, axis: int) -> bool:
    """Whether the gradient at the scores, from all uses of them, sums to (nearly) 0 over the classes, as it does where
    a log-sum-exp of them is another term."""
    arrived = call.arrived
    if arrived is None or arrived.dim() == 0 or call.name == "ctc_loss":
        return False
    return bool(arrived.double().sum(axis).abs().sum() < arrived.double().abs().sum() / 2)


def gathered(call: LossCall, found: Found) -> Findings:
    """Entries gathered from a log-softmax along another axis than its own."""
    source = found.value
    if source.op == "log" and source.parents:
        under = behind(source.parents[0])
        source = under.value if under is not None and under.op == "softmax" else source
    if source.op in SOFTMAXES and axis_of(source) not in (None, call.given.get("dim")):
        if source.shape == call.given["input"].shape and across_rows(source):
            yield over_the_wrong_axis(call, source)


def over_the_wrong_axis(call: LossCall, source: Value) -> Finding:
    axis, shape = axis_of(source) or 0, tuple(source.shape)
    return call.finds("wrong_axis", source=source, axis=axis, shape=shape, size=shape[axis])


def divergence(call: LossCall) -> Findings:
    """kl_div takes log-probabilities, then probabilities (or with ``log_target`` their logarithms)."""
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or not given.numel() or not given.dim():
        return
    logs, found = bool(call.given.get("log_target")), behind(call.values["input"])
    below, source = bool((target < 0).any()), behind(call.values["target"])
    if not logs and sums_to_one(given, -1) and (logs_of_one(target, -1) or below):
        yield call.finds("arguments_swapped")
        return
    if _axes(sums_to_one, given) or (found is not None and found.op == "softmax"):
        yield call.finds("probabilities_as_log_probabilities")
    elif found is not None and found.is_layer and not found.clamped and bool((given > 0).any()):
        yield call.finds("logits_as_log_probabilities")
    elif found is not None and found.op == "log_softmax" and found.scale == 1 and target.shape == given.shape:
        mine, theirs = _axes(logs_of_one, given), _axes(sums_to_one, target) | _axes(logs_of_one, target)
        rows, softmax = across_rows(found.value), found.value
        if not mine and rows and sums_to_one(target, -1):
            yield over_the_wrong_axis(call, softmax)
        elif mine and rows and axis_of(softmax) == 0 and call.step.rows == given.shape[0]:
            yield call.finds("wrong_axis/examples", source=softmax, culprit="log_softmax", mine=mine, theirs=theirs)
        elif mine and theirs and not mine & theirs:
            yield call.finds("wrong_axis/sides", source=softmax, culprit="log_softmax", mine=mine, theirs=theirs)
    if not logs and below:
        raw = source is not None and source.is_layer
        yield call.finds("logits_as_probabilities/teacher" if raw else "log_target_mismatch", low=float(target.min()))
    elif logs and not below and _axes(sums_to_one, target):
        yield call.finds("log_target_mismatch/shares")
    yield from softmax_of_softmax(call)
    if call.given["target"].requires_grad and not call.given["input"].requires_grad:
        yield call.finds("arguments_swapped/reverse", level="advice")
    if call.given.get("reduction", "mean") == "mean" and given.dim() > 1:
        yield call.finds("mean_over_elements", all=given.numel(), count=given.shape[-1], level="advice")
    yield from sharpened(call, call.values["input"], call.values["target"])


# Targets of classes


def axis_of_classes(call: LossCall) -> Findings:
    """Scores of several positions along the class axis, by the reshapes between the last layer and the loss."""
    given = call.tensor("input")
    if given is None or given.dim() < 2 or given.shape[1] < 2:
        return
    at = layout(call.values["input"])
    if at is None or at.picked or at.feature.shape != given.shape or at.features < 2 or constant(at.position, 1):
        return
    distinct = [(v.sort(dim=1).values.diff(dim=1) != 0).sum(1) + 1 for v in (at.feature, at.position)]
    every_pair = bool((distinct[0] > 1).all()) and bool((distinct[0] * distinct[1] == given.shape[1]).all())
    if every_pair or not by_weights(at.layer):
        return  # classes that are pairs of positions and features, as flattened actions of several nodes
    moving = [c for c in at.coordinates(at.position) if not constant(c, 1)]
    start = moving[0].narrow(1, 0, 1)
    unbroken = bool((moving[0].diff(dim=1) == 1).all()) and bool((start == start.flatten()[0]).all())
    shape, target = tuple(given.shape), call.tensor("target")
    mixed = not constant(at.feature, 1)
    if mixed or len(moving) > 1 or not unbroken:
        what = "of several positions and several classes mixed" if mixed else "of every other position"
        yield call.finds("class_axis", what=what, layer=tuple(at.layer.shape))
    elif len(shape) == 3 and shape[1] == shape[2] == at.features and not at.moved and at.layer.op not in CONVOLUTIONS:
        if target is not None and target.shape == (shape[0], shape[2]):
            yield call.finds("class_axis/square")


def class_indices(call: LossCall) -> Findings:
    """Class indices as targets."""
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or given.dim() == 0 or not target.numel():
        return
    if target.is_floating_point() and call.known is None:
        return
    if target.shape == given.shape and given.dim() > 1 and given.shape[call.class_dim] > 1:
        return  # a distribution over the classes, where the function takes these too
    ignored = call.given.get("ignore_index", -100 if call.known is None else None)
    keep = target != ignored if ignored is not None else torch.ones_like(target).bool()
    if call.known is None and not bool(keep.any()):
        if call.given.get("reduction", "mean") == "mean":
            culprit = f"ignore_index={ignored}"
            yield call.finds("all_ignored", count=target.numel(), ignored=ignored, culprit=culprit)
        return
    if call.known is not None:
        keep = keep & call.counted(target)
    count, kept = given.shape[call.class_dim if given.dim() > 1 else 0], target[keep]
    if not kept.numel() or count < 2:
        return
    low, high = int(kept.min()), int(kept.max())
    if low < 0 or high >= count:
        hint, repair = f": the head is {high + 1 - count} too narrow, or labels need a map", ""
        if low < 0 or call.known is not None:
            hint = f"; ignore_index is {ignored}"
            repair = f"pass ignore_index={low if low < 0 else high}, if that label is not to count"
        elif (low, high) == (1, count):
            hint, repair = f": they are 1 to {count}, off by one", "count labels from 0: target - 1"
        yield call.finds(
            "target_out_of_range", low=low, high=high, last=count - 1, hint=hint, seen=listed(torch.unique(kept)),
            how=f"torch raised: {call.error}" if call.error else "the labels that count", repair=repair,
            culprit="target",
        )  # fmt: skip
    elif call.known is None and kept.numel() >= LABELS and count >= WIDER * (high + 1):
        yield call.finds("head_too_wide", times=count / (high + 1), count=count, high=high, level="advice")


def class_probabilities(call: LossCall) -> Findings:
    """Class probabilities as targets of cross_entropy."""
    given, target, axis = call.tensor("input"), call.tensor("target"), call.class_dim
    if given is None or target is None or not target.is_floating_point() or target.shape != given.shape:
        return
    if target.dim() == 0 or target.shape[axis] < 2 or not target.numel():
        return
    yield from softmax_of_softmax(call)
    wide, value = target.double(), call.values["target"]
    sums, allowed = wide.sum(axis), slack(target, target.shape[axis])
    whole = bool((wide == wide.round()).all())
    of_softmax = any(
        v.op == "softmax" and v.shape == value.shape and axis_of(v) == axis % len(v.shape) for v in made_of(value)
    )
    if sums_to_one(target, axis) or not bool(((wide != 0).sum(axis) >= 2).any()) or of_softmax:
        return  # also one entry a row (an index with a weight), and what was weighted, masked or cut afterwards
    source, why = behind(value), ""
    if bool((wide < 0).any()):
        why = "log-probabilities are given as targets" if logs_of_one(target, axis) else ""
        why = why or ("" if whole else "targets hold negative values, as scores do")
    elif any(target.shape[d] > 1 and sums_to_one(target, d) for d in range(target.dim()) if d != axis):
        why = "they sum to 1 along another axis"
    elif source is not None and source.op == "sigmoid":
        why = "a sigmoid gives each class by itself"
    elif not whole and bool((sums - sums.flatten()[0]).abs().max() <= allowed):
        why = "every row sums to the same number"
    heavy = not why and not bool((wide < 0).any()) and bool((sums > 1 + allowed).any())
    if why or heavy:
        yield call.finds(
            "target_not_distribution", why=why or "rows weigh as much as their targets sum to", sums=listed(sums),
            culprit="target", level="advice" if heavy else "fault", repair=_SETTLED if heavy else "",
        )  # fmt: skip


_SETTLED = (
    "divide each row by its sum; where a row may have several labels: binary_cross_entropy_with_logits; where rows are "
    "to weigh by their sums, as counts do: write -(target * log_softmax(scores)).sum(-1), which settles it"
)


def softmax_of_softmax(call: LossCall) -> Findings:
    """Targets that are a softmax of a softmax: the largest is at most e times the smallest."""
    outer = behind(call.values["target"])
    under = behind(inner(outer.value)) if outer is not None and outer.op == "softmax" else None
    if outer is not None and under is not None and under.op == "softmax" and under.scale <= 1:
        if axis_of(under.value) == axis_of(outer.value):
            yield call.finds("target_not_distribution/twice", culprit="target")


def class_weights(call: LossCall) -> Findings:
    """Whole numbers as class weights, 0 among them, where such a class occurs."""
    weight, target = call.tensor("weight"), call.tensor("target")
    if weight is None or target is None or target.is_floating_point() or weight.dim() != 1:
        return
    seen = target[(target != call.given.get("ignore_index", -100)) & (target >= 0) & (target < len(weight))].long()
    idle = [c for c in torch.unique(seen).tolist() if weight[c] == 0]
    if not idle or bool((weight < 0).any()) or not bool((weight > 0).any()):
        return
    alone = int((weight > 0).sum()) == 1 and len(weight) > 1
    if not alone and not (bool((weight == weight.round()).all()) and bool((weight > 1).any())):
        return
    nothing, size, only = False, None, int(weight.argmax())
    if alone and call.arrived is not None and call.arrived.dim() == target.dim() + 1:
        size = call.arrived.detach().abs().amax(1)
    if size is not None and size.shape == target.shape:
        rows = (weight == 0)[target.clamp(0, len(weight) - 1).long()]
        nothing = bool(rows.any()) and not bool(size[rows].any()) and bool(size[~rows].any())
    why = f"only class {only} costs anything, so that always answering {only} is best"
    how = "whole numbers, as an integer division leaves them"
    yield call.finds(
        "class_without_weight", idle=listed(idle, 3), why=why if nothing else "their rows teach nothing",
        how="the gradient at the scores of all other rows is exactly 0" if nothing else how, seen=listed(weight),
        level="fault" if nothing else "advice",
    )  # fmt: skip


# Targets of yes or no


def two_labels(call: LossCall) -> Findings:
    """Targets that are one of two, or in between."""
    name = call.known.contract.target or "target" if call.known is not None else "target"
    target = call.tensor(name)
    if target is None or not target.numel():
        return
    low, high = (-1.0, 1.0) if call.name in SIGN_LOSSES else (0.0, 1.0)
    if call.known is not None:
        low, high = call.known.contract.labels
    keep, ignored = call.counted(target), call.given.get("ignore_index")
    counted = target[keep & (target != ignored) if ignored is not None else keep]
    bad = counted[(counted < low) | (counted > high)]
    seen = listed(bad if bad.numel() else target)
    if low == -1.0:
        zeros = int((counted == 0).sum())
        if zeros and not bool((counted < 0).any()):
            yield call.finds("signs_expected", count=zeros, all=target.numel(), seen=seen, culprit="target")
    elif bad.numel():
        softened = bool((bad > 1).all() and (bad <= SOFTENED).all() and (bad != bad.round()).any())
        values, repair = torch.unique(target).tolist(), ""
        reach = f"targets reach from {float(target.min()):.4g} to {float(target.max()):.4g}"
        if values == [-1.0, 1.0]:
            reach, repair = "labels are -1 and 1", "map the labels: (y + 1) / 2"
        elif values in ([0.0, 255.0], [255.0]):
            repair = "divide the masks by 255, or compare them: mask > 0"
        yield call.finds(
            "target_outside_unit", reach=reach, low=low, high=high, count=bad.numel(), all=target.numel(), seen=seen,
            culprit="target", repair=repair, level="advice" if softened else "fault",
        )  # fmt: skip
    elif call.known is None and call.given.get("pos_weight") is None and call.given.get("weight") is None:
        count = int((target > 0.5).sum())
        share = count / target.numel()
        if target.numel() >= MANY and 0 < share < RARE:
            facts: dict[str, Any] = {"share": share, "count": count, "all": target.numel(), "ratio": 1 / share - 1}
            yield call.finds("classes_imbalanced", **facts, level="advice")


def index_lists(call: LossCall) -> Findings:
    """The target of multilabel_margin_loss lists the classes, and ends with -1."""
    target = call.tensor("target")
    if target is not None and target.dim() and target.shape[-1] >= 3 and bool(((target >= 0) & (target <= 1)).all()):
        seen = listed(target.reshape(-1, target.shape[-1])[0])
        yield call.finds("index_list_expected", seen=seen, culprit="target")


def entry_weights(call: LossCall) -> Findings:
    """Weights that make a loss larger than its input, and a pos_weight of 0."""
    given, target = call.tensor("input"), call.tensor("target")
    for name in ("weight", "pos_weight") if given is not None and given.numel() else ():
        weight = call.tensor(name)
        try:
            out = torch.broadcast_shapes(given.shape, weight.shape)  # type: ignore[union-attr]
        except (RuntimeError, AttributeError):
            continue
        if weight is not None and out.numel() > given.numel():
            how = f"torch raised: {call.error}" if call.error else "the shapes of the call"
            sizes: dict[str, Any] = {
                "other": tuple(weight.shape),
                "out": tuple(out),
                "pairs": out.numel(),
                "rows": given.numel(),
            }
            yield call.finds("weight_shape", name=name, **sizes, how=how, culprit=name)
        elif name == "pos_weight" and weight is not None and target is not None and target.shape == out:
            positive = target > 0
            lost = int((positive & (weight == 0).to(target.device)).sum())
            if lost:
                facts: dict[str, Any] = {
                    "lost": lost,
                    "seen": bounds(weight),
                    "count": int(positive.sum()),
                    "all": target.numel(),
                }
                yield call.finds("class_without_weight/positives", **facts)


# Numbers


def variance(call: LossCall) -> Findings:
    """gaussian_nll_loss takes the variance: not its logarithm, nor its root."""
    found, value = behind(call.values.get("var")), call.values.get("var")
    if found is None:
        return
    if found.is_layer and not found.clamped and not found.shifted:
        yield call.finds("log_variance", what="the output of a layer, which may be negative")
        return
    called, base = _DEVIATION.search(call.place.code), unmoved(value)
    squared = base is not None and base.op in ("square", "pow", "mul") and len({*map(id, base.parents)}) == 1
    root = found.op in ("std", "sqrt")
    if root or (called is not None and not squared):
        sure = found.op == "std" or (root and called)
        what = f"the result of {found.op}" if root else called[1] if called else ""
        yield call.finds("deviation_for_variance", what=what, level="fault" if sure else "advice")


def rate(call: LossCall) -> Findings:
    """poisson_nll_loss takes the logarithm of a rate, or with log_input=False the rate."""
    found, given, target = behind(call.values.get("input")), call.tensor("input"), call.tensor("target")
    if found is None or given is None or target is None or not given.numel():
        return
    logs, op, mean = bool(call.given.get("log_input", True)), found.op, float(target.double().mean())
    built = op in _POSITIVE and (found.shifted or op not in ("exp", "softplus", "relu"))
    if logs and op in ("exp", "softplus", "relu") and not found.shifted:
        yield call.finds("rate_scale", op=op)
    elif not logs and bool((given < 0).any()):
        yield call.finds("rate_scale/below", low=float(given.min()))
    elif logs and given.numel() >= LEAST and 0.0 <= mean < 1.0 and bool((given > 0).all()):
        made = f", as {op} makes them" if built else ""
        yield call.finds("rate_scale/above", made=made, mean=mean, level="fault" if built else "advice")
    if bool((target < 0).any()):
        yield call.finds("target_out_of_range/counts", low=float(target.min()))


# Shapes


def inserted(value: Value | None, most: int = 1) -> bool:
    """Whether an axis was inserted on the way, as on both sides where all pairs are meant."""
    for one in made_of(value, most):
        if one.op in _INSERTS and one.parents and len(one.shape) > len(one.parents[0].shape):
            return True
    return False


def moved_and_inserted(value: Value | None) -> bool:
    while value is not None and value.parents and unmoved(value) is not value:
        if inserted(value):
            return True
        value = value.parents[0]
    return False


def broadcast(call: LossCall) -> Findings:
    """Two sides that both grow when they are compared: (N, 1) against (N,) gives (N, N)."""
    sides = [n for n in ("input", "target", "var") if isinstance(call.given.get(n), torch.Tensor)][:2]
    if len(sides) == 2 and not all(moved_and_inserted(call.values[n]) for n in sides):
        left, right = (tuple(call.given[n].shape) for n in sides)
        out = both_grow(left, right)
        if out is not None:
            yield compared(call, left, right, out, "the shapes of the call")


def compared(call: LossCall, left: Any, right: Any, out: tuple[int, ...], how: str, otherwise: str = "") -> Finding:
    sizes: dict[str, Any] = {"pairs": math.prod(out), "rows": max(math.prod(left), math.prod(right))}
    return call.finds("broadcast", left=left, right=right, out=out, **sizes, how=how, otherwise=otherwise)


def differences(call: LossCall) -> Findings:
    """(N, 1) from a layer with one output against (N,) of the data, where every pair counts equally."""
    for one, other in (("input", "target"), ("target", "input")):
        column, row, value = call.given[one], call.given[other], call.values[one]
        if column.dim() == 2 and column.shape[1] == 1 and column.requires_grad:
            break
    else:
        return
    if row.requires_grad or row.shape != column.shape[:1] or call.weights is None or value.op in _INSERTS - {"expand"}:
        return
    if not any(v.op in PRODUCTS | CONVOLUTIONS | {"addmm"} and v.shape == value.shape for v in made_of(value, 40)):
        return
    earlier = [c for c in call.step.calls if c.name == "difference" and c is not call and c.weights is not None]
    if any(_both_train(c) and any(column is side for side in c.given.values()) for c in call.step.calls):
        return  # an energy distance: pairs with the data less pairs among its own
    table = call.weights.double(), call.out.detach().double()
    others = [
        larger_of(table, (c.weights.double(), c.out.detach().double()))
        for c in earlier
        if any(isinstance(s, torch.Tensor) and torch.equal(s, row) for s in c.given.values())
    ]
    if any(t is not None and sum_over_pairs(*t) for t in (table, *others)):
        left, right, n = tuple(call.given["input"].shape), tuple(call.given["target"].shape), column.shape[0]
        how = "one side is the output of a layer with one feature, the other data, and every pair counts"
        yield compared(call, left, right, (n, n), how)


def _both_train(call: LossCall) -> bool:
    sides = call.given.get("input"), call.given.get("target")
    return call.name == "difference" and all(isinstance(s, torch.Tensor) and s.requires_grad for s in sides)


def larger_of(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The table of which the loss is made where it takes the larger, or everywhere the smaller, of two differences, as
    a clipped value loss does: the gradient at an entry that is not taken is 0."""
    (w, v), (other_w, other_v) = one, other
    if not w.shape == other_w.shape == v.shape == other_v.shape:
        return None
    mine, theirs, gap = w != 0, other_w != 0, v.abs() - other_v.abs()
    equal = gap.abs() <= 4 * torch.finfo(torch.float32).eps * torch.maximum(v.abs(), other_v.abs())
    sign = torch.where(mine, gap, -gap)[~equal].sign()
    one_way = bool((sign == 1).all()) or bool((sign == -1).all())
    if not one_way or not bool((mine | theirs).all()) or bool((mine & theirs & ~equal).any()):
        return None
    return w + other_w, torch.where(mine, v, other_v)


def sum_over_pairs(weights: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the loss is a sum of squares or of absolute values over the pairs: the gradient at each pair is its
    difference, or its sign, times a factor of its row and one of its column. In a kernel over pairs it is not."""
    sizes = weights.abs()
    if weights.shape != values.shape or not bool(sizes.max() > 0):
        return False
    if bool((((sizes - sizes.max()).abs() <= 1e-4 * sizes.max()) | (sizes == 0)).all()):
        return True
    for factors in (sizes / values.abs().clamp(min=1e-30), sizes):
        if factors.dim() == 2 and bool((factors > 0).all()) and bool(torch.isfinite(factors).all()):
            logs = factors.log()
            if bool((logs - logs.mean(0, keepdim=True) - logs.mean(1, keepdim=True) + logs.mean()).abs().max() <= 1e-3):
                return True
    return False


def rows_times_a_column(call: LossCall) -> Findings:
    """(N,) times (N, 1). Where all pairs count alike the sum is the product of the two sums, and what a row is
    multiplied with has no say. Of log-probabilities it is never meant: a row's belong to its own advantage."""
    row, column = sorted((call.given["input"], call.given["target"]), key=lambda side: side.dim())
    if row.dim() != 1 or tuple(column.shape) != (len(row), 1) or call.weights is None:
        return
    if all(inserted(call.values[name]) for name in ("input", "target")):
        return
    alike = all_alike(call.weights)
    logs = {id(c.made) for c in call.step.calls if c.name.endswith(".log_prob")}
    likely = any(id(v) in logs for name in ("input", "target") for v in made_of(call.values[name], 40))
    if alike or likely:
        left, right, n = tuple(call.given["input"].shape), tuple(call.given["target"].shape), len(row)
        what = "log-probabilities" if likely else "values"
        how = "the gradient at all of them is the same: the sum is that of the one times that of the other"
        how = how if alike else "one side comes from log_prob, of one number for each row"
        sizes: dict[str, Any] = {"left": left, "right": right, "out": (n, n), "pairs": n * n, "rows": n}
        yield call.finds("broadcast/products", **sizes, what=what, how=how, culprit="product")


def all_alike(weights: torch.Tensor | None) -> bool:
    """Whether all entries have one weight in what is backpropagated."""
    flat = None if weights is None else weights.detach().reshape(-1)
    return flat is not None and flat.numel() > 1 and bool(flat[0] != 0) and bool((flat == flat[0]).all())


def products(call: LossCall) -> Findings:
    """The logarithm of a softmax times probabilities: a cross entropy written out."""
    for one, other in (("input", "target"), ("target", "input")):
        found, logs, shares = behind(call.values[one]), call.tensor(one), call.tensor(other)
        if found is None or logs is None or shares is None or found.op not in ("log", "log_softmax", "sub", "__sub__"):
            continue
        theirs = _axes(sums_to_one, shares if shares.is_floating_point() else shares.double())
        mine = _axes(logs_of_one, logs) if theirs else set()
        if mine and not mine & theirs:
            yield call.finds("wrong_axis/sides", mine=mine, theirs=theirs, culprit="log_softmax")

    def terms(value: Value) -> tuple[Value, ...]:
        found = behind(value)
        both = found is not None and found.op in ("sub", "__sub__") and len(found.value.parents) == 2
        return found.value.parents if both and found is not None else (value,)

    for left in terms(call.values["input"]):
        for right in terms(call.values["target"]):
            yield from sharpened(call, left, right)


# The sign


def sign(call: LossCall) -> Findings:
    """A loss that is maximised, or a likelihood or a similarity that is minimised."""
    weights = call.weights
    if weights is None or call.root is None or weights.shape != call.out.shape:
        return
    raised, lowered = bool((weights < 0).any()), bool((weights > 0).any())
    target, value, known = call.given.get("target"), call.values.get("input"), call.known
    if raised and not lowered and call.of_torch:
        alone = call.alone and not (isinstance(target, torch.Tensor) and target.requires_grad)
        yield flipped(
            call,
            f"is maximised: what is backpropagated {'is its negative' if alone else 'subtracts it'}",
            "" if alone else "add it in place of subtracting it",
            level="fault" if alone else "advice",
        )
    if raised or not lowered:
        return
    if call.name == "gather" and value is not None and value.op == "log_softmax":
        if call.alone and all_alike(weights):
            yield flipped(call, "of log-probabilities is minimised: what is backpropagated is not its negative")
    elif known is not None and call.name.endswith(".log_prob"):
        asked = call.given.get("value")
        given = isinstance(asked, torch.Tensor) and asked.is_floating_point() and not asked.requires_grad
        if given and call.alone and all_alike(weights) and _of_batch(call, asked):  # an action may be made less likely
            why = "of the data is minimised: what is backpropagated is the log-likelihood"
            yield flipped(call, why, "-log_prob(y).mean()")
    elif known is not None and call.name.endswith(".entropy"):
        logs = [c.weights for c in call.step.calls if c.name.endswith(".log_prob") and c.known and c.weights is not None
                and c.known.owner is known.owner]  # fmt: skip
        if any(bool((w > 0).any()) and bool((w < 0).any()) for w in logs):
            why = "of the policy is minimised: a bonus for entropy is subtracted from the loss"
            yield flipped(call, why, "loss = policy_loss - coefficient * entropy.mean()")
    elif known is not None and known.contract.gives == "similarity" and "." not in call.name:
        why = "is minimised: it is larger the more alike its arguments are"
        yield flipped(call, why, f"1 - {call.name}(...), or its negative")


def flipped(call: LossCall, why: str, otherwise: str = "", level: Any = "fault") -> Finding:
    return call.finds("sign_flipped", why=why, otherwise=otherwise, level=level)


def _of_batch(call: LossCall, value: torch.Tensor) -> bool:
    """Whether these are numbers of the batch, and none that were sampled."""
    batch = tensors_in(call.step.batch)
    return any(t.numel() == value.numel() and bool((t.reshape(-1) == value.reshape(-1)).all()) for t in batch)


# What only functions of libraries take


def asked_value(call: LossCall, name: str) -> Findings:
    """The value of ``log_prob``: of the shape of the batch and the event, or of fewer axes."""
    value, owner = call.given[name], call.known.owner  # type: ignore[union-attr]
    shape, given = (*owner.batch_shape, *owner.event_shape), tuple(value.shape)
    grown = both_grow(given, shape)
    if grown is None or len(given) == len(shape) or math.prod(given) != math.prod(shape):
        return
    meant = any(inserted(v, 12) for n, v in call.values.items() if n == name or n.startswith("parameter "))
    if not meant or all_alike(call.weights):
        how = "all of them count alike" if meant else "no axis was inserted on either side"
        repair = "squeeze(-1) the parameters, or unsqueeze(-1) the value, so that both have one shape"
        yield compared(call, given, shape, grown, how, repair)


def row_labels(call: LossCall, name: str) -> Findings:
    """One label for each embedding: a loss of pairs needs two that are equal, and two that differ."""
    labels = call.tensor(name)
    if labels is None or labels.dim() != 1 or len(labels) < 2 or call.out.detach().double().sum() != 0:
        return
    kinds = len(torch.unique(labels))
    if kinds in (1, len(labels)) and (call.arrived is None or not bool(call.arrived.any())):
        kind, alike, repair = "negative", "all rows have one label", "sample rows of several classes in a batch"
        if kinds > 1:
            kind, alike = "positive", "no two rows have one label"
            repair = "sample several rows of each class (MPerClassSampler), or where labels are made give both views "
            repair += "of a row one: torch.arange(n).repeat(2)"
        facts: dict[str, Any] = {"kind": kind, "alike": alike, "kinds": kinds, "all": len(labels)}
        yield call.finds("no_pairs", **facts, culprit=name, repair=repair)


def images(call: LossCall, name: str) -> Findings:
    """Images of the data in a range that is not the one that the call is told."""
    given, contract = call.tensor(name), call.known.contract  # type: ignore[union-attr]
    upper: Any = contract.value_range
    upper = call.given.get(upper) if isinstance(upper, str) else upper
    upper = upper[1] - upper[0] if isinstance(upper, tuple) else upper
    if given is None or call.values[name].history or not isinstance(upper, (int, float)) or not given.numel():
        return
    span = float(given.max()) - min(0.0, float(given.min()))
    if upper and span > 0 and (upper >= FAR * span or span >= FAR * upper):
        facts: dict[str, Any] = {
            "upper": upper,
            "seen": bounds(given),
            "high": float(given.max()),
            "fits": 1 if span <= 1 else 255,
        }
        yield call.finds("value_range", name=contract.value_range, **facts, culprit=name)


def boxes(call: LossCall, name: str) -> Findings:
    """Boxes that are read as (x1, y1, x2, y2): corners in order, and both sides in one format."""
    given = call.tensor(name)
    if given is None or given.dim() < 1 or given.shape[-1] != 4 or not given.numel():
        return
    predicted = call.values[name].history
    for other in call.step.calls if predicted else ():
        if other.name not in DISTANCE_LOSSES or other.given["input"] is not call.given[name]:
            continue
        theirs = other.given["target"]
        mine = next((v for n, v in call.given.items() if n not in (name, "input") and _is_like(v, given)), None)
        at, size = theirs[..., :2], theirs[..., 2:]
        for fmt, low in (("cxcywh", at - size / 2), ("xywh", at)):
            if mine is not None and _close(torch.cat([low, low + size], -1), mine) and not _close(theirs, mine):
                facts: dict[str, Any] = {
                    "here": listed(mine.reshape(-1, 4)[0]),
                    "there": listed(theirs.reshape(-1, 4)[0]),
                }
                at_line = f"{other.place.file}:{other.place.line}"
                yield call.finds("box_format/two", fmt=fmt, **facts, at=at_line, culprit=name)
                return
    wrong = (given[..., 2] < given[..., 0]) | (given[..., 3] < given[..., 1])
    if bool(wrong.any()):
        sizes = not predicted and bool((given[..., 2:] >= 0).all())
        convert = "box_convert(boxes, in_fmt='cxcywh', out_fmt='xyxy'); in_fmt='xywh' if the first two are the corner"
        yield call.finds(
            "box_format", count=int(wrong.sum()), all=wrong.numel(), whose="predicted" if predicted else "target",
            sizes=", and as centre, width and height all of them are boxes" if sizes else "", name=name, culprit=name,
            seen=listed(given.reshape(-1, 4)[wrong.reshape(-1)][0]), level="advice" if predicted else "fault",
            repair=convert if sizes or predicted else "order the corners: x1 <= x2 and y1 <= y2",
        )  # fmt: skip


def _is_like(value: Any, given: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == given.shape


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for the rounding of a sum and a half."""
    if left.shape != right.shape:
        return False
    allowed = 8 * torch.finfo(right.dtype).eps * (1 + right.detach().abs().max()) if right.is_floating_point() else 0.0
    return bool(((left.detach().double() - right.detach().double()).abs() <= allowed).all())


def other_flags(call: LossCall, word: str) -> str:
    """The flags with which the same function takes its input as ``word``: the repair, where there is one."""
    if call.known is None:
        return ""
    mine, found = call.known.contract, []
    for other in call.known.entry.contracts:
        changed = [f"{n}={v!r}" for n, v in other.when.items() if mine.when.get(n) != v]
        alike = (other.target and other.arguments[other.target] == "index") == (
            mine.target and mine.arguments[mine.target] == "index"
        )
        if other.outputs and other.arguments[other.outputs[0]] == word and len(changed) == 1 and alike:
            found += changed
    return f"pass {' or '.join(dict.fromkeys(found))} to {call.known.name}" if found else ""


# Calls for which torch raises


def refused(call: LossCall) -> Findings:
    """Why a loss function raised, where its arguments show it."""
    given, target, error, name = call.tensor("input"), call.tensor("target"), str(call.error), call.name
    if name == "embedding":
        weight = call.tensor("weight")
        if given is not None and weight is not None and given.numel() and not given.is_floating_point():
            low, high, rows = int(given.min()), int(given.max()), weight.shape[0]
            if low < 0 or high >= rows:
                facts: dict[str, Any] = {
                    "module": f" {call.module}" if call.module else "",
                    "last": rows - 1,
                    "low": low,
                    "high": high,
                }
                yield call.finds("ids_out_of_range", **facts, culprit=call.module or "embedding")
        return
    if name == "ctc_loss":
        yield call.finds("lengths_refused", culprit="lengths")
    if given is None or target is None:
        return
    of_classes = name in CLASS_LOSSES | {"multi_margin_loss"}
    shape, other = tuple(given.shape), tuple(target.shape)
    expected, count = ((shape[0], *shape[2:]), shape[1]) if len(shape) > 1 else ((), given.numel())
    floats, needed = target.is_floating_point(), "int64" if of_classes else dtype(given)
    wider = next(entry_weights(call), None) if name not in CLASS_LOSSES else None
    if wider is not None:
        yield wider
    elif name == "gaussian_nll_loss" and "negative" in error:
        yield call.finds("log_variance", what="negative values", culprit="var")
    elif "weight tensor should be defined" in error:
        yield call.finds("weight_shape/classes", count=count, culprit="weight")
    elif of_classes and len(shape) > 2 and other == shape[:-1] != expected:
        yield call.finds("class_axis/raised", other=other)
    elif of_classes and other != expected:
        hot = other == shape and not floats and bool(((target == 0) | (target == 1)).all())
        one = target.numel() == math.prod(expected)
        repair = "target.squeeze(-1)" if one else "one class index for each row"
        repair = "target.argmax(1), or target.float() for class probabilities" if other == shape else repair
        facts: dict[str, Any] = {"hot": "one-hot " if hot else "", "other": other, "expected": expected}
        yield call.finds("target_shape/classes", **facts, culprit="target", repair=repair)
    elif of_classes and target.dtype == torch.int64:
        yield from class_indices(call)
    elif not of_classes and other != shape and (name in BINARY_LOSSES or len(shape) != len(other)):
        yield call.finds("target_shape/equal", other=other, culprit="target")
    elif name == "binary_cross_entropy" and bool(((given < 0) | (given > 1)).any()):
        yield call.finds("logits_as_probabilities/raised")
    elif name == "binary_cross_entropy" and bool(((target < 0) | (target > 1)).any()):
        yield from two_labels(call)
    elif dtype(target) != needed:
        cast = "target.long()" if needed == "int64" else "target.to(output.dtype)"
        yield call.finds("target_dtype", have=dtype(target), needed=needed, cast=cast, culprit="target")
    elif any(word in error.lower() for word in ("size", "shape", "dim")):
        shapes = {n: tuple(v.shape) for n, v in call.given.items() if isinstance(v, torch.Tensor) and v.dim()}
        if len({*shapes.values()}) > 1:
            yield call.finds("target_shape", shapes=", ".join(f"{n} {s}" for n, s in shapes.items()), culprit="target")


BY_NAME = {
    "kl_div": divergence,
    "ctc_loss": ctc,
    "multilabel_margin_loss": index_lists,
    "gaussian_nll_loss": variance,
    "poisson_nll_loss": rate,
    "logsumexp": written_out,
    "softplus": written_out,
    "log1p": written_out,
    "product": products,
    "difference": differences,
    "outer": rows_times_a_column,
}
"""What only one function takes."""
BY_WORD = {
    "probabilities": probabilities,
    "log_probabilities": log_probabilities,
    "binary": two_labels,
    "one_hot": two_labels,
    "index": class_indices,
}
BY_WORD_AND_NAME = {"labels": row_labels, "boxes": boxes, "images": images, "distribution_value": asked_value}
"""What an argument of a function in the table of losses is judged by."""
