"""Targets that are noise the model was never given.

A regression target must depend on the batch, or on random numbers that the prediction depends on too. Where it is the
result of one draw, and the prediction depends on another draw of its shape, the noise was drawn twice. A velocity
(noise minus data) is such a target as well; a sum of data and noise is none, since two noisy views of one row look so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.learnable_targets.comparisons import FirstSteps, other_numbers
from pytest_trainloop.recording.torch_names import CASTS, SUBTRACTIONS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.learnable_targets.comparisons import Comparison, Origin
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.call_log import Call, Value


@dataclass(frozen=True, slots=True)
class OtherDraw:
    """``target`` is the line of the draw that the target is made of; ``given`` that of the draw of the same shape that
    the prediction depends on, None where there is none."""

    place: Place
    target: Place
    function: str
    shape: tuple[int, ...]
    given: Place | None
    velocity: bool
    """Whether the target is the difference of the draw and data."""


def other_draws(evidence: Evidence) -> Iterator[OtherDraw]:
    """Each line that compares a prediction with noise that it does not depend on."""
    first = evidence.shared(FirstSteps.on)
    for compared in first.by_line().values():
        found = [_foreign(first, one) for one in compared]
        drawn = found[0]
        if drawn is None or any(other is None for other in found):
            continue
        if not _independent(evidence, compared[0], drawn):
            continue
        call, target = compared[0].call, compared[0].target
        shape = drawn.outputs[0].shape
        wanted = first.origin(compared[0].prediction).draws - first.origin(target).draws
        given = next((d for n in sorted(wanted) if (d := first.calls[n]).outputs[0].shape == shape), None)
        velocity = first.origin(target).batch
        if velocity and given is None:
            continue
        yield OtherDraw(call.place, drawn.place, drawn.name, shape, None if given is None else given.place, velocity)


def _foreign(first: FirstSteps, compared: Comparison) -> Call | None:
    """The draw that a target is made of and its prediction does not depend on."""
    wanted, had = first.origin(compared.target), first.origin(compared.prediction)
    if had.opaque or not (had.trained and had.batch) or not _of_one_draw(wanted):
        return None
    number = next(iter(wanted.draws))
    drawn = first.calls[number]
    if number in had.draws or number in first.left_torch or not drawn.outputs:
        return None
    if _count(drawn.outputs[0]) != _count(compared.target):
        return None  # all pairs, or statistics of rows: no row has a partner
    return drawn if not wanted.batch or _difference_with(compared.target, drawn) else None


def _of_one_draw(wanted: Origin) -> bool:
    made_of_more = wanted.trained or wanted.weights or wanted.ordered or wanted.opaque
    return len(wanted.draws) == 1 and not made_of_more


def _difference_with(target: Value, drawn: Call) -> bool:
    """Whether a target is a draw minus data, or data minus a draw, neither of them scaled."""
    call = target.source(VIEWS | CASTS).made_by
    if call is None or call.name not in SUBTRACTIONS or len(call.inputs) != 2:
        return False
    sides = [value.source(VIEWS | CASTS) for value in call.inputs]
    noise = [side for side in sides if side.made_by is drawn]
    data = [side for side in sides if side.of_batch]
    return len(noise) == 1 and len(data) == 1


def _independent(evidence: Evidence, compared: Comparison, drawn: Call) -> bool:
    """Whether the prediction is the same, bit for bit, with other numbers in the draw that the target is made of."""
    again, _ = FirstSteps.seen(evidence, {})
    turned, _ = FirstSteps.seen(evidence, {drawn.number: other_numbers})
    number = compared.call.number
    if max(len(again.calls), 1) <= number or len(turned.calls) <= number:
        return False
    return _digest(again, compared) == compared.prediction.digest == _digest(turned, compared)


def _digest(steps: FirstSteps, compared: Comparison) -> int | None:
    call = steps.calls[compared.call.number]
    if call.name != compared.call.name:
        return None
    side = [v is compared.prediction for v in compared.call.inputs].index(True)
    return call.inputs[side].digest if side < len(call.inputs) else None


def _count(value: Value) -> int:
    count = 1
    for size in value.shape:
        count *= size
    return count
