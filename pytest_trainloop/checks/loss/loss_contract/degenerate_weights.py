"""Weights of 0 for classes that occur, rates and variances that are given as something else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, as_list, judges
from pytest_trainloop.checks.loss.loss_contract.value_tests import bounds
from pytest_trainloop.tracing.provenance_queries import behind

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_POSITIVE = frozenset({"exp", "softplus", "relu", "sigmoid", "square", "abs", "expm1"})
"""Functions whose results are never below 0, or hardly."""

_DEVIATIONS = frozenset({"std", "sqrt"})

_NAMED_DEVIATION = re.compile(r",\s*(?:var\s*=\s*)?((?:\w+\.)*(?!\w*log)\w*(?:std|sigma|stddev)\w*)\s*[,)]")
"""An argument that is one name, called a deviation; not its square or logarithm."""

LEAST = 16
"""Entries from which all of one sign are no accident of an untrained net."""


@judges("cross_entropy", "nll_loss")
def classes_without_weight(call: Call) -> Iterator[Judgement]:
    """Whole numbers as class weights, 0 among them, where such a class occurs."""
    weight, target, scores = call.tensor("weight"), call.tensor("target"), call.tensor("input")
    if weight is None or target is None or scores is None or target.is_floating_point() or weight.dim() != 1:
        return
    ignored = int(call.given.get("ignore_index", -100))
    seen = target[(target != ignored) & (target >= 0) & (target < len(weight))].long()
    idle = [c for c in sorted(set(seen.reshape(-1).tolist())) if weight[c] == 0]
    if not idle or not bool((weight >= 0).all()) or not bool((weight > 0).any()):
        return
    alone = int((weight > 0).sum()) == 1 and len(weight) > 1
    whole = bool((weight == weight.round()).all()) and bool((weight > 1).any())
    if not whole and not alone:
        return
    constant = alone and _rows_teach_nothing(call, target, weight == 0)
    only = int(weight.argmax())
    yield call.judged(
        "class_without_weight",
        f"{call.name} gives weight 0 to {_classes(idle)}: "
        + (
            f"only class {only} costs anything, so that always answering {only} is best"
            if constant
            else "their rows teach nothing"
        ),
        level="fault" if constant else "advice",
        in_every_call=True,
        measured=f"weights {as_list(weight.double())}",
        shown_by="the gradient at the scores of all other rows is exactly 0"
        if constant
        else "the weights are whole numbers, as an integer division leaves them, and the labels hold the class",
        repair="where the weights are made: if they are divided with //, use /: total / (classes * counts)",
    )


def _classes(idle: list[int]) -> str:
    shown = ", ".join(map(str, idle[:3])) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
    return f"class {shown}, which occurs" if len(idle) == 1 else f"classes {shown}, which occur"


def _rows_teach_nothing(call: Call, target: torch.Tensor, idle: torch.Tensor) -> bool:
    """Whether the loop's loss gives no gradient at the scores of rows of these classes, from any use of them, and some
    at the others."""
    arrived = call.arrived
    if arrived is None or arrived.dim() != target.dim() + 1:
        return False
    size = arrived.detach().abs().amax(1)
    if size.shape != target.shape:
        return False
    rows = idle[target.clamp(0, len(idle) - 1).long()]
    return bool(rows.any()) and not bool(size[rows].any()) and bool(size[~rows].any())


@judges("binary_cross_entropy_with_logits")
def positives_without_weight(call: Call) -> Iterator[Judgement]:
    """A pos_weight of 0 where the label occurs: positives cost nothing."""
    weight, target = call.tensor("pos_weight"), call.tensor("target")
    if weight is None or target is None or not target.numel() or not weight.numel():
        return
    try:
        lost = (target > 0) & (weight == 0).to(target.device).expand_as(target)
    except RuntimeError:  # shapes that do not fit are another finding
        return
    if bool(lost.any()):
        yield call.judged(
            "class_without_weight",
            f"pos_weight is 0 where {int(lost.sum())} targets are positive: they cost nothing, and the best answer is "
            "always no",
            in_every_call=True,
            measured=f"pos_weight in {bounds(weight)}; {int((target > 0).sum())} of {target.numel()} targets positive",
            shown_by="the factor of the positive term in binary_cross_entropy_with_logits",
            repair="pos_weight=negatives / positives; // makes 0 of it where positives are the more",
        )


@judges("poisson_nll_loss")
def rate_above_one(call: Call) -> Iterator[Judgement]:
    """A logarithm of a rate that is never below 0, for counts whose mean is below 1."""
    given, target, found = call.tensor("input"), call.tensor("target"), behind(call.node("input"))
    logs = bool(call.given.get("log_input", True))
    if not logs or given is None or target is None or given.numel() < LEAST or not target.numel():
        return
    mean = float(target.double().mean())
    if mean >= 1.0 or mean < 0.0 or not bool((given > 0).all()):
        return
    op = "" if found is None else found.node.op
    built = found is not None and op in _POSITIVE and (found.shifted or op not in ("exp", "softplus", "relu"))
    if found is not None and op in ("exp", "softplus", "relu") and not found.shifted:
        return  # rate_scale, whatever the counts
    yield call.judged(
        "rate_scale",
        "poisson_nll_loss takes the logarithm of the rate, and is given numbers above 0 only"
        + (f", as {op} makes them" if built else "")
        + f": rates above 1, for counts of {mean:.3g} in the mean",
        level="fault" if built else "advice",
        in_every_call=True,
        measured=f"input in {bounds(given)}: rates from {float(given.double().min().exp()):.4g}",
        shown_by=f"the best constant, the logarithm of {mean:.3g}, is below every value that {op} can give"
        if built
        else "the values of every call",
        repair="pass log_input=False, or give the scores as they are",
    )


@judges("gaussian_nll_loss")
def deviation_for_variance(call: Call) -> Iterator[Judgement]:
    """gaussian_nll_loss takes the variance, the square of the deviation."""
    found, var = behind(call.node("var")), call.tensor("var")
    if found is None or var is None:
        return
    named = _NAMED_DEVIATION.search(call.place.code)
    by_op = found.node.op in _DEVIATIONS
    if not by_op and (named is None or _squared(call)):
        return
    what = f"the result of {found.node.op}" if by_op else f"{named.group(1)}" if named else ""
    yield call.judged(
        "deviation_for_variance",
        f"gaussian_nll_loss takes a variance, and is given {what}: a standard deviation",
        level="fault" if found.node.op == "std" or (by_op and named is not None) else "advice",
        measured=f"var in {bounds(var)}",
        shown_by=f"only casts and constants lie between {found.node.op} and the loss"
        if by_op
        else "the argument's name",
        repair="square it: var=sigma ** 2",
    )


def _squared(call: Call) -> bool:
    """Whether the variance is a product of a tensor with itself, whatever it is called."""
    node = call.node("var")
    while node is not None and node.moves and node.parents:
        node = node.parents[0]
    return node is not None and node.op in ("square", "pow", "mul") and len(set(map(id, node.parents))) == 1
