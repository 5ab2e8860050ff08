"""Class indices and class probabilities as targets of cross_entropy and nll_loss, and the axis of the classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, as_list, at_line, in_module, judges
from pytest_trainloop.checks.loss.loss_contract.scores import class_axis
from pytest_trainloop.checks.loss.loss_contract.value_tests import (
    axis_of_sums,
    bounds,
    exceeds_one,
    logs_of_one,
    slack,
    sums_to_one,
)
from pytest_trainloop.recording.torch_names import CONVOLUTIONS
from pytest_trainloop.tracing.provenance_queries import (
    Layout,
    across_rows,
    ancestors,
    behind,
    by_weights,
    constant,
    inner,
    layout,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_trainloop.finding import Level
    from pytest_trainloop.tracing.provenance import Node

WIDER, LABELS = 8, 100
"""Advice is given for a head this many times wider than the classes in use, from this number of labels on."""


@judges("nll_loss")
def log_probabilities(call: Call) -> Iterator[Judgement]:
    """The input of nll_loss."""
    given, axis = call.tensor("input"), class_axis(call)
    if given is None or given.dim() == 0 or given.shape[axis] < 2 or not given.is_floating_point():
        return
    node = call.node("input")
    source = behind(node)
    if sums_to_one(given, axis):
        yield call.judged(
            "probabilities_as_log_probabilities",
            f"probabilities given where log-probabilities are expected: {call.name}",
            in_every_call=True,
            measured=_input_and_loss(call, given),
            shown_by="every row sums to 1",
        )
    elif source is not None and source.node.op == "log_softmax":
        if not logs_of_one(given, axis) and (axis_of_sums(given, axis) is not None or across_rows(source.node)):
            yield over_the_wrong_axis(call, source.node)
    elif (
        exceeds_one(given, axis)
        and bool((given > 0).any())
        and not _of_logarithms(node)
        and not _normalised_elsewhere(call, axis)
    ):
        yield call.judged(
            "logits_as_log_probabilities",
            f"raw scores given where log-probabilities are expected: {call.name}",
            in_every_call=True,
            measured=_input_and_loss(call, given),
            shown_by="the exponentials of rows sum to more than 1, and no other loss term normalises them",
        )


def _input_and_loss(call: Call, given: torch.Tensor) -> str:
    return f"input in {bounds(given)}, loss {float(call.out.detach().double().mean()):.4g}"


def _of_logarithms(node: Node | None) -> bool:
    """Whether a logarithm lies a few operations before: of densities, which may be above 1, or of odds."""
    return node is not None and any("log" in n.op for n in ancestors(node, 12))


def _normalised_elsewhere(call: Call, axis: int) -> bool:
    """Whether the gradient at the scores, from all uses of them, sums to (nearly) 0 over the classes.

    So does that of every loss that is invariant to a shift of all scores, as with a log-sum-exp as another term.
    """
    arrived = call.arrived
    if arrived is None or arrived.dim() == 0:
        return False
    total, size = arrived.double().sum(axis).abs().sum(), arrived.double().abs().sum()
    return bool(total < size / 2)


def over_the_wrong_axis(call: Call, source: Node) -> Judgement:
    return call.judged(
        "wrong_axis",
        f"{in_module(source)} normalises over axis {source.dim} of {source.shape}, which is not the axis of the "
        f"classes that {call.name} reads",
        measured=f"normalised over {source.shape[source.dim or 0]} entries of axis {source.dim}",
        shown_by=f"its input comes from {source.op}, and does not sum to 1 over the classes{at_line(source)}",
        culprit=in_module(source),
        source=source,
    )


@judges("cross_entropy", "nll_loss")
def axis_of_classes(call: Call) -> Iterator[Judgement]:
    """Scores of several positions along the class axis."""
    given = call.tensor("input")
    if given is None or given.dim() < 2 or given.shape[1] < 2:
        return
    found = layout(call.node("input"))
    if found is None or found.picked or found.feature.shape != given.shape:
        return
    if found.features < 2 or not by_weights(found.layer) or constant(found.position, 1):
        return
    if _full_grid(found.feature, found.position):
        return
    moving = [at for at in found.coordinates(found.position) if not constant(at, 1)]
    if not constant(found.feature, 1):
        yield _mixed(call, found, "of several positions and several classes mixed")
    elif len(moving) > 1 or not _unbroken(moving[0], 1):
        yield _mixed(call, found, "of every other position")
    elif _square(call, found, given):
        shape = tuple(given.shape)
        yield call.judged(
            "class_axis",
            f"{call.name} takes axis 1 of {shape} for the classes, and the last layer gives them on axis 2",
            measured=f"{shape[1]} positions and {shape[2]} classes: torch accepts the shape because the two are equal",
            shown_by="nothing was transposed between the last layer and the loss",
        )


def _unbroken(values: torch.Tensor, axis: int) -> bool:
    """Whether the values increase by 1 along the axis, from the same start everywhere."""
    start = values.narrow(axis, 0, 1)
    return bool((values.diff(dim=axis) == 1).all()) and bool((start == start.flatten()[0]).all())


def _full_grid(feature: torch.Tensor, position: torch.Tensor) -> bool:
    """Whether the classes are all pairs of some positions and several features, as flattened actions of several nodes
    are."""
    features, positions = _distinct(feature), _distinct(position)
    return bool((features > 1).all()) and bool((features * positions == feature.shape[1]).all())


def _distinct(values: torch.Tensor) -> torch.Tensor:
    """The number of different values along the class axis."""
    return (values.sort(dim=1).values.diff(dim=1) != 0).sum(1) + 1


def _square(call: Call, found: Layout, given: torch.Tensor) -> bool:
    """Whether the layer's (N, T, C), with as many positions as classes, is given where (N, C, T) is expected."""
    target = call.tensor("target")
    return (
        given.dim() == 3
        and given.shape[1] == given.shape[2] == found.features
        and not found.moved
        and found.layer.op not in CONVOLUTIONS
        and target is not None
        and target.shape == (given.shape[0], given.shape[2])
    )


def _mixed(call: Call, found: Layout, what: str) -> Judgement:
    given = call.tensor("input")
    shape = tuple(given.shape) if given is not None else ()
    return call.judged(
        "class_axis",
        f"{call.name} compares scores {what} along its class axis: {found.layer.shape} was reshaped to {shape}, not "
        "transposed",
        measured=f"axis 1 of {shape} runs over entries of several positions of the last layer",
        shown_by="the same reshapes applied to the indices of the entries",
    )


@judges("cross_entropy", "nll_loss")
def indices(call: Call) -> Iterator[Judgement]:
    """Class indices as targets."""
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or target.is_floating_point() or given.dim() == 0 or not target.numel():
        return
    ignored = call.given.get("ignore_index", -100)
    kept = target[target != ignored]
    if not kept.numel():
        if call.reduction == "mean":
            yield call.judged(
                "all_ignored",
                f"all {target.numel()} targets of a batch are {ignored}, which {call.name} ignores: a mean of none",
                measured=f"{target.numel()} of {target.numel()} targets ignored, loss NaN",
                shown_by="every target equals ignore_index, and reduction is mean",
                culprit=f"ignore_index={ignored}",
            )
        return
    count = given.shape[class_axis(call)]
    top = int(kept.max()) + 1
    if kept.numel() >= LABELS and count >= WIDER * top:
        yield call.judged(
            "head_too_wide",
            f"the head is {count / top:.0f} times wider than the labels: {count} classes, and no label above {top - 1}",
            level="advice",
            in_every_call=True,
            measured=f"{count} classes for labels up to {top - 1}: {count / top:.0f} times {top}",
            shown_by="all targets of the recorded steps",
        )


@judges("cross_entropy")
def distributions(call: Call) -> Iterator[Judgement]:
    """Class probabilities as targets of cross_entropy."""
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or not target.is_floating_point() or target.shape != given.shape:
        return
    axis = class_axis(call)
    if target.dim() == 0 or target.shape[axis] < 2 or not target.numel():
        return
    yield from softmax_of_softmax(call)
    if sums_to_one(target, axis):
        return
    wide = target.double()
    sums = wide.sum(axis)
    shares = (wide != 0).sum(axis)
    if not bool((shares >= 2).any()) or _normalised_before(call, axis):
        return  # one entry a row: an index with a weight
    whole = bool((wide == wide.round()).all())
    if bool((wide < 0).any()):
        if logs_of_one(target, axis):
            yield _no_distribution(call, sums, "log-probabilities are given as targets")
        elif not whole:
            yield _no_distribution(call, sums, "targets hold negative values, as scores do")
    elif _along_others(target, axis):
        yield _no_distribution(call, sums, "they sum to 1 along another axis")
    elif (source := behind(call.node("target"))) is not None and source.node.op == "sigmoid":
        yield _no_distribution(call, sums, f"a sigmoid gives each class by itself{at_line(source.node)}")
    elif not whole and bool((sums - sums.flatten()[0]).abs().max() <= slack(target, target.shape[axis])):
        yield _no_distribution(call, sums, "every row sums to the same number")
    elif bool((sums > 1 + slack(target, target.shape[axis])).any()):
        yield _no_distribution(call, sums, "rows weigh as much as their targets sum to", level="advice")


def softmax_of_softmax(call: Call) -> Iterator[Judgement]:
    """Targets that are a softmax of a softmax over the same axis, with nothing between that spreads probabilities: the
    largest is at most e times the smallest."""
    outer = behind(call.node("target"))
    under = behind(inner(outer.node)) if outer is not None and outer.node.op == "softmax" else None
    if outer is None or under is None or under.node.op != "softmax" or under.node.dim != outer.node.dim:
        return
    if under.scale <= 1:
        yield call.judged(
            "target_not_distribution",
            f"the targets of {call.name} are a softmax of a softmax: nearly the same for every class",
            shown_by="the operations that the target was computed by",
            culprit="target",
            repair="give the softmax of the teacher's scores, once",
        )


def _along_others(target: torch.Tensor, axis: int) -> bool:
    others = [d for d in range(target.dim()) if d != axis]
    return any(target.shape[d] > 1 and sums_to_one(target, d) for d in others)


def _normalised_before(call: Call, axis: int) -> bool:
    """Whether the targets were a distribution over the same axis before they were weighted, masked or cut."""
    node = call.node("target")
    return node is not None and any(
        n.op == "softmax" and n.dim == axis % len(n.shape) and n.shape == node.shape for n in ancestors(node) if n.shape
    )


def _no_distribution(call: Call, sums: torch.Tensor, why: str, *, level: Level = "fault") -> Judgement:
    return call.judged(
        "target_not_distribution",
        f"the class probabilities given to {call.name} as targets do not sum to 1: {why}",
        level=level,
        in_every_call=True,
        measured=f"rows sum to {as_list(sums)}",
        shown_by="sums along the class axis, beyond what rounding explains",
        culprit="target",
        repair=_SETTLED if level == "advice" else "",
    )


_SETTLED = (
    "divide each row by its sum; where a row may have several labels: binary_cross_entropy_with_logits; where rows are "
    "to weigh by their sums, as counts do: write -(target * log_softmax(scores)).sum(-1), which settles it"
)
