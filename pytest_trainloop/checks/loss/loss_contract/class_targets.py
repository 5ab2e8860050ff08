"""Class indices and class probabilities as targets of cross_entropy and nll_loss, and the axis of the classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call, as_list
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

    from pytest_trainloop.tracing.provenance import Node

WIDER, LABELS = 8, 100
"""Times the classes in use that a head is wide, over so many labels, from which advice is given."""


def log_probabilities(call: Call) -> Iterator[Breach]:
    """The input of nll_loss."""
    given, axis = call.tensor("input"), class_axis(call)
    if given is None or given.dim() == 0 or given.shape[axis] < 2 or not given.is_floating_point():
        return
    node = call.node("input")
    source = behind(node)
    named = "" if source is None else source.node.op
    if sums_to_one(given, axis):
        yield _not_logs(call, "probabilities_as_log_probabilities", "probabilities", "give log_softmax of the scores")
    elif source is not None and named == "log_softmax":
        if not logs_of_one(given, axis) and (axis_of_sums(given, axis) is not None or across_rows(source.node)):
            yield over_the_wrong_axis(call, source.node)
    elif (
        exceeds_one(given, axis)
        and bool((given > 0).any())
        and not _of_logarithms(node)
        and not _normalised_elsewhere(call, axis)
    ):
        repair = "use cross_entropy, or log_softmax along the class axis before nll_loss"
        yield _not_logs(call, "logits_as_log_probabilities", "raw scores", repair)


def _of_logarithms(node: Node | None) -> bool:
    """Whether a logarithm stands a few operations before: of densities, which may be above 1, or of other odds."""
    return node is not None and any("log" in n.op for n in ancestors(node, 12))


def _normalised_elsewhere(call: Call, axis: int) -> bool:
    """Whether the gradient that came in at the scores from all sides sums to (nearly) nothing over the classes, as that
    of every loss that does not change when all scores do: a log-sum-exp beside it sees to that."""
    arrived = call.arrived
    if arrived is None or arrived.dim() == 0:
        return False
    total, size = arrived.double().sum(axis).abs().sum(), arrived.double().abs().sum()
    return bool(total < size / 2)


def _not_logs(call: Call, cause: str, what: str, repair: str) -> Breach:
    given = call.tensor("input")
    return Breach(
        cause=cause,
        summary=f"{what} given where log-probabilities are expected: {call.name}",
        measured=f"input in {bounds(given)}, loss {float(call.out.detach().double().mean()):.4g}"
        if given is not None
        else "",
        shown_by="every row sums to 1"
        if cause.startswith("prob")
        else "the exponentials of rows sum to more than 1, and nothing beside the loss normalises them",
        culprit=call.name,
        where=str(call.place),
        repair=repair,
        always=True,
    )


def over_the_wrong_axis(call: Call, source: Node) -> Breach:
    at = f" in {source.module}" if source.module else ""
    line = f"; {source.op} at {source.place.file}:{source.place.line}" if source.place else ""
    return Breach(
        cause="wrong_axis",
        summary=f"{source.op}{at} normalises over axis {source.dim} of {source.shape}, which is not the axis of the "
        f"classes that {call.name} reads",
        measured=f"normalised over {source.shape[source.dim or 0]} entries of axis {source.dim}",
        shown_by=f"its input comes from {source.op}, and does not sum to 1 over the classes{line}",
        culprit=f"{source.op}{at}",
        where=str(source.place or call.place),
        repair="normalise along the axis of the classes: dim=1 for (N, C, ...), dim=-1 for (N, T, C)",
    )


def axis_of_classes(call: Call) -> Iterator[Breach]:
    """Whether the scores that are compared with each other belong to one position."""
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
        yield _transposed(call, given)


def _unbroken(values: torch.Tensor, axis: int) -> bool:
    """Whether they run on one by one, from the same start everywhere."""
    start = values.narrow(axis, 0, 1)
    return bool((values.diff(dim=axis) == 1).all()) and bool((start == start.flatten()[0]).all())


def _full_grid(feature: torch.Tensor, position: torch.Tensor) -> bool:
    """Whether the classes are all pairs of some positions and several features, everywhere: actions of several nodes,
    flattened."""
    kinds, places = _distinct(feature), _distinct(position)
    return bool((kinds > 1).all()) and bool((kinds * places == feature.shape[1]).all())


def _distinct(values: torch.Tensor) -> torch.Tensor:
    """How many different values there are along the class axis."""
    return (values.sort(dim=1).values.diff(dim=1) != 0).sum(1) + 1


def _square(call: Call, found: Layout, given: torch.Tensor) -> bool:
    """(N, T, C) as it comes from the layer, with as many positions as classes, where (N, C, T) is expected."""
    target = call.tensor("target")
    return (
        given.dim() == 3
        and given.shape[1] == given.shape[2] == found.features
        and not found.moved
        and found.layer.op not in CONVOLUTIONS
        and target is not None
        and target.shape == (given.shape[0], given.shape[2])
    )


def _mixed(call: Call, found: Layout, what: str) -> Breach:
    given = call.tensor("input")
    shape = tuple(given.shape) if given is not None else ()
    return Breach(
        cause="class_axis",
        summary=f"{call.name} compares scores {what} along its class axis: {found.layer.shape} was reshaped to "
        f"{shape}, not transposed",
        measured=f"axis 1 of {shape} runs over entries of several positions of the last layer",
        shown_by="the same moves made with the entries' numbers",
        culprit=call.name,
        where=str(call.place),
        repair="transpose(1, 2) (or permute) brings the classes to axis 1; or flatten(0, 1) with flattened targets",
    )


def _transposed(call: Call, given: torch.Tensor) -> Breach:
    shape = tuple(given.shape)
    return Breach(
        cause="class_axis",
        summary=f"{call.name} takes axis 1 of {shape} for the classes, and the last layer gives them on axis 2",
        measured=f"{shape[1]} positions and {shape[2]} classes: the shapes pass because the two are equal",
        shown_by="nothing was transposed between the last layer and the loss",
        culprit=call.name,
        where=str(call.place),
        repair="transpose(1, 2) brings the classes to axis 1; or flatten(0, 1) with flattened targets",
    )


def indices(call: Call) -> Iterator[Breach]:
    """Class indices as targets."""
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or target.is_floating_point() or given.dim() == 0 or not target.numel():
        return
    ignored = call.given.get("ignore_index", -100)
    kept = target[target != ignored]
    if not kept.numel():
        if call.reduction == "mean":
            yield _all_ignored(call, target, ignored)
        return
    count = given.shape[class_axis(call)]
    top = int(kept.max()) + 1
    if kept.numel() >= LABELS and count >= WIDER * top:
        yield _too_wide(call, count, top)


def _all_ignored(call: Call, target: torch.Tensor, ignored: int) -> Breach:
    return Breach(
        cause="all_ignored",
        summary=f"all {target.numel()} targets of a batch are {ignored}, which {call.name} ignores: a mean of none",
        measured=f"{target.numel()} of {target.numel()} targets ignored, loss NaN",
        shown_by="every target equals ignore_index, and reduction is mean",
        culprit=f"ignore_index={ignored}",
        where=str(call.place),
        repair="leave such a batch out openly, or sum the losses and divide by max(1, count)",
    )


def _too_wide(call: Call, count: int, top: int) -> Breach:
    return Breach(
        cause="head_too_wide",
        level="advice",
        always=True,
        summary=f"the head is {count / top:.0f} times wider than the labels: {count} classes, and no label above "
        f"{top - 1}",
        measured=f"labels seen up to {top - 1}, classes 0 to {count - 1}",
        shown_by="all targets of the watched steps",
        culprit=call.name,
        where=str(call.place),
        repair="nothing, if the others come in other batches; else size the head by the labels, or look at the mapping",
    )


def distributions(call: Call) -> Iterator[Breach]:
    """Class probabilities as targets of cross_entropy."""
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or not target.is_floating_point() or target.shape != given.shape:
        return
    axis = class_axis(call)
    if target.dim() == 0 or target.shape[axis] < 2 or not target.numel():
        return
    twice = behind(call.node("target"))
    if twice is not None and softened_twice(twice.node):
        yield twice_softened(call)
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
    elif not whole and bool((sums - sums.flatten()[0]).abs().max() <= slack(target, target.shape[axis])):
        yield _no_distribution(call, sums, "every row sums to the same number")
    elif bool((sums > 1 + slack(target, target.shape[axis])).any()):
        yield _no_distribution(call, sums, "rows weigh as much as their targets sum to", level="advice")


def softened_twice(node: Node) -> bool:
    """Whether it is a softmax of a softmax over the same axis."""
    under = behind(inner(node)) if node.op == "softmax" else None
    return under is not None and under.node.op == "softmax" and under.node.dim == node.dim and under.scale <= 1


def twice_softened(call: Call) -> Breach:
    return Breach(
        cause="target_not_distribution",
        level="advice",
        summary=f"the targets of {call.name} are a softmax of a softmax: nearly the same for every class",
        measured="",
        shown_by="what the target was computed by",
        culprit="target",
        where=str(call.place),
        repair="give the softmax of the teacher's scores, once",
    )


def _along_others(target: torch.Tensor, axis: int) -> bool:
    others = [d for d in range(target.dim()) if d != axis]
    return any(target.shape[d] > 1 and sums_to_one(target, d) for d in others)


def _normalised_before(call: Call, axis: int) -> bool:
    """Whether the targets were made of a distribution over the same axis: weighted, masked or cut afterwards."""
    node = call.node("target")
    return node is not None and any(
        n.op == "softmax" and n.dim == axis % len(n.shape) and n.shape == node.shape for n in ancestors(node) if n.shape
    )


def _no_distribution(call: Call, sums: torch.Tensor, why: str, *, level: str = "fault") -> Breach:
    return Breach(
        cause="target_not_distribution",
        level="advice" if level == "advice" else "fault",
        summary=f"the class probabilities given to {call.name} as targets do not sum to 1: {why}",
        measured=f"rows sum to {as_list(sums)}",
        shown_by="sums along the class axis, beyond what rounding explains",
        culprit="target",
        where=str(call.place),
        repair="take softmax along the class axis of scores; smooth labels as y * (1 - e) + e / C",
        always=True,
    )
