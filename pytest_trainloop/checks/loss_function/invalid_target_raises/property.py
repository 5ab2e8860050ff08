"""Whether a target of the wrong shape, dtype or range makes the criterion raise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import Finding
from pytest_trainloop.instruments.losses.calls import CriterionRaised, same
from pytest_trainloop.instruments.strategies.loss_cases import LossInputs, channels, inputs_of

if TYPE_CHECKING:
    from pytest_trainloop.instruments.losses.evidence import Loss
    from pytest_trainloop.instruments.strategies.loss_cases import Case


def accepted_invalid_target(loss: Loss, case: Case) -> Finding | None:
    """An invalid target that the criterion accepts without an exception or a warning."""
    contract, inputs = loss.contract, inputs_of(loss.contract, case)
    if contract.expects == "embeddings" or contract.target not in ("index", "value", "binary") or inputs.target is None:
        raise CannotDecide("no invalid target is known of such a contract")
    if contract.target == "index":
        return _class_indices(loss, inputs, inputs.target)
    return _column_against_row(loss, inputs, inputs.target)


def _accepted_value(loss: Loss, inputs: LossInputs) -> float | None:
    """The value of an invalid call, None where the criterion raised, warned or returned no finite number."""
    try:
        result = loss.float64(inputs, grad=False)
    except CriterionRaised:
        return None
    return None if result.warned or not math.isfinite(result.total) else result.total


def _column_against_row(loss: Loss, inputs: LossInputs, target: torch.Tensor) -> Finding | None:
    contract = loss.contract
    if contract.shape or channels(contract) is not None or len(inputs.outputs) > 1:
        raise CannotDecide("outputs or targets have more than one axis: no shape is known to be a mistake")
    rows = len(target)
    value = _accepted_value(loss, LossInputs((inputs.outputs[0][:, None],), target))
    if value is None:
        return None
    rotated = [loss.float64(replace(inputs, target=target.roll(k)), grad=False).total for k in range(rows)]
    all_pairs, size = sum(rotated), 1.0 + sum(map(abs, rotated))
    if same(rotated[0] * rows, all_pairs, size) or not any(same(value, all_pairs / k, size) for k in (1, rows)):
        return None
    return Finding(
        cause="broadcasts",
        level="advice",
        summary=f"an output of ({rows}, 1) against a target of ({rows},) is accepted silently: {rows * rows} pairs "
        "count",
        measured=f"{value:.6g}, where ({rows},) against ({rows},) gives {rotated[0]:.6g}",
        shown_by="the value is exactly that of every output with every target",
    )


def _class_indices(loss: Loss, inputs: LossInputs, target: torch.Tensor) -> Finding | None:
    """The first kind of invalid class indices that is accepted."""
    classes, rows = loss.contract.num_classes or 2, len(target)
    invalid = []
    if rows >= 3:
        invalid.append(("rows_unchecked", f"{rows - 1} targets for {rows} rows are", target[:-1]))
    for index in (classes, -1):
        if index != loss.contract.ignore_index:
            changed = target.clone()
            changed.view(-1)[0] = index
            invalid.append(("range_unchecked", f"class {index} of {classes} is", changed))
    invalid.append(("dtype_unchecked", "class indices as floats are", target.to(torch.float64)))
    for cause, what, given in invalid:
        value = _accepted_value(loss, replace(inputs, target=given))
        if value is not None:
            return Finding(
                cause=cause,
                level="advice",
                summary=f"{what} accepted silently",
                measured=f"the value is {value:.6g}",
                shown_by="neither an exception nor a warning",
            )
    return None
