"""Calls that the table of losses, or the project, has a contract for: each argument by what it is said to hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract import binary, class_targets, scores
from pytest_trainloop.checks.loss.loss_contract.boxes import boxes, compared_with_all
from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, as_list
from pytest_trainloop.checks.loss.loss_contract.distributions import asked_value, entropy_minimised
from pytest_trainloop.checks.loss.loss_contract.value_tests import bounds, exceeds_one, sums_to_one
from pytest_trainloop.tracing.provenance_queries import LAYERS, behind, by_weights
from pytest_trainloop.wording import count, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.callcontract import CallContract
    from pytest_trainloop.losses.table.lookup import Known
    from pytest_trainloop.tracing.provenance_queries import Found

    OfArgument = Callable[[Call, Known, str], Iterator[Judgement]]

FAR = 100.0
"""How many times wider than its images a range is that is meant for others: bytes have 255 times that of [0, 1]."""


def by_contract(call: Call) -> Iterator[Judgement]:
    """What is wrong with a call by its contract."""
    known = call.known
    if known is None:
        return
    for name, word in known.contract.arguments.items():
        judge = _BY_WORD.get(word)
        if judge is not None and isinstance(call.given.get(name), torch.Tensor):
            for judgement in judge(call, known, name):
                yield judgement
                return  # what is wrong with the first argument leaves nothing to say of the others
    if call.unstepped:
        yield _untrained(call)
    if known.contract.pairwise:
        yield from compared_with_all(call)
    if known.name.endswith(".entropy"):
        yield from entropy_minimised(call)
    elif known.contract.gives == "similarity" and "." not in known.name:
        yield from _minimised(call)


def _logits(call: Call, known: Known, _name: str) -> Iterator[Judgement]:
    flagged = _other_flags(known, "probabilities")
    for judgement in scores.classes(call) if known.contract.over_classes else scores.binary(call):
        yield _repaired(judgement, flagged, "probabilities_as_logits")
    if known.contract.over_classes and known.contract.class_dim == 1:
        yield from class_targets.axis_of_classes(call)


def _probabilities(call: Call, known: Known, name: str) -> Iterator[Judgement]:
    given, found = call.tensor(name), behind(call.node(name))
    if given is None or not given.numel() or not given.is_floating_point():
        return
    over = 1 + 8 * torch.finfo(given.dtype).eps
    outside = (given < 0) | (given > over)
    raw = found is not None and found.node.op in LAYERS and by_weights(found.node) and not found.clamped
    flagged = _other_flags(known, "logits")
    if bool(outside.any()):
        source = "raw scores" if raw else "values that are no probabilities"
        yield call.judged(
            "logits_as_probabilities",
            f"{source} given where probabilities are expected: {call.name} gets {bounds(given)}",
            measured=f"{int(outside.sum())} of {outside.numel()} values outside of [0, 1]",
            shown_by=_flags_read(known) + f"the values of {name}",
            repair=flagged or "give the sigmoid, or the softmax along the class axis, of the scores",
        )
    elif raw and found is not None and not found.shifted and not found.node.unit:
        yield call.judged(
            "logits_as_probabilities",
            f"raw scores given where probabilities are expected: {call.name} is given the output of a layer",
            in_every_call=True,
            measured=f"input in {bounds(given)}",
            shown_by=_flags_read(known) + "no sigmoid or softmax lies between the layer and the loss",
            repair=flagged or "give the sigmoid, or the softmax along the class axis, of the scores",
        )
    elif found is not None and _over_another_axis(known, given, found) and not sums_to_one(given, _axis(known)):
        yield class_targets.over_the_wrong_axis(call, found.node)
    else:
        yield from scores.twice(call)


def _axis(known: Known) -> int:
    return known.contract.class_dim


def _over_another_axis(known: Known, given: torch.Tensor, found: Found) -> bool:
    """Whether the probabilities of classes come from a softmax along another axis."""
    node, axis = found.node, _axis(known)
    if node.op != "softmax" or not known.contract.over_classes or found.scale != 1 or given.dim() < 2:
        return False
    return given.shape[axis] > 1 and node.shape == tuple(given.shape) and node.dim != axis % given.dim()


def _log_probabilities(call: Call, known: Known, name: str) -> Iterator[Judgement]:
    given = call.tensor(name)
    if given is None or given.dim() < 2 or not given.numel():
        return
    axis = known.contract.class_dim
    if sums_to_one(given, axis):
        cause, what = "probabilities_as_log_probabilities", "probabilities"
    elif exceeds_one(given, axis):
        cause, what = "logits_as_log_probabilities", "raw scores"
    else:
        return
    yield call.judged(
        cause,
        f"{what} given where log-probabilities are expected: {call.name}",
        in_every_call=True,
        measured=f"input in {bounds(given)}",
        shown_by="the sums along the class axis",
        repair=f"give log_softmax of the scores along axis {axis}",
    )


def _two_labels(call: Call, known: Known, name: str) -> Iterator[Judgement]:
    """Targets that are one of two, or in between."""
    target = call.tensor(name)
    if target is None or not target.numel():
        return
    low, high = known.contract.labels
    counted = _counted_targets(call, known, target)
    if not counted.numel():
        return
    if (low, high) == (-1.0, 1.0):
        if bool((counted == 0).any()) and not bool((counted < 0).any()):
            yield call.judged(
                "signs_expected",
                f"{call.name} is given targets of 0: it expects 1 and -1",
                in_every_call=True,
                measured=f"{int((counted == 0).sum())} of {counted.numel()} targets are 0: {as_list(counted)}",
                shown_by="the targets of every call",
                culprit="target",
            )
        return
    bad = counted[(counted < low) | (counted > high)]
    if not bad.numel() or ((bad > 1).all() and bool((bad <= binary.SOFTENED).all()) and bool((bad % 1 != 0).any())):
        return
    values = torch.unique(counted)
    signs, bytes_ = values.tolist() == [-1.0, 1.0], values.tolist() in ([0.0, 255.0], [255.0])
    yield call.judged(
        "target_outside_unit",
        f"targets reach from {float(counted.min()):.4g} to {float(counted.max()):.4g}; {call.name} expects them in "
        f"[{low:g}, {high:g}]",
        measured=f"{bad.numel()} of {target.numel()} targets outside: {as_list(bad)}",
        shown_by=_flags_read(known) + "the targets that count in the loss",
        culprit="target",
        repair="map the labels: (y + 1) / 2" if signs else "divide the masks by 255, or compare them: mask > 0"
        if bytes_ else f"bring targets to [{low:g}, {high:g}]; class indices go with a loss over classes",
    )  # fmt: skip


def _indices(call: Call, known: Known, name: str) -> Iterator[Judgement]:
    target, given = call.tensor(name), call.tensor("input")
    if target is None or given is None or not given.dim():
        return
    if target.shape == given.shape and given.dim() > 1 and given.shape[known.contract.class_dim] > 1:
        return  # a distribution over the classes, where the function takes these too
    counted = _counted_targets(call, known, target)
    count = given.shape[known.contract.class_dim] if given.dim() > 1 else given.shape[0]
    if count < 2 or not counted.numel():
        return
    bad = counted[(counted < 0) | (counted >= count)]
    if bad.numel():
        ignored = _ignored(call, known)
        yield call.judged(
            "target_out_of_range",
            f"{call.name} is given labels {int(counted.min())} to {int(counted.max())} and has classes 0 to "
            f"{count - 1}" + ("" if ignored is None else f"; ignore_index is {ignored:g}"),
            measured=f"{bad.numel()} of {target.numel()} labels outside: {as_list(torch.unique(bad))}",
            shown_by=_flags_read(known) + "the labels that count in the loss",
            culprit="target",
            repair="count labels from 0: target - 1"
            if int(counted.min()) == 1 and int(bad.max()) == count and int(bad.min()) == count
            else f"pass ignore_index={int(bad.max())}, if that label marks what is not to be learned"
            if isinstance(known.contract.ignore_index, str) and len(torch.unique(bad)) == 1
            else "",
        )


def _row_labels(call: Call, _known: Known, name: str) -> Iterator[Judgement]:
    """One label for each embedding: a loss of pairs needs two that are equal, and two that differ."""
    labels = call.tensor(name)
    if labels is None or labels.dim() != 1 or len(labels) < 2 or call.out.detach().double().sum() != 0:
        return
    kinds = len(torch.unique(labels))
    if kinds in (1, len(labels)) and (call.arrived is None or not bool(call.arrived.any())):
        alike = "no two rows have one label" if kinds > 1 else "all rows have one label"
        yield call.judged(
            "no_pairs",
            f"{call.name} has no {'positive' if kinds > 1 else 'negative'} pair: {alike}, and the loss is 0",
            in_every_call=True,
            measured=f"{kinds} different labels in {len(labels)} rows; loss 0",
            shown_by="the labels and the loss of every call",
            culprit=name,
            repair="sample several rows of each class (MPerClassSampler), or where labels are made give both views of "
            "a row one: torch.arange(n).repeat(2)"
            if kinds > 1
            else "sample rows of several classes in a batch",
        )


def _images(call: Call, known: Known, name: str) -> Iterator[Judgement]:
    """Images in a range that is not the one that the call is told."""
    given = call.tensor(name)
    upper = _range_of(call, known)
    if given is None or call.node(name) is None or given.requires_grad or upper is None or not given.numel():
        return
    node = call.node(name)
    if node is not None and node.history:
        return  # what the model gives may lie anywhere; the data may not
    span = float(given.max()) - min(0.0, float(given.min()))
    if span > 0 and (upper >= FAR * span or span >= FAR * upper):
        yield call.judged(
            "value_range",
            f"{call.name} is told a range of {upper:g}, and is given images in {bounds(given)}",
            in_every_call=True,
            measured=f"the values go up to {float(given.max()):.4g}; from 0 on they take {share(span / upper)} of "
            "the range",
            shown_by="the images of every call; the constants that are added in its fractions grow with the range",
            culprit=name,
            repair=f"pass {known.contract.value_range}={1 if span <= 1 else 255}",
        )


def _untrained(call: Call) -> Judgement:
    names = ", ".join(call.unstepped)
    return call.judged(
        "criterion_not_trained",
        f"{call.name} has weights of its own ({names}), and no step changes them",
        measured=f"{count(len(call.unstepped), 'tensor')} with a gradient, the same after three steps",
        shown_by=f"they have not been written to since the first call of {call.name}",
        culprit=call.unstepped[0],
        repair="torch.optim.Adam([*model.parameters(), *criterion.parameters()]), or an optimizer of their own",
    )


def _minimised(call: Call) -> Iterator[Judgement]:
    """A similarity that is minimised: a positive multiple of it is backpropagated."""
    if call.weights is None or call.root is None:
        return
    weights = call.weights.detach()
    if weights.shape == call.out.shape and bool((weights >= 0).all()) and bool((weights > 0).any()):
        yield call.judged(
            "sign_flipped",
            f"{call.name} is minimised: it is larger the more alike its arguments are",
            in_every_call=True,
            measured=f"{call.name} {float(call.out.detach().double().mean()):.4g}, backpropagated {call.root:.4g}",
            shown_by="the gradient of what is backpropagated with respect to it is positive",
            repair=f"1 - {call.name}(...), or its negative",
        )


def _counted_targets(call: Call, known: Known, target: torch.Tensor) -> torch.Tensor:
    """The targets that are not ignored, and whose loss counts where there is one for each."""
    keep = torch.ones_like(target, dtype=torch.bool)
    ignored = _ignored(call, known)
    if ignored is not None:
        keep &= target != ignored
    counted = call.counted()
    if counted is not None and counted.shape == keep.shape:
        keep &= counted
    return target[keep]


def _ignored(call: Call, known: Known) -> float | None:
    given = known.contract.ignore_index
    found = call.given.get(given) if isinstance(given, str) else given
    return float(found) if isinstance(found, (int, float)) else None


def _range_of(call: Call, known: Known) -> float | None:
    given = known.contract.value_range
    found = call.given.get(given) if isinstance(given, str) else given
    if isinstance(found, tuple):
        found = found[1] - found[0]
    return float(found) if isinstance(found, (int, float)) and found else None


def _flags_read(known: Known) -> str:
    """The flags that say what the call takes, to go before what shows the fault."""
    flags = ", ".join(f"{name}={value!r}" for name, value in known.contract.when.items() if _is_plain(value))
    return f"{known.name} has {flags}; " if flags else ""


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, str)) or value is None


def _other_flags(known: Known, word: str) -> str:
    """The flags with which the same function takes its input as ``word``: the repair, where there is one."""
    mine = known.contract
    found: list[str] = []
    for other in known.entry.contracts:
        if other.outputs and other.arguments[other.outputs[0]] == word:
            changed = [f"{n}={v!r}" for n, v in other.when.items() if mine.when.get(n) != v]
            kept_target = _kind(other) == _kind(mine) or not changed
            if len(changed) == 1 and kept_target:
                found.append(changed[0])
    return f"pass {' or '.join(dict.fromkeys(found))} to {known.name}" if found else ""


def _kind(contract: CallContract) -> str:
    word = contract.arguments.get(contract.target or "", "")
    return "index" if word == "index" else "dense"


def _repaired(judgement: Judgement, repair: str, cause: str) -> Judgement:
    if not repair or judgement.finding.cause != cause:
        return judgement
    both = f"{judgement.finding.repair}; or {repair}" if judgement.finding.repair else repair
    return replace(judgement, finding=replace(judgement.finding, repair=both))


_BY_WORD: dict[str, OfArgument] = {
    "logits": _logits,
    "class_logits": _logits,
    "probabilities": _probabilities,
    "log_probabilities": _log_probabilities,
    "boxes": boxes,
    "images": _images,
    "distribution_value": asked_value,
    "binary": _two_labels,
    "one_hot": _two_labels,
    "index": _indices,
    "labels": _row_labels,
}
