"""Compares two runs that should train identically: losses, and sizes of updates, by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.learning.loss_curve import Losses
from pytest_trainloop.core import places
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Step
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.split_run import Halves

ROUNDING = {True: 1e-9, False: 1e-3}
"""Relative differences up to which sizes of updates count as equal, in float64 and in the loop's own precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Plain numbers. Steps count from 1 on, over all optimizers."""

    cut: int
    """The optimizer steps before the moment in which the two differ."""
    own: tuple[tuple[int, float], ...]
    """Step and loss of the run under judgement."""
    reference: tuple[tuple[int, float], ...]
    updates: dict[str, dict[int, float]]
    """By parameter and step, how far the sizes of the two updates differ, relative to the larger; 0 up to rounding."""


def compare_runs(own: Halves, reference: Halves, *, both_begin: bool) -> RunComparison:
    """Compare two runs in halves. ``both_begin``: the run under judgement was made from its first step on, too;
    else it begins where the first half of the reference ends."""
    cut = reference.steps[0] if reference.steps else 0
    missing = 0 if both_begin else cut
    pairs = zip(own.record.innermost_steps(), reference.record.innermost_steps()[missing:], strict=False)
    least = ROUNDING[own.double and reference.double]
    updates: dict[str, dict[int, float]] = {}
    for number, (mine, theirs) in enumerate(pairs, missing + 1):
        for name, difference in _differences(own.record, mine, reference.record, theirs).items():
            updates.setdefault(name, {})[number] = difference if difference > least else 0.0
    return RunComparison(
        cut=cut,
        own=_losses(own.record, missing),
        reference=_losses(reference.record, 0),
        updates=updates,
    )


def _losses(record: Record, missing: int) -> tuple[tuple[int, float], ...]:
    """Several optimizers may step with one loss: each loss is given for the first of its steps."""
    losses, steps = Losses(record).read(), len(record.innermost_steps())
    each = max(1, round(steps / len(losses))) if losses else 1
    return tuple((missing + 1 + n * each, loss) for n, loss in enumerate(losses))


def _differences(own: Record, mine: Step, reference: Record, theirs: Step) -> dict[str, float]:
    others = {reference.name(index): size for index, size in theirs.updates.items()}
    found = {}
    for index, size in mine.updates.items():
        name = own.name(index)
        if name in others:
            largest = max(size, others[name])
            found[name] = abs(size - others[name]) / largest if largest else 0.0
    return found


def numbers_in(result: Any) -> Iterator[float]:
    """The numbers in what ``evaluate`` returned."""
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        for value in result:
            yield from numbers_in(value)
    elif isinstance(result, torch.Tensor):
        yield from (float(n) for n in ([] if result.is_complex() else result.detach().flatten()[:1000].tolist()))
    elif isinstance(result, (int, float)) or hasattr(result, "item"):
        yield float(result)


def line_of(function: object) -> str:
    """The line where a function of the project's begins; empty for other callables."""
    code = places.code_of(function)
    if code is None or layer(code.co_filename) != 2:
        return ""
    return str(place_of(code.co_filename, places.first_line(code)))
