"""Does a target of the wrong shape, dtype or range make the criterion raise?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.losses.calls import Answer, Refused, same
from pytest_trainloop.losses.search import Seen
from pytest_trainloop.strategies.loss_cases import Inputs, channels, inputs_of

if TYPE_CHECKING:
    from pytest_trainloop.losses.evidence import Loss
    from pytest_trainloop.strategies.loss_cases import Case


def look(loss: Loss, case: Case) -> Seen | None:
    """What is taken without a word."""
    inputs = inputs_of(loss.contract, case)
    if loss.contract.target == "index" and loss.contract.expects != "embeddings":
        return _rows_missing(loss, inputs) or _out_of_range(loss, inputs) or _floats(loss, inputs)
    if loss.contract.target in ("value", "binary") and loss.contract.expects != "embeddings":
        return _column_against_row(loss, inputs)
    raise CannotDecide("no wrong target is known of such a contract")


def _taken(loss: Loss, inputs: Inputs) -> Answer | None:
    """The answer to a wrong call, None where the criterion raised, warned or gave no number."""
    try:
        answer = loss.wide(inputs, grad=False)
    except Refused:
        return None
    return None if answer.warned or not math.isfinite(answer.total) else answer


def _column_against_row(loss: Loss, inputs: Inputs) -> Seen | None:
    contract, target = loss.contract, inputs.target
    if contract.shape or channels(contract) is not None or target is None or len(inputs.outputs) > 1:
        raise CannotDecide("outputs and targets of more than one axis: no shape is known to be a slip")
    rows = len(target)
    answer = _taken(loss, Inputs((inputs.outputs[0][:, None],), target))
    if answer is None:
        return None
    turned = [loss.wide(Inputs(inputs.outputs, target.roll(k)), grad=False).total for k in range(rows)]
    crossed, size = sum(turned), 1.0 + sum(map(abs, turned))
    if same(turned[0] * rows, crossed, size) or not any(same(answer.total, crossed / k, size) for k in (1, rows)):
        return None
    return Seen(
        cause="broadcasts",
        summary=f"an output of ({rows}, 1) against a target of ({rows},) is taken silently: {rows * rows} pairs count",
        measured=f"{answer.total:.6g}, where ({rows},) against ({rows},) gives {turned[0]:.6g}",
        shown_by="the value is exactly that of every output with every target",
    )


def _rows_missing(loss: Loss, inputs: Inputs) -> Seen | None:
    target = inputs.target
    if target is None or len(target) < 3:
        return None
    answer = _taken(loss, Inputs(inputs.outputs, target[:-1]))
    if answer is None:
        return None
    return Seen(
        cause="rows_unchecked",
        summary=f"{len(target) - 1} targets for {len(target)} rows are taken silently",
        measured=f"the value is {answer.total:.6g}",
        shown_by="neither an exception nor a warning",
    )


def _out_of_range(loss: Loss, inputs: Inputs) -> Seen | None:
    classes, target = loss.contract.num_classes or 2, inputs.target
    for wrong in (classes, -1):
        if target is None or wrong == loss.contract.ignore_index:
            continue
        out = target.clone()
        out.view(-1)[0] = wrong
        answer = _taken(loss, Inputs(inputs.outputs, out))
        if answer is not None:
            return Seen(
                cause="range_unchecked",
                summary=f"class {wrong} of {classes} is taken silently",
                measured=f"the value is {answer.total:.6g}",
                shown_by="neither an exception nor a warning",
            )
    return None


def _floats(loss: Loss, inputs: Inputs) -> Seen | None:
    if inputs.target is None:
        return None
    answer = _taken(loss, Inputs(inputs.outputs, inputs.target.to(torch.float64)))
    if answer is None:
        return None
    return Seen(
        cause="dtype_unchecked",
        summary="class indices as floats are taken silently",
        measured=f"the value is {answer.total:.6g}",
        shown_by="neither an exception nor a warning",
    )
