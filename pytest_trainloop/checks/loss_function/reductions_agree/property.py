"""Do ``none``, ``sum`` and ``mean`` agree, and does the order of the rows matter?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.losses.calls import Answer, Refused, same, size_of
from pytest_trainloop.losses.search import Seen
from pytest_trainloop.strategies.loss_cases import Case, Inputs, inputs_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.losses.evidence import Loss


def look(loss: Loss, case: Case) -> Seen | None:
    """Which of the promises about reductions and order is broken."""
    inputs = inputs_of(loss.contract, case)
    start = loss.wide(inputs)
    if not math.isfinite(start.total):
        raise CannotDecide("the value is not finite")
    if loss.wide(inputs, grad=False, seed=1).total != start.total:
        raise CannotDecide("the criterion draws random numbers, so no two calls are alike")
    ordered = _order(loss, inputs, start)
    if ordered is not None:
        return ordered
    return _switched(loss, case, inputs) if loss.wide.switches else _declared(loss, inputs, start)


def _rows(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    return Inputs(tuple(map(change, inputs.outputs)), None if inputs.target is None else change(inputs.target))


def _order(loss: Loss, inputs: Inputs, start: Answer) -> Seen | None:
    turned = loss.wide(_rows(inputs, lambda t: t.roll(1, 0)), grad=False)
    if same(turned.total, start.total, size_of(start, inputs)):
        return None
    return Seen(
        cause="order_matters",
        summary="the same rows in another order have another loss",
        measured=f"{start.total:.8g} becomes {turned.total:.8g} with the last row put first",
        shown_by="outputs and targets were moved together, in float64",
    )


def _asked(loss: Loss, inputs: Inputs, reduction: str) -> Answer | None:
    try:
        return loss.wide(inputs, reduction=reduction)
    except Refused:
        return None


def _switched(loss: Loss, case: Case, inputs: Inputs) -> Seen | None:
    none, total, mean = (_asked(loss, inputs, reduction) for reduction in ("none", "sum", "mean"))
    if total is None or mean is None:
        raise CannotDecide("the criterion raises for reduction='sum' or 'mean'")
    size = size_of(total, inputs)
    told = f"mean {mean.total:.6g}, sum {total.total:.6g}"
    if same(mean.total, total.total, size) and not same(mean.total, 0.0, size) and case.rows > 1:
        if none is not None and not none.value.dim():
            return Seen(
                cause="reduction_ignored",
                summary="reduction= changes nothing",
                measured=f"{told}, none {none.total:.6g}, for {case.rows} rows",
                shown_by="the same call three times in float64",
            )
        if _is_sum(loss, inputs, mean, "mean"):
            return Seen(
                cause="mean_is_a_sum",
                summary="reduction='mean' gives the sum",
                measured=f"{told}, for {case.rows} rows",
                shown_by="twice the rows give twice the value",
            )
    if none is not None and not none.value.dim():
        return Seen(
            cause="none_is_reduced",
            summary="reduction='none' gives one number, not one for each row",
            measured=f"a scalar for {case.rows} rows",
            shown_by="reduction='sum' and 'mean' give other values, so the keyword is read",
        )
    if none is not None and not same(none.total, total.total, size):
        return Seen(
            cause="sum_is_not_the_sum",
            summary="reduction='sum' is not the sum of what reduction='none' gives",
            measured=f"sum {total.total:.6g}; the entries of none add up to {none.total:.6g}",
            shown_by="the same call three times in float64",
        )
    return _proportional(loss, case, inputs, total, mean)


def _proportional(loss: Loss, case: Case, inputs: Inputs, total: Answer, mean: Answer) -> Seen | None:
    """What the mean divides by may depend on the targets (their count, their weights), not on the outputs."""
    others = inputs_of(loss.contract, Case(case.rows, seed=case.seed + 1)).outputs
    other = Inputs(others, inputs.target)
    if loss.contract.target == "pair":
        return None
    again, mean_again = (_asked(loss, other, reduction) for reduction in ("sum", "mean"))
    if again is None or mean_again is None:
        return None
    size = (abs(total.total) + 1.0) * (abs(mean_again.total) + 1.0) + (abs(again.total) + 1.0) * (abs(mean.total) + 1.0)
    if same(total.total * mean_again.total, again.total * mean.total, size):
        return None
    return Seen(
        cause="mean_is_no_mean",
        summary="what reduction='mean' divides by depends on the outputs",
        measured=f"sum / mean is {_quotient(total, mean)} for one output, {_quotient(again, mean_again)} for another",
        shown_by="the targets are the same",
    )


def _quotient(total: Answer, mean: Answer) -> str:
    return f"{total.total / mean.total:.6g}" if mean.total else "not finite"


def _declared(loss: Loss, inputs: Inputs, start: Answer) -> Seen | None:
    rows, declared = inputs.outputs[0].shape[0], loss.contract.reduction
    if declared == "none" and not start.value.dim():
        return Seen(
            cause="none_is_reduced",
            summary="the criterion gives one number, and LossContract.reduction is 'none'",
            measured=f"a scalar for {rows} rows",
            shown_by="one number for each row is what 'none' says",
        )
    if declared != "none" and start.value.numel() > 1:
        said = f"LossContract.reduction is {declared!r}" if declared else "a mean is usual"
        return Seen(
            cause="not_reduced",
            summary=f"the criterion gives {start.value.numel()} numbers, and {said}",
            measured=f"a tensor of {tuple(start.value.shape)} for {rows} rows",
            shown_by="a loss that is reduced is one number",
        )
    if start.value.dim() or loss.contract.expects == "embeddings":
        return None
    kind = declared or loss.wide.reduction
    if kind == "mean" and _is_sum(loss, inputs, start, None):
        return Seen(
            cause="mean_is_a_sum",
            summary=f"the loss is a sum over rows, and {'the mean is declared' if declared else 'a mean is usual'}",
            measured=f"{start.total:.6g} for {rows} rows",
            shown_by="twice the rows give twice the value, and its parts add up to the whole",
        )
    if kind == "sum" and _is_mean(loss, inputs, start):
        return Seen(
            cause="sum_is_a_mean",
            summary="the loss is a mean over rows, and the sum is declared",
            measured=f"{start.total:.6g} for {rows} rows",
            shown_by="twice the rows give the same value, and the whole is the mean of its parts",
        )
    return None


def _parts(loss: Loss, inputs: Inputs, reduction: str | None) -> tuple[float, float, float]:
    """The value of the rows twice over, and of their first half and the rest."""
    half = inputs.outputs[0].shape[0] // 2
    doubled = loss.wide(_rows(inputs, lambda t: torch.cat([t, t])), reduction=reduction, grad=False)
    first = loss.wide(_rows(inputs, lambda t: t[:half]), reduction=reduction, grad=False)
    second = loss.wide(_rows(inputs, lambda t: t[half:]), reduction=reduction, grad=False)
    return doubled.total, first.total, second.total


def _is_sum(loss: Loss, inputs: Inputs, start: Answer, reduction: str | None) -> bool:
    rows, size = inputs.outputs[0].shape[0], size_of(start, inputs)
    if rows < 2 or same(start.total, 0.0, size):
        return False
    doubled, first, second = _parts(loss, inputs, reduction)
    return same(doubled, 2 * start.total, 2 * size) and same(first + second, start.total, size)


def _is_mean(loss: Loss, inputs: Inputs, start: Answer) -> bool:
    rows, size = inputs.outputs[0].shape[0], size_of(start, inputs)
    if rows < 2 or same(start.total, 0.0, size):
        return False
    doubled, first, second = _parts(loss, inputs, None)
    return same(doubled, start.total, size) and same(
        first * (rows // 2) + second * (rows - rows // 2), start.total * rows, size * rows
    )
