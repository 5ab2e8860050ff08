"""Whether ignored positions change the value or the gradient, and whether they count in the mean."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import Finding
from pytest_trainloop.instruments.losses.alignment import require_aligned
from pytest_trainloop.instruments.losses.calls import CallResult, CriterionRaised, same, size_of
from pytest_trainloop.instruments.strategies.loss_cases import LossInputs, channels, class_axis, inputs_of

if TYPE_CHECKING:
    from pytest_trainloop.instruments.losses.evidence import Loss
    from pytest_trainloop.instruments.strategies.loss_cases import Case


def effect_of_ignored(loss: Loss, case: Case) -> Finding | None:
    """What ignored positions change."""
    require_aligned(loss, case)
    inputs = inputs_of(loss.contract, case)
    try:
        start = loss.float64(inputs)
    except CriterionRaised as raised:
        loss.float64(
            inputs_of(loss.contract, replace(case, ignored=()))
        )  # raises as well where ignoring is not the cause
        return Finding(
            cause="raises",
            summary=f"the criterion raises for a target that is to be ignored ({loss.contract.ignore_index})",
            measured=str(raised),
            shown_by="the same call without an ignored target does not raise",
        )
    if not math.isfinite(start.total):
        raise CannotDecide("the value is not finite")
    return _outputs_changed(loss, inputs, start) or _removed(loss, inputs)


def _mask(loss: Loss, inputs: LossInputs) -> torch.Tensor:
    """Which entries of the output belong to an ignored target."""
    output, target = inputs.outputs[0], inputs.target
    if target is None:
        raise CannotDecide("there is no target")
    mask = _ignored(loss, target)
    if mask.dim() < output.dim():
        last = loss.contract.expects == "embeddings"
        mask = mask.unsqueeze(-1 if last else class_axis(loss.contract))
    return mask.expand(output.shape)


def _ignored(loss: Loss, target: torch.Tensor) -> torch.Tensor:
    return target.eq(0 if loss.contract.ignore_index is None else loss.contract.ignore_index)


def _outputs_changed(loss: Loss, inputs: LossInputs, start: CallResult) -> Finding | None:
    mask = _mask(loss, inputs)
    other = tuple(torch.where(mask, o.flip(0) * 0.5 + o.mean(), o) for o in inputs.outputs)
    changed = loss.float64(replace(inputs, outputs=other))
    ignored, entries = int(mask.sum()), mask.numel()
    if not same(start.total, changed.total, size_of(start, inputs)):
        return Finding(
            cause="not_ignored",
            summary=f"outputs at ignored positions (target {loss.contract.ignore_index}) change the value",
            measured=f"{start.total:.6g} becomes {changed.total:.6g}; {ignored} of {entries} output entries changed",
            shown_by="only outputs at ignored positions were changed",
        )
    reaching = [g[mask] for g in start.grads if g is not None]
    if any(bool(g.any()) for g in reaching):
        largest = max(float(g.abs().max()) for g in reaching)
        return Finding(
            cause="gradient_at_ignored",
            summary="a gradient reaches ignored positions, whose outputs do not change the value",
            measured=f"largest entry {largest:.4g} for {ignored} of {entries} output entries",
            shown_by="changing these outputs does not change the value",
        )
    return None


def _removed(loss: Loss, inputs: LossInputs) -> Finding | None:
    """The effect of removing what is ignored: the value must stay the same."""
    ignoring, without = _with_and_without(loss, inputs)
    if ignoring.target is None or without.target is None or not without.target.numel():
        raise CannotDecide("nothing is left when the ignored targets are removed")
    before, after = loss.float64(ignoring), loss.float64(without, grad=False)
    if not (math.isfinite(before.total) and math.isfinite(after.total)):
        raise CannotDecide("the value is not finite")
    size = size_of(before, ignoring) + abs(after.total)
    if same(before.total, after.total, size) or before.value.dim():
        return None
    total, kept = ignoring.target.numel(), without.target.numel()
    measured = f"{before.total:.6g} with ignored targets, {after.total:.6g} without them"
    if same(before.total * total, after.total * kept, size * total):
        return Finding(
            cause="counted_in_mean",
            summary=f"ignored targets count in the mean: it divides by {total} where {kept} targets are left",
            measured=measured,
            shown_by=f"the ratio of the two values is exactly {kept} to {total}",
        )
    return Finding(
        cause="removal_differs",
        summary="the presence of ignored targets changes the value",
        measured=f"{measured}; {total - kept} of {total} targets are ignored",
        shown_by="the same rows without the ignored targets; the ratio is not that of the counts",
    )


def _with_and_without(loss: Loss, inputs: LossInputs) -> tuple[LossInputs, LossInputs]:
    target = inputs.target
    if target is None:
        raise CannotDecide("there is no target")
    ignored = _ignored(loss, target)
    if target.dim() == 1:
        kept = ~ignored
        return inputs, LossInputs(tuple(o[kept] for o in inputs.outputs), target[kept])
    if not loss.contract.shape:  # several labels for a row: whole rows are ignored
        rows = ignored.flatten(1).any(1)
        whole = torch.where(rows.view(-1, *[1] * (target.dim() - 1)), float(loss.contract.ignore_index or 0), target)
        return replace(inputs, target=whole), LossInputs(tuple(o[~rows] for o in inputs.outputs), target[~rows])
    return _column(loss, inputs, target)


def _column(loss: Loss, inputs: LossInputs, clean: torch.Tensor) -> tuple[LossInputs, LossInputs]:
    """The rows with their first position ignored, and without it."""
    if loss.contract.shape[0] < 2:
        raise CannotDecide("LossContract.shape has only one position, which cannot be ignored in every row")
    clean = torch.where(_ignored(loss, clean), _some_target(loss, clean), clean)
    hole = clean.clone()
    hole[:, 0] = loss.contract.ignore_index or 0
    axis = 2 if channels(loss.contract) is not None and class_axis(loss.contract) == 1 else 1
    shorter = tuple(o.narrow(axis, 1, o.shape[axis] - 1) for o in inputs.outputs)
    return replace(inputs, target=hole), LossInputs(shorter, clean[:, 1:])


def _some_target(loss: Loss, target: torch.Tensor) -> torch.Tensor:
    kept = target[~_ignored(loss, target)]
    return kept[0] if kept.numel() else target.new_tensor(0 if loss.contract.ignore_index != 0 else 1)
