"""Whether value and gradient are finite for calls with one special property."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.finding import Finding
from pytest_trainloop.instruments.losses.alignment import require_aligned
from pytest_trainloop.instruments.losses.calls import CriterionRaised
from pytest_trainloop.instruments.strategies.loss_cases import DESCRIPTIONS, LossInputs, Trait, inputs_of

if TYPE_CHECKING:
    from pytest_trainloop.instruments.losses.calls import Caller, CallResult
    from pytest_trainloop.instruments.losses.evidence import Loss
    from pytest_trainloop.instruments.strategies.loss_cases import Case

CAUSE_OF: dict[Trait, str] = {
    "ordinary": "nonfinite_on_ordinary_input",
    "one_row": "nonfinite_on_one_row",
    "one_class": "nonfinite_on_one_class",
    "no_partner": "nonfinite_without_partner",
    "tied": "nonfinite_on_ties",
    "zero": "nonfinite_on_zeros",
    "right": "nonfinite_on_correct_answers",
    "large": "nonfinite_on_large_outputs",
    "saturated": "nonfinite_when_saturated",
    "some_ignored": "nonfinite_when_some_ignored",
    "all_ignored": "nonfinite_when_all_ignored",
}

LARGEST = torch.finfo(torch.float32).max
HALVINGS = 8


def nonfinite_result(loss: Loss, case: Case) -> Finding | None:
    """A value or gradient that is not finite in float32, which can represent the true one."""
    inputs = inputs_of(loss.contract, case).to(torch.float32)
    result = _call(loss.as_built, inputs)
    if result.finite:
        return None
    if case.trait == "some_ignored":
        require_aligned(loss, case)  # a shift inside may leave no target that counts
    exact_inputs = inputs.to(torch.float64)
    if _exceeds_float32(loss, exact_inputs):
        return None
    exact = loss.float64(exact_inputs)
    ordinary = replace(case, trait="ordinary", ignored=(), rows=max(case.rows, 4, loss.contract.min_rows))
    try:
        special = case.trait != "ordinary" and _is_finite(loss, ordinary)
    except CriterionRaised:
        special = False
    bounds = f"[{min(float(o.min()) for o in inputs.outputs):.4g}, {max(float(o.max()) for o in inputs.outputs):.4g}]"
    return Finding(
        cause=CAUSE_OF[case.trait],
        level="advice" if loss.of_torch or _may_be_intended(loss, case.trait) else "fault",
        summary=f"{_nonfinite_part(result)} for {DESCRIPTIONS[case.trait]}",
        measured=f"value {result.total:.4g} in float32, {exact.total:.4g} in float64; outputs in {bounds}",
        shown_by=(
            "the same call with ordinary values is finite" if special else "these values have no special property"
        ),
    )


def _call(caller: Caller, inputs: LossInputs) -> CallResult:
    """The result with the gradients that a model gets: the second of a pair of scores is a teacher's."""
    result = caller(inputs)
    has_teacher = caller.contract.target == "pair" and caller.contract.expects != "embeddings"
    return replace(result, grads=result.grads[:1]) if has_teacher else result


def _is_finite(loss: Loss, case: Case) -> bool:
    """Whether a call is finite in float32, all gradients included."""
    return loss.as_built(inputs_of(loss.contract, case).to(torch.float32)).finite


def _may_be_intended(loss: Loss, trait: Trait) -> bool:
    if trait == "all_ignored":
        return loss.as_built.reduction == "mean"
    return trait == "one_row" and loss.contract.expects == "embeddings"


def _exceeds_float32(loss: Loss, inputs: LossInputs) -> bool:
    """Whether the true value or gradient is finite and too large for float32, at outputs small enough for float64."""
    for _ in range(HALVINGS):
        try:
            exact = _call(loss.float64, inputs)
        except CriterionRaised:
            return False
        if exact.finite:
            largest = max(
                [abs(exact.total), *(float(g.abs().max()) for g in exact.grads if g is not None and g.numel())]
            )
            return largest > LARGEST
        inputs = replace(inputs, outputs=tuple(o / 2 for o in inputs.outputs))
    return False


def _nonfinite_part(result: CallResult) -> str:
    if not math.isfinite(result.total):
        return f"the value is {'NaN' if math.isnan(result.total) else 'infinite'}"
    is_nan = any(bool(g.isnan().any()) for g in result.grads if g is not None)
    return f"the gradient is {'NaN' if is_nan else 'infinite'}"
