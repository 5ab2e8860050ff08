"""Choices of an extreme that always take the value a mask was filled with, and hinges that are cut by it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.every_term_trains.slopes import slope_at
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.torch_names import EXTREMES
from pytest_trainloop.tracing.loss_slice import Ref
from pytest_trainloop.tracing.loss_tape import Tapes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.loss_slice import Call, Slice

_FAR = 1e4
"""A fill is at least so many times as large as any entry beside it."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    part: Slice
    choice: Call
    fill: float
    cut: Call


def chosen_fills(evidence: Evidence) -> Iterator[Finding]:
    """One finding for each line that chooses the fill in every row of every step that was seen."""
    by_line: dict[Place, list[_Chosen | None]] = defaultdict(list)
    for part in evidence.shared(Tapes.of).slices:
        for call in part.calls:
            if call.name in EXTREMES and not call.writes:
                by_line[call.place].append(_chosen(part, call))
    for found in by_line.values():
        sure = [c for c in found if c is not None]
        if len(sure) == len(found):
            yield _finding(sure[0], len(sure))


def _chosen(part: Slice, call: Call) -> _Chosen | None:
    """A choice whose results are all the fill, where a later call cuts what was made of it."""
    if len(call.inputs) != 1 or not call.outputs:
        return None
    given, picked = part.values[call.inputs[0]], part.values[call.outputs[0]].tensor
    fill = _fill(given.tensor, picked, _axis(call), largest="max" in call.name) if given.requires_grad else None
    if fill is None:
        return None
    cut = next((c for c in part.calls if c.number > call.number and _cuts(part, c, call.outputs[0], fill)), None)
    return None if cut is None else _Chosen(part, call, fill, cut)


def _axis(call: Call) -> int | None:
    axes = [v for v in (*call.args[1:2], call.kwargs.get("dim"), call.kwargs.get("axis")) if isinstance(v, int)]
    return axes[0] if axes else None


def _fill(given: torch.Tensor, picked: torch.Tensor, axis: int | None, *, largest: bool) -> float | None:
    """The value that is chosen everywhere, although each choice has others that are small beside it."""
    if not given.is_floating_point() or not picked.numel() or given.shape == picked.shape:
        return None
    fill = float(picked.flatten()[0])
    beside = given != fill
    others = given[beside].abs()
    if not (picked == fill).all() or not (fill > 0 if largest else fill < 0) or not others.isfinite().all():
        return None
    if not (beside.any() if axis is None else beside.any(axis).all()) or abs(fill) < _FAR * float(others.max()):
        return None
    return fill


def _cuts(part: Slice, call: Call, picked: int, fill: float) -> bool:
    """Whether a call makes one small number of entries that are all as far off as the fill."""
    if call.func is None or len(call.outputs) != 1 or not call.args or not isinstance(call.args[0], Ref):
        return False
    number = call.args[0].number
    given, made = part.values[number].tensor, part.values[call.outputs[0]].tensor
    if not made.numel() or not made.is_floating_point() or not given.is_floating_point():
        return False
    if not part.depends(number, picked) or not (given.abs() >= abs(fill) / 2).all():
        return False
    constant = bool((made == made.flatten()[0]).all()) and float(made.abs().max()) * _FAR <= abs(fill)
    slope = slope_at(part, call.outputs[0], 0.0) if constant else None
    return slope is not None and bool((slope.ne(0) & slope.isfinite()).any())


def _finding(found: _Chosen, count: int) -> Finding:
    choice, cut = found.choice, found.cut
    rows = found.part.values[choice.outputs[0]].tensor.numel()
    left = float(found.part.values[cut.outputs[0]].tensor.flatten()[0])
    name, where = choice.name.strip("_"), str(cut.place).partition("   ")[0]
    other, fill = ("smallest", "-inf") if "max" in name else ("largest", "inf")
    return Finding(
        cause="fill_chosen",
        summary=f"{name} takes the value of the mask, {found.fill:.3g}, in every row: {cut.name} makes {left:.3g} of "
        "it, and the term trains nothing",
        measured=f"all {rows} choices, in {count} of {count} calls; each had entries of a finite size beside it",
        shown_by=f"no weight changes which entry is the extreme; {cut.name} at {where} cuts every entry off",
        culprits=(name,),
        where=str(choice.place),
        repair=f"fill masked entries with {fill} where {name} is taken, or take the {other}: turn the sign before the "
        "mask is filled, not after",
    )
