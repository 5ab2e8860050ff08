"""Scores, probabilities and their logarithms: whether a loss function is given the one that it takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pytest_trainloop.checks.loss.loss_contract.call import named
from pytest_trainloop.core.wording import count as times
from pytest_trainloop.instruments.tracing.tape_queries import (
    across_rows,
    axis_of,
    behind,
    by_weights,
    dropout_rate,
    inner,
    is_sigmoid,
    layout,
    made_of,
    of_unit_rows,
    statement,
    unmoved,
)
from pytest_trainloop.recording.torch_names import (
    CONVOLUTIONS,
    HALF_OPEN_ACTIVATIONS,
    NEGATIONS,
    PRODUCTS,
    SOFTMAXES,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import LossCall
    from pytest_trainloop.core.finding import Finding, Level
    from pytest_trainloop.instruments.tracing.tape import Value
    from pytest_trainloop.instruments.tracing.tape_queries import Found

    Findings = Iterator[Finding]

WIDEST = 2.0
"""A range of scores up to which no class can be predicted with confidence: with two classes, the loss cannot fall below
about exp(-2). Soft caps (30 tanh(x / 30)) are far wider."""
COLD = 0.5
"""Factor on cosines below which their whole range is less than 1."""
SHARPER = 1.5
"""Factor on the scores of both sides from which it is a temperature."""

_IN_ORDER = "kl_div(log_softmax(student), softmax(teacher))"
TAKES_LOG_SOFTMAX = frozenset({"cross_entropy", "log_softmax"})
TAKES_SIGMOID = frozenset({"binary_cross_entropy_with_logits", "multilabel_soft_margin_loss", "log_sigmoid"})


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


def _axes(holds: Callable[[torch.Tensor, int], bool], tensor: torch.Tensor) -> set[int]:
    return {d for d in range(tensor.dim()) if holds(tensor, d)}


def _sides(mine: set[int], theirs: set[int]) -> dict[str, str]:
    """The axes along which each side sums to 1, for a text."""
    return {"mine": " and ".join(map(str, sorted(mine))), "theirs": " and ".join(map(str, sorted(theirs)))}


def scores(call: LossCall) -> Findings:
    """The input where scores are expected: of one class among several, or of yes or no."""
    found, given, classes = behind(call.values.get("input")), call.tensor("input"), call.over_classes
    axis = call.class_dim
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
            yield given_probabilities(call, source, otherwise, abs(found.scale))
    elif op == "tanh" and 2 * abs(found.scale) <= WIDEST and (classes or not found.shifted):
        yield activation(call, source, f"no score leaves [-{found.scale:g}, {found.scale:g}]", otherwise)
    elif op in HALF_OPEN_ACTIVATIONS and found.scale > 0 and not found.shifted:
        why = "class can be given a score below 0" if classes else "score can be below 0, and no probability below 0.5"
        yield activation(call, source, f"no {why}", otherwise)
    elif found.low >= 0 and found.is_layer and not found.shifted:
        repair = f"leave the clamp out; {otherwise}"
        yield call.finds("activation_on_logits", "clamp", culprit="clamp", repair=repair)
    elif found.dropped is not None and found.dropped.call is not None and found.is_layer and by_weights(source):
        yield call.finds("dropout_on_logits", source=found.dropped, rate=f"{dropout_rate(found.dropped.call):g}")
    elif call.name == "cross_entropy" and op == "log_softmax" and found.scale == 1 and not found.shifted:
        if logs_of_one(given, axis):
            yield call.finds("log_probabilities_as_logits", source=source, level="advice")
    elif classes and op not in ("log_softmax", "log_sigmoid") and found.scale == 1 and sums_to_one(given, axis):
        yield given_probabilities(call, None, otherwise)
    if classes and call.known is None:
        yield from inverted_temperature(call, found)
        yield from normalised_over_rows(call, found)


def given_probabilities(call: LossCall, source: Value | None, repair: str, width: float = 1.0) -> Finding:
    """Probabilities in place of scores, times ``width``: no class can get a large probability then."""
    least, flags, given = "", other_flags(call, "probabilities"), call.tensor("input")
    if call.over_classes and given is not None and float(given.max() - given.min()) <= width * (1 + 1e-3):
        classes = given.shape[call.class_dim]
        most = 1 / (1 + (classes - 1) * math.exp(-width))
        least = f"over {classes} classes none can get a probability above {most:.4g}, however confident the model is"
        least = f"{_lowest(call, given, width)}{least}"
    repair = f"{repair}; or {flags}" if flags else repair
    if source is None:
        made = statement(unmoved(call.values.get("input")))
        return call.finds("probabilities_as_logits", "sums", least=least, repair=repair, every=True, change=made)
    name = named(source).replace(source.op, "sigmoid" if is_sigmoid(source) else source.op)
    return call.finds("probabilities_as_logits", source=source, culprit=name, least=least, repair=repair)


def _lowest(call: LossCall, given: torch.Tensor, width: float) -> str:
    """The loss, and that of scores which are all for the correct class, by the same call: in the call's own reduction,
    with its weights, and without ignored targets."""
    target, axis, smoothed = call.tensor("target"), call.class_dim, call.given.get("label_smoothing")
    if call.name != "cross_entropy" or target is None or target.is_floating_point() or smoothed:
        return ""
    correct = target.long().clamp(0, given.shape[axis] - 1).unsqueeze(axis)
    best = torch.zeros_like(given).scatter(axis, correct, width)
    asked = {n: call.given[n] for n in ("weight", "ignore_index", "reduction") if n in call.given}
    lowest = float(F.cross_entropy(best, target, **asked).double().mean())
    return f"loss {float(call.out.detach().double().mean()):.4g}, where {lowest:.4g} is the lowest: "


def activation(call: LossCall, source: Value, why: str, otherwise: str) -> Finding:
    repair = f"leave {source.op} out after the last layer; {otherwise}"
    return call.finds("activation_on_logits", source=source, why=why, repair=repair)


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
        facts = {"scale": f"{scale:g}", "width": f"{2 * abs(scale):.3g}", "culprit": "temperature"}
        repair = f"scores / {scale:g}: divide by the temperature"
        level: Level = "advice" if found.learned else "fault"
        yield call.finds("temperature_inverted", "cosines", repair=repair, level=level, **facts)


def sharpened(call: LossCall, *values: Value | None) -> Findings:
    """Distillation whose two sides are multiplied by a temperature above 1, which makes them sharper, not softer."""
    sides = [behind(v) for v in values]
    under = [behind(s.value.parents[0]) for s in sides if s is not None and s.op in SOFTMAXES]
    scaled = [u for u in under if u is not None and u.multiplied and u.scale > SHARPER and u.is_layer]
    if len(scaled) == 2 and scaled[0].scale == scaled[1].scale and not any(of_unit_rows(u.value) for u in scaled):
        scale = f"{scaled[0].scale:g}"
        repair = f"divide the scores by the temperature: scores / {scale}"
        yield call.finds("temperature_inverted", scale=scale, repair=repair)


def normalised_over_rows(call: LossCall, found: Found) -> Findings:
    """Cosines of vectors that were normalised over the rows, not each to length 1."""
    rows = call.step.rows
    sides = [f.value for f in map(behind, found.value.parents) if f is not None] if found.op in PRODUCTS else []
    wrong = [v for v in sides if v.op == "normalize" and axis_of(v) == 0 and len(v.shape) == 2 and v.shape[0] == rows]
    table = bool(wrong) and len(wrong) == len(sides) and found.value.shape == (rows, rows) != wrong[0].shape
    if table and not of_unit_rows(found.value):
        yield call.finds("wrong_axis", "rows", size=tuple(wrong[0].shape), culprit="normalize")


def probabilities(call: LossCall) -> Findings:
    """The input of a binary cross entropy, of a logarithm, and of losses of libraries that take probabilities."""
    found, given = behind(call.values.get("input")), call.tensor("input")
    if given is None or not given.numel() or not given.is_floating_point():
        return
    raw, of_log, outside = False, call.name == "log", 0
    if call.known is not None:
        outside = int(((given < 0) | (given > 1 + 8 * torch.finfo(given.dtype).eps)).sum())
        if found is not None and found.is_layer and by_weights(found.value):
            raw = not (found.clamped or found.shifted or of_unit_rows(found.value))
    elif found is not None:
        raw = is_clamped_layer(found) and (not of_log or found.high <= 1)
    if outside:
        facts = {"raw": raw, "count": outside, "all": given.numel(), "repair": other_flags(call, "logits")}
        yield call.finds("logits_as_probabilities", "outside", **facts)
    elif raw:
        clamped = ", clamped to [0, 1]" if found is not None and found.clamped else ""
        repair = other_flags(call, "logits")
        yield call.finds("logits_as_probabilities", clamped=clamped, repair=repair, every=call.known is not None)
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
            yield given_probabilities(call, source, "take the softmax once", abs(under.scale))
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
        when = f"after {times(call.steps, 'optimizer step')}" if call.steps else "before the first optimizer step"
        level: Level = "advice" if call.steps else "fault"  # training may have made them so
        facts = {"part": share, "when": when, "count": count, "all": wrong.numel(), "culprit": "sigmoid"}
        yield call.finds("probabilities_saturated", level=level, **facts)


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
        of_densities = any("log" in v.op for v in made_of(value, 12))  # which may be above 1, or of odds
        if not of_densities:
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
    same = source.op in SOFTMAXES and source.shape == call.given["input"].shape
    if same and axis_of(source) not in (None, call.given.get("dim")) and across_rows(source):
        yield over_the_wrong_axis(call, source)


def over_the_wrong_axis(call: LossCall, source: Value) -> Finding:
    axis, shape = axis_of(source) or 0, tuple(source.shape)
    return call.finds("wrong_axis", source=source, axis=axis, size=shape, entries=shape[axis])


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
    if _axes(sums_to_one, given):
        yield call.finds("probabilities_as_log_probabilities")
    elif found is not None and found.op == "softmax":
        yield call.finds("probabilities_as_log_probabilities", "softmax")
    elif found is not None and found.is_layer and not found.clamped and bool((given > 0).any()):
        how, repair = "it comes from the last layer, and no axis is normalised", "give log_softmax of the scores"
        yield call.finds("logits_as_log_probabilities", shown_by=how, repair=repair)
    elif found is not None and found.op == "log_softmax" and found.scale == 1 and target.shape == given.shape:
        mine, theirs = _axes(logs_of_one, given), _axes(sums_to_one, target) | _axes(logs_of_one, target)
        rows, softmax = across_rows(found.value), found.value
        if not mine and rows and sums_to_one(target, -1):
            yield over_the_wrong_axis(call, softmax)
        elif mine and rows and axis_of(softmax) == 0 and call.step.rows == given.shape[0]:
            yield call.finds("wrong_axis", "examples", source=softmax, culprit="log_softmax", **_sides(mine, theirs))
        elif mine and theirs and not mine & theirs:
            yield call.finds("wrong_axis", "sides", source=softmax, culprit="log_softmax", **_sides(mine, theirs))
    if not logs and below:
        low = f"{float(target.min()):.4g}"
        if source is not None and source.is_layer:
            yield call.finds("logits_as_probabilities", "teacher", low=low, every=True)
        else:
            yield call.finds("log_target_mismatch", low=low)
    elif logs and not below and _axes(sums_to_one, target):
        yield call.finds("log_target_mismatch", "shares")
    yield from softmax_of_softmax(call)
    if call.given["target"].requires_grad and not call.given["input"].requires_grad:
        yield call.finds("arguments_swapped", "reverse", level="advice", repair=_IN_ORDER)
    if call.given.get("reduction", "mean") == "mean" and given.dim() > 1:
        yield call.finds("mean_over_elements", all=given.numel(), classes=given.shape[-1], level="advice")
    yield from sharpened(call, call.values["input"], call.values["target"])


def softmax_of_softmax(call: LossCall) -> Findings:
    """Targets that are a softmax of a softmax: the largest is at most e times the smallest."""
    outer = behind(call.values["target"])
    under = behind(inner(outer.value)) if outer is not None and outer.op == "softmax" else None
    if outer is not None and under is not None and under.op == "softmax" and under.scale <= 1:
        same_axis = axis_of(under.value) == axis_of(outer.value)
        if same_axis:
            yield call.finds("target_not_distribution", "twice", culprit="target")


def products(call: LossCall) -> Findings:
    """The logarithm of a softmax times probabilities: a cross entropy written out."""
    for one, other in (("input", "target"), ("target", "input")):
        found, logs, shares = behind(call.values[one]), call.tensor(one), call.tensor(other)
        if found is None or logs is None or shares is None or found.op not in ("log", "log_softmax", "sub", "__sub__"):
            continue
        theirs = _axes(sums_to_one, shares if shares.is_floating_point() else shares.double())
        mine = _axes(logs_of_one, logs) if theirs else set()
        if mine and not mine & theirs:
            yield call.finds("wrong_axis", "sides", **_sides(mine, theirs), culprit="log_softmax")

    def terms(value: Value) -> tuple[Value, ...]:
        found = behind(value)
        both = found is not None and found.op in ("sub", "__sub__") and len(found.value.parents) == 2
        return found.value.parents if both and found is not None else (value,)

    for left in terms(call.values["input"]):
        for right in terms(call.values["target"]):
            yield from sharpened(call, left, right)


def other_flags(call: LossCall, word: str) -> str:
    """The flags with which the same function takes its input as ``word``: the repair, where there is one."""
    if call.known is None:
        return ""
    mine, found = call.known.contract, []
    for other in call.known.entry.contracts:
        changed = [f"{n}={v!r}" for n, v in other.when.items() if mine.when.get(n) != v]
        same_kind = (other.target and other.arguments[other.target] == "index") == (
            mine.target and mine.arguments[mine.target] == "index"
        )
        if other.outputs and other.arguments[other.outputs[0]] == word and len(changed) == 1 and same_kind:
            found += changed
    return f"pass {' or '.join(dict.fromkeys(found))} to {call.known.name}" if found else ""
