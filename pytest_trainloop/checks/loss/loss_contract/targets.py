"""Targets: what a loss function compares its input with, numbers and weights, and why torch refuses a call."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_contract.call import bounds, broadcast_to, dtype, listed
from pytest_trainloop.checks.loss.loss_contract.scores import logs_of_one, slack, softmax_of_softmax, sums_to_one
from pytest_trainloop.instruments.tracing.tape_queries import (
    axis_of,
    behind,
    by_weights,
    constant,
    layout,
    made_of,
    unmoved,
)
from pytest_trainloop.recording.torch_names import BINARY_LOSSES, CLASS_LOSSES, CONVOLUTIONS, SIGN_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import LossCall
    from pytest_trainloop.core.finding import Finding, Level

    Findings = Iterator[Finding]

WIDER, LABELS = 8, 100
"""Advice is given for a head this many times wider than the classes in use, from this number of labels on."""
SOFTENED = 1.5
"""Targets up to here are in use for a discriminator's real images (smoothed between 0.7 and 1.2)."""
RARE, MANY = 0.05, 200
"""Advice is given below this share of positive labels, from this number of labels on."""
LEAST = 16
"""Entries from which all of one sign are no accident of an untrained net."""
_POSITIVE = frozenset({"exp", "softplus", "relu", "sigmoid", "square", "abs", "expm1"})
_DEVIATION = re.compile(r",\s*(?:var\s*=\s*)?((?:\w+\.)*(?!\w*log)\w*(?:std|sigma|stddev)\w*)\s*[,)]")
"""An argument that is one name, called a deviation; not its square or logarithm."""


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
        return
    square = len(shape) == 3 and shape[1] == shape[2] == at.features
    plain = not at.moved and at.layer.op not in CONVOLUTIONS
    if square and plain and target is not None and target.shape == (shape[0], shape[2]):
        yield call.finds("class_axis", "square", count=at.features)


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
            yield call.finds("all_ignored", all=target.numel(), ignored=ignored, culprit=culprit)
        return
    if call.known is not None:
        keep = keep & call.counted(target)
    count, kept = given.shape[call.class_dim if given.dim() > 1 else 0], target[keep]
    if not kept.numel() or count < 2:
        return
    low, high = int(kept.min()), int(kept.max())
    if low < 0 or high >= count:
        kinds = torch.unique(kept[(kept < 0) | (kept >= count)]).tolist()
        hint = "" if ignored is None else f"; ignore_index is {ignored}"
        if (low, kinds) == (1, [count]):
            hint, repair = f": they are 1 to {count}, off by one", "count labels from 0: target - 1"
        elif call.known is not None:
            one = len(kinds) == 1 and isinstance(call.known.contract.ignore_index, str)
            repair = f"pass ignore_index={kinds[0]}, if that label marks what is not to be learned" if one else ""
        elif low < 0:
            repair = _where_from(kinds, ignored)
        else:
            hint = f": the head is {high + 1 - count} too narrow, or labels need a map"
            repair = "remap labels to 0 ... C-1"
        how = f"torch raised: {call.raised}" if call.error else "the labels that count in the loss"
        facts = {"low": low, "high": high, "last": count - 1, "hint": hint, "seen": listed(torch.unique(kept))}
        yield call.finds("target_out_of_range", **facts, how=how, repair=repair, culprit="target")
    elif call.known is None and kept.numel() >= LABELS and count >= WIDER * (high + 1):
        times = f"{count / (high + 1):.0f}"
        yield call.finds("head_too_wide", times=times, count=count, high=high, level="advice")
    elif call.known is None and kept.numel() >= LABELS and count > 2 and low == high and call.values["target"].batch:
        # the zeros of a contrastive loss are no labels of the batch (odd: momentum_contrast)
        facts = {"count": count, "high": high, "labels": kept.numel(), "level": "advice"}
        yield call.finds("head_too_wide", "one class", **facts, change="", every=True)


def _where_from(kinds: list[int], ignored: Any) -> str:
    """Of negative labels: one may be that of what is left out. To ignore it would hide a class that the map of names
    lacks."""
    look = "look where these labels come from: a map of names that lacks a class gives one label to all of them"
    if len(kinds) > 1:
        return look
    return f"{look}\nif {kinds[0]} is the label of what is left out: ignore_index={kinds[0]}, or label it {ignored}"


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
        why = "they come from a sigmoid, which treats each class separately"
    elif not whole and bool((sums - sums.flatten()[0]).abs().max() <= allowed):
        why = "every row sums to the same number"
    heavy = not why and not bool((wide < 0).any()) and bool((sums > 1 + allowed).any())
    if why or heavy:
        yield call.finds(
            "target_not_distribution", why=why or "each row weighs as much as its targets sum to", sums=listed(sums),
            culprit="target", level="advice" if heavy else "fault", repair=_SETTLED if heavy else "",
        )  # fmt: skip


_SETTLED = (
    "divide each row by its sum; where a row may have several labels: binary_cross_entropy_with_logits; where rows are "
    "to weigh by their sums, as counts do: write -(target * log_softmax(scores)).sum(-1), which settles it"
)


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
    how = "the weights are whole numbers, as an integer division leaves them, and the labels contain the class"
    if nothing:
        how = "the gradient at the scores of all other rows is exactly 0"
    level: Level = "fault" if nothing else "advice"
    facts = {"idle": listed(idle, 3), "only": str(only) if nothing else "", "seen": listed(weight), "how": how}
    yield call.finds("class_without_weight", level=level, **facts)


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
        if softened and call.known is not None:
            return
        values = torch.unique(target).tolist()
        repair = f"bring targets to [{low:g}, {high:g}]; class indices go with a loss over classes"
        repair = repair if call.known is not None else ""
        reach = f"targets reach from {float(target.min()):.4g} to {float(target.max()):.4g}"
        if values == [-1.0, 1.0]:
            reach, repair = "labels are -1 and 1", "map the labels: (y + 1) / 2"
        elif values in ([0.0, 255.0], [255.0]):
            repair = "divide the masks by 255, or compare them: mask > 0"
        facts: dict[str, Any] = {"reach": reach, "low": f"{low:g}", "high": f"{high:g}", "bounded": call.known}
        facts |= {"count": bad.numel(), "all": target.numel(), "seen": seen, "culprit": "target"}
        yield call.finds("target_outside_unit", **facts, repair=repair, level="advice" if softened else "fault")
    elif call.known is None and call.given.get("pos_weight") is None and call.given.get("weight") is None:
        count = int((target > 0.5).sum())
        share = count / target.numel()
        if target.numel() >= MANY and 0 < share < RARE:
            facts = {"part": share, "count": count, "all": target.numel()}
            repair = f"pos_weight=negatives / positives (here {1 / share - 1:.0f})"
            yield call.finds("classes_imbalanced", **facts, repair=repair, level="advice")


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
        out = None if weight is None or given is None else broadcast_to(given.shape, weight.shape)
        if weight is None or given is None or out is None:
            continue
        if math.prod(out) > given.numel():
            how = f"torch raised: {call.raised}" if call.error else "the shapes of the call"
            repair = f"give {name} the shape of the input, or one entry for each class (its last axis)"
            facts = {"other": tuple(weight.shape), "out": out, "pairs": math.prod(out), "rows": given.numel()}
            yield call.finds("weight_shape", name=name, **facts, how=how, culprit=name, repair=repair)
        elif name == "pos_weight" and target is not None and target.shape == out:
            positive = target > 0
            if lost := int((positive & (weight == 0).to(target.device)).sum()):
                facts = {"lost": lost, "seen": bounds(weight), "count": int(positive.sum()), "all": target.numel()}
                yield call.finds("class_without_weight", "positives", **facts)


def variance(call: LossCall) -> Findings:
    """gaussian_nll_loss takes the variance: not its logarithm, nor its root."""
    found, value = behind(call.values.get("var")), call.values.get("var")
    if found is None:
        return
    if found.is_layer and not found.clamped and not found.shifted:
        how = "no exp, softplus or square lies between the layer and the loss"
        yield call.finds("log_variance", what="the output of a layer, which may be negative", how=how)
        return
    called, base = _DEVIATION.search(call.place.code), unmoved(value)
    squared = base is not None and base.op in ("square", "pow", "mul") and len({*map(id, base.parents)}) == 1
    root = found.op in ("std", "sqrt")
    if root or (called is not None and not squared):
        sure = found.op == "std" or (root and called)
        what = f"the result of {found.op}" if root else called[1] if called else ""
        how = f"only casts and constants lie between {found.op} and the loss" if root else "the name of the argument"
        yield call.finds("deviation_for_variance", what=what, how=how, level="fault" if sure else "advice")


def rate(call: LossCall) -> Findings:
    """poisson_nll_loss takes the logarithm of a rate, or with log_input=False the rate."""
    found, given, target = behind(call.values.get("input")), call.tensor("input"), call.tensor("target")
    if found is None or given is None or target is None or not given.numel():
        return
    logs, op, mean = bool(call.given.get("log_input", True)), found.op, float(target.double().mean())
    built = op in _POSITIVE and (found.shifted or op not in ("exp", "softplus", "relu"))
    if logs and op in ("exp", "softplus", "relu") and not found.shifted:
        yield call.finds("rate_scale", op=op, repair=f"give the scores before {op}, or pass log_input=False")
    elif not logs and bool((given < 0).any()):
        yield call.finds("rate_scale", "below", low=f"{float(given.min()):.4g}")
    elif logs and given.numel() >= LEAST and 0.0 <= mean < 1.0 and bool((given > 0).all()):
        made = f", as {op} makes them" if built else ""
        facts = {"made": made, "mean": f"{mean:.3g}", "least": f"{float(given.double().min().exp()):.4g}"}
        yield call.finds("rate_scale", "above", **facts, level="fault" if built else "advice")
    if bool((target < 0).any()):
        yield call.finds("target_out_of_range", "counts", low=f"{float(target.min()):.4g}")


def refused(call: LossCall) -> Findings:
    """Why a loss function raised, where its arguments show it."""
    given, target, error, name = call.tensor("input"), call.tensor("target"), str(call.error), call.name
    if name == "embedding":
        weight = call.tensor("weight")
        if given is not None and weight is not None and given.numel() and not given.is_floating_point():
            low, high, rows = int(given.min()), int(given.max()), weight.shape[0]
            if low < 0 or high >= rows:
                facts = {"module": call.module, "last": rows - 1, "low": low, "high": high}
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
        yield call.finds("log_variance", what="negative values", how=f"torch raised: {call.raised}", culprit="var")
    elif "weight tensor should be defined" in error:
        repair = f"give one weight for each class, of shape ({count},)"
        yield call.finds("weight_shape", "classes", count=count, culprit="weight", repair=repair)
    elif of_classes and len(shape) > 2 and other == shape[:-1] != expected:
        yield call.finds("class_axis", "raised", other=other)
    elif of_classes and other != expected:
        hot = other == shape and not floats and bool(((target == 0) | (target == 1)).all())
        one = target.numel() == math.prod(expected)
        repair = "target.squeeze(-1)" if one else "one class index for each row"
        repair = "target.argmax(1), or target.float() for class probabilities" if other == shape else repair
        facts = {"hot": hot, "other": str(other), "expected": str(expected), "culprit": "target"}
        yield call.finds("target_shape", "classes", **facts, repair=repair)
    elif of_classes and target.dtype == torch.int64:
        yield from class_indices(call)
    elif not of_classes and other != shape and (name in BINARY_LOSSES or len(shape) != len(other)):
        yield call.finds("target_shape", "equal", other=str(other), culprit="target")
    elif name == "binary_cross_entropy" and bool(((given < 0) | (given > 1)).any()):
        yield call.finds("logits_as_probabilities", "raised")
    elif name == "binary_cross_entropy" and bool(((target < 0) | (target > 1)).any()):
        yield from two_labels(call)
    elif dtype(target) != needed:
        repair = "target.long()" if needed == "int64" else "target.to(output.dtype)"
        yield call.finds("target_dtype", have=dtype(target), needed=needed, culprit="target", repair=repair)
    elif any(word in error.lower() for word in ("size", "shape", "dim")):
        shapes = {n: tuple(v.shape) for n, v in call.given.items() if isinstance(v, torch.Tensor) and v.dim()}
        if len({*shapes.values()}) > 1:
            named, repair = ", ".join(f"{n} {s}" for n, s in shapes.items()), "give all of them one shape"
            yield call.finds("target_shape", shapes=named, culprit="target", repair=repair)
