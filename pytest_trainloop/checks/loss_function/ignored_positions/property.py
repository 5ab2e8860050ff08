"""Do ignored positions leave value and gradient alone, and out of the mean?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.losses.alignment import require_aligned
from pytest_trainloop.losses.calls import Answer, Refused, same, size_of
from pytest_trainloop.losses.search import Seen
from pytest_trainloop.strategies.loss_cases import Inputs, channels, class_axis, inputs_of

if TYPE_CHECKING:
    from pytest_trainloop.losses.evidence import Loss
    from pytest_trainloop.strategies.loss_cases import Case


def look(loss: Loss, case: Case) -> Seen | None:
    """What ignored positions change."""
    require_aligned(loss, case)
    inputs = inputs_of(loss.contract, case)
    try:
        start = loss.wide(inputs)
    except Refused as refused:
        return _raises(loss, case, refused)
    if not math.isfinite(start.total):
        raise CannotDecide("the value is not finite")
    return _changes(loss, inputs, start) or _left_out(loss, inputs)


def _raises(loss: Loss, case: Case, refused: Refused) -> Seen:
    loss.wide(inputs_of(loss.contract, replace(case, ignored=())))  # raises as well where it is no matter of ignoring
    return Seen(
        cause="raises",
        summary=f"a target that is to be ignored ({loss.contract.ignore_index}) makes the criterion raise",
        measured=str(refused),
        shown_by="the same call without an ignored target goes through",
    )


def _mask(loss: Loss, inputs: Inputs) -> torch.Tensor:
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


def _changes(loss: Loss, inputs: Inputs, start: Answer) -> Seen | None:
    mask = _mask(loss, inputs)
    other = tuple(torch.where(mask, o.flip(0) * 0.5 + o.mean(), o) for o in inputs.outputs)
    moved = loss.wide(replace(inputs, outputs=other))
    size = size_of(start, inputs)
    ignored, entries = int(mask.sum()), mask.numel()
    if not same(start.total, moved.total, size):
        return Seen(
            cause="not_ignored",
            summary=f"outputs at ignored positions (target {loss.contract.ignore_index}) change the value",
            measured=f"{start.total:.6g} becomes {moved.total:.6g}; {ignored} of {entries} entries of the output moved",
            shown_by="nothing but outputs at ignored positions was changed",
        )
    reaching = [g[mask] for g in start.grads if g is not None]
    if any(bool(g.any()) for g in reaching):
        largest = max(float(g.abs().max()) for g in reaching)
        return Seen(
            cause="gradient_at_ignored",
            summary="a gradient reaches ignored positions, whose outputs do not change the value",
            measured=f"largest entry {largest:.4g} at {ignored} ignored entries of the output",
            shown_by="moving these outputs leaves the value as it is",
        )
    return None


def _left_out(loss: Loss, inputs: Inputs) -> Seen | None:
    """The same call with what is ignored taken out must have the same value."""
    ignoring, without = _with_and_without(loss, inputs)
    if ignoring.target is None or without.target is None or not without.target.numel():
        raise CannotDecide("nothing is left when what is ignored is taken out")
    there, gone = loss.wide(ignoring), loss.wide(without, grad=False)
    if not (math.isfinite(there.total) and math.isfinite(gone.total)):
        raise CannotDecide("the value is not finite")
    size = size_of(there, ignoring) + abs(gone.total)
    if same(there.total, gone.total, size) or there.value.dim():
        return None
    total, kept = ignoring.target.numel(), without.target.numel()
    counted = same(there.total * total, gone.total * kept, size * total)
    told = f"{there.total:.6g} with ignored targets, {gone.total:.6g} without them"
    if counted:
        return Seen(
            cause="counted_in_mean",
            summary=f"ignored targets count in the mean: it divides by {total} where {kept} targets are left",
            measured=told,
            shown_by=f"the two values are as {kept} to {total}, exactly",
        )
    return Seen(
        cause="removal_differs",
        summary="ignored targets change the value by being there",
        measured=f"{told}; {total - kept} of {total} targets are ignored",
        shown_by="the same rows without what is ignored; the quotient is not that of the counts",
    )


def _with_and_without(loss: Loss, inputs: Inputs) -> tuple[Inputs, Inputs]:
    target = inputs.target
    if target is None:
        raise CannotDecide("there is no target")
    ignored = _ignored(loss, target)
    if target.dim() == 1:
        kept = ~ignored
        return inputs, Inputs(tuple(o[kept] for o in inputs.outputs), target[kept])
    if not loss.contract.shape:  # several labels for a row: whole rows are ignored
        rows = ignored.flatten(1).any(1)
        all_of = torch.where(rows.view(-1, *[1] * (target.dim() - 1)), float(loss.contract.ignore_index or 0), target)
        return replace(inputs, target=all_of), Inputs(tuple(o[~rows] for o in inputs.outputs), target[~rows])
    return _column(loss, inputs, target)


def _column(loss: Loss, inputs: Inputs, clean: torch.Tensor) -> tuple[Inputs, Inputs]:
    """One position of every row ignored, and the same rows without that position."""
    if loss.contract.shape[0] < 2:
        raise CannotDecide("LossContract.shape has one position only, which cannot be ignored in every row")
    clean = torch.where(_ignored(loss, clean), _some_target(loss, clean), clean)
    hole = clean.clone()
    hole[:, 0] = loss.contract.ignore_index or 0
    axis = 2 if channels(loss.contract) is not None and class_axis(loss.contract) == 1 else 1
    shorter = tuple(o.narrow(axis, 1, o.shape[axis] - 1) for o in inputs.outputs)
    return replace(inputs, target=hole), Inputs(shorter, clean[:, 1:])


def _some_target(loss: Loss, target: torch.Tensor) -> torch.Tensor:
    kept = target[~_ignored(loss, target)]
    return kept[0] if kept.numel() else target.new_tensor(0 if loss.contract.ignore_index != 0 else 1)
