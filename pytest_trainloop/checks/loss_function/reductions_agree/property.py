"""Whether ``none``, ``sum`` and ``mean`` agree, and whether the order of the rows matters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import Finding
from pytest_trainloop.instruments.losses.calls import CallResult, CriterionRaised, same, size_of
from pytest_trainloop.instruments.strategies.loss_cases import Case, LossInputs, inputs_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.instruments.losses.evidence import Loss


def reduction_error(loss: Loss, case: Case) -> Finding | None:
    """How the reductions disagree, or the order of the rows changes the value."""
    inputs = inputs_of(loss.contract, case)
    start = loss.float64(inputs)
    if not math.isfinite(start.total):
        raise CannotDecide("the value is not finite")
    if loss.float64(inputs, grad=False, seed=1).total != start.total:
        raise CannotDecide("the criterion draws random numbers, so no two calls are equal")
    order = _order(loss, inputs, start)
    if order is not None:
        return order
    return _by_keyword(loss, case, inputs) if loss.float64.switches else _as_declared(loss, inputs, start)


def _rows(inputs: LossInputs, change: Callable[[torch.Tensor], torch.Tensor]) -> LossInputs:
    return LossInputs(tuple(map(change, inputs.outputs)), None if inputs.target is None else change(inputs.target))


def _order(loss: Loss, inputs: LossInputs, start: CallResult) -> Finding | None:
    rotated = loss.float64(_rows(inputs, lambda t: t.roll(1, 0)), grad=False)
    if same(rotated.total, start.total, size_of(start, inputs)):
        return None
    return Finding(
        cause="order_matters",
        summary="the same rows in another order have another loss",
        measured=f"{start.total:.8g} becomes {rotated.total:.8g} with the last row put first",
        shown_by="outputs and targets were reordered together, in float64",
    )


def _reduced(loss: Loss, inputs: LossInputs, reduction: str) -> CallResult | None:
    try:
        return loss.float64(inputs, reduction=reduction)
    except CriterionRaised:
        return None


def _by_keyword(loss: Loss, case: Case, inputs: LossInputs) -> Finding | None:
    none, total, mean = (_reduced(loss, inputs, reduction) for reduction in ("none", "sum", "mean"))
    if total is None or mean is None:
        raise CannotDecide("the criterion raises for reduction='sum' or 'mean'")
    size = size_of(total, inputs)
    values = f"mean {mean.total:.6g}, sum {total.total:.6g}"
    if same(mean.total, total.total, size) and not same(mean.total, 0.0, size) and case.rows > 1:
        if none is not None and not none.value.dim():
            return Finding(
                cause="reduction_ignored",
                summary="reduction= has no effect",
                measured=f"{values}, none {none.total:.6g}, for {case.rows} rows",
                shown_by="the same call three times in float64",
            )
        if _is_sum(loss, inputs, mean, "mean"):
            return Finding(
                cause="mean_is_a_sum",
                summary="reduction='mean' gives the sum",
                measured=f"{values}, for {case.rows} rows",
                shown_by="twice the rows give twice the value",
            )
    if none is not None and not none.value.dim():
        return Finding(
            cause="none_is_reduced",
            summary="reduction='none' gives one number, not one for each row",
            measured=f"a scalar for {case.rows} rows",
            shown_by="reduction='sum' and 'mean' give other values, so the keyword is read",
        )
    if none is not None and not same(none.total, total.total, size):
        return Finding(
            cause="sum_is_not_the_sum",
            summary="reduction='sum' is not the sum of the entries under reduction='none'",
            measured=f"sum {total.total:.6g}; the entries of none add up to {none.total:.6g}",
            shown_by="the same call three times in float64",
        )
    return _proportional(loss, case, inputs, total, mean)


def _proportional(loss: Loss, case: Case, inputs: LossInputs, total: CallResult, mean: CallResult) -> Finding | None:
    """The divisor of the mean may depend on the targets (their count, their weights), not on the outputs."""
    if loss.contract.target == "pair":
        return None
    other = replace(inputs, outputs=inputs_of(loss.contract, Case(case.rows, seed=case.seed + 1)).outputs)
    total2, mean2 = (_reduced(loss, other, reduction) for reduction in ("sum", "mean"))
    if total2 is None or mean2 is None:
        return None
    size = (abs(total.total) + 1.0) * (abs(mean2.total) + 1.0) + (abs(total2.total) + 1.0) * (abs(mean.total) + 1.0)
    if same(total.total * mean2.total, total2.total * mean.total, size):
        return None
    return Finding(
        cause="mean_is_no_mean",
        level="advice",
        summary="the divisor of reduction='mean' depends on the outputs",
        measured=f"sum / mean is {_quotient(total, mean)} for one output, {_quotient(total2, mean2)} for another",
        shown_by="the targets are the same",
    )


def _quotient(total: CallResult, mean: CallResult) -> str:
    return f"{total.total / mean.total:.6g}" if mean.total else "not finite"


def _as_declared(loss: Loss, inputs: LossInputs, start: CallResult) -> Finding | None:
    rows, declared = inputs.outputs[0].shape[0], loss.contract.reduction
    if declared == "none" and not start.value.dim():
        return Finding(
            cause="none_is_reduced",
            summary="the criterion gives one number, and LossContract.reduction is 'none'",
            measured=f"a scalar for {rows} rows",
            shown_by="one number for each row is what 'none' says",
        )
    if declared != "none" and start.value.numel() > 1:
        usual = f"LossContract.reduction is {declared!r}" if declared else "a mean is usual"
        return Finding(
            cause="not_reduced",
            level="fault" if declared else "advice",
            summary=f"the criterion gives {start.value.numel()} numbers, and {usual}",
            measured=f"a tensor of {tuple(start.value.shape)} for {rows} rows",
            shown_by="a loss that is reduced is one number",
        )
    if start.value.dim() or loss.contract.expects == "embeddings":
        return None
    kind = declared or loss.float64.reduction
    if kind == "mean" and _is_sum(loss, inputs, start, None):
        return Finding(
            cause="mean_is_a_sum",
            level="fault" if declared else "advice",
            summary=f"the loss is a sum over rows, and {'the mean is declared' if declared else 'a mean is usual'}",
            measured=f"{start.total:.6g} for {rows} rows",
            shown_by="twice the rows give twice the value, and its parts add up to the whole",
        )
    if kind == "sum" and _is_mean(loss, inputs, start):
        return Finding(
            cause="sum_is_a_mean",
            summary="the loss is a mean over rows, and the sum is declared",
            measured=f"{start.total:.6g} for {rows} rows",
            shown_by="twice the rows give the same value, and the whole is the mean of its parts",
        )
    return None


class _Parts(NamedTuple):
    doubled: float
    first_half: float
    second_half: float


def _parts(loss: Loss, inputs: LossInputs, reduction: str | None) -> _Parts:
    """The values of all rows twice, of their first half and of the rest."""
    half = inputs.outputs[0].shape[0] // 2
    changes: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda t: torch.cat([t, t]),
        lambda t: t[:half],
        lambda t: t[half:],
    )
    return _Parts(*(loss.float64(_rows(inputs, c), reduction=reduction, grad=False).total for c in changes))


def _is_sum(loss: Loss, inputs: LossInputs, start: CallResult, reduction: str | None) -> bool:
    rows, size = inputs.outputs[0].shape[0], size_of(start, inputs)
    if rows < 2 or same(start.total, 0.0, size):
        return False
    parts = _parts(loss, inputs, reduction)
    return same(parts.doubled, 2 * start.total, 2 * size) and same(
        parts.first_half + parts.second_half, start.total, size
    )


def _is_mean(loss: Loss, inputs: LossInputs, start: CallResult) -> bool:
    rows, size = inputs.outputs[0].shape[0], size_of(start, inputs)
    if rows < 2 or same(start.total, 0.0, size):
        return False
    parts = _parts(loss, inputs, None)
    weighted = parts.first_half * (rows // 2) + parts.second_half * (rows - rows // 2)
    return same(parts.doubled, start.total, size) and same(weighted, start.total * rows, size * rows)
