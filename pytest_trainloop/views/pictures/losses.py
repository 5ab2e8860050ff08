"""The loss over the watched run, and on one fixed batch."""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.loss_curve import PHASES, SPAN, Losses, factor, kind_of, mean
from pytest_trainloop.checks.learning.one_batch import REFERENCE_LRS, OneBatchRuns
from pytest_trainloop.recording.events import Backward, LossCall, ScalerCall, Step
from pytest_trainloop.views.loop_facts.loss import MOST_CALLS, chances
from pytest_trainloop.views.loop_facts.words import numbered, two
from pytest_trainloop.views.pictures.picture import Axis, Curve, Mark, Picture, curve, gaps, number, scale_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.learning.one_batch import Curve as Run
    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.pictures.picture import Role
    from pytest_trainloop.views.pictures.report_inputs import ReportInputs

LOSS = "loss"

LONG = 8
"""Times ``SPAN`` that a run is drawn by means over as many steps; a shorter one by means over a turn of the seeds."""


def loss(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """What is backpropagated for each step, and the loss functions whose sum or part it is."""
    by_optimizer = _by_optimizer(facts)
    drawn = [curve(name, range(1, len(values) + 1), values, "each") for name, values in by_optimizer.items()]
    if not drawn:
        whole = Losses(facts.record).read()
        drawn = [curve("backpropagated", range(1, len(whole) + 1), whole)]
    most = max(len(one.x) for one in drawn)
    if most < 2:
        return
    own = [curve(name, steps, values, "each") for name, (steps, values) in _calls(facts).items()]
    if not by_optimizer and (len(own) > 1 or any(not _same(one, drawn[0]) for one in own)):
        drawn += own
    marks = [
        Mark(axis="y", at=number(level) or 0.0, text=f"{name} of a guess: {two(level)}", where=where)
        for (name, where), level in chances(facts).items()
        if math.isfinite(level)
    ]
    backward = next(iter(facts.record.backwards() or facts.record.autograd_passes()), None)
    yield Picture(
        key="loss",
        kind="curves",
        title="Loss",
        look=("It begins near the loss of a guess, and moves; " if marks else "It moves; ")
        + "where batches differ, it need not fall in so few steps.",
        of=f"the watched run, {numbered(most, 'step')}",
        checks=(
            "loss_at_init",
            "finite",
            "loss_components",
            "adversaries_oppose",
            "every_term_trains",
            "loss_contract",
            "loss_formula",
            "learnable_targets",
            "every_row_teaches",
        ),
        where=facts.where(backward.place) if backward is not None else "",
        y=Axis(title=LOSS, scale=scale_of(drawn, span=100.0)),
        curves=tuple(drawn),
        marks=(*marks[:MOST_CALLS], *gaps(drawn)),
    )


def _by_optimizer(facts: Facts) -> dict[str, list[float]]:
    """What was backpropagated since the step before, by the optimizer that steps with it; empty where not each of
    several has its own."""
    found: dict[int, list[float]] = {}
    pending: list[float] = []
    scale = 1.0
    for event in facts.record.events:
        if isinstance(event, ScalerCall) and event.what == "scale" and event.enabled:
            scale = factor(event)
        elif isinstance(event, Backward) and event.kind == kind_of(facts.record) and event.roots:
            pending.append(sum(root.value for root in event.roots) / scale)
        elif isinstance(event, Step) and not event.nested and pending:
            found.setdefault(event.optimizer, []).append(sum(pending))
            pending = []
    own = len(found) > 1 and set(found) == {s.optimizer for s in facts.record.of(Step) if not s.nested}
    return {f"loss of {facts.optimizer(i)}": values for i, values in sorted(found.items())} if own else {}


def _calls(facts: Facts) -> dict[str, tuple[list[int], list[float]]]:
    """The mean value of each call of a loss function, by the step that follows it."""
    ends = [step.until or step.at for step in facts.record.innermost_steps()]
    found: dict[str, dict[int, list[float]]] = {}
    for call in facts.record.of(LossCall):
        at = 1 + bisect.bisect_left(ends, call.at)
        if call.value is not None and at <= len(ends):
            where = facts.where(call.place)
            name = f"{call.name} ({where})" if where else call.name
            found.setdefault(name, {}).setdefault(at, []).append(call.value)
    return {
        name: (list(steps), [sum(values) / len(values) for values in steps.values()])
        for name, steps in list(found.items())[:MOST_CALLS]
    }


def _same(one: Curve, other: Curve) -> bool:
    return one.x == other.x and one.y == other.y


def one_batch(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The run of ``overfit_one_batch``, with the plain Adam that it was compared with, where it was."""
    made = facts.evidence.shared(OneBatchRuns).made
    runs = {} if made is None else made.made
    own = runs.get("own")
    if own is None or own.steps < 2:
        return
    span = SPAN if own.steps >= LONG * SPAN else PHASES
    drawn = [_steps(own.losses, "each step", "faint"), _mean(own, span, "the loop", "own")]
    adam = {max(REFERENCE_LRS) if key == "quick" else key: run for key, run in runs.items() if _is_adam(key)}
    if adam:
        lr, best = min(adam.items(), key=lambda pair: pair[1].end if math.isfinite(pair[1].end) else math.inf)
        drawn.append(_mean(best, span, f"plain Adam at {two(float(lr))}", "reference"))  # type: ignore[arg-type]
    marks = []
    if own.start > 0:
        marks.append(Mark(axis="y", at=number(own.start / 2) or 0.0, text="half of the first loss"))
    reference = "" if len(drawn) > 2 else "; plain Adam was not needed for comparison"
    yield Picture(
        key="one_batch",
        kind="curves",
        title="Loss on one fixed batch",
        look="It falls to half of where it began, or goes on falling"
        + (" as plain Adam does from the same start." if adam else "."),
        of=f"overfit_one_batch's run: {numbered(own.steps, 'step')} on one batch{reference}",
        checks=("overfit_one_batch", "update_ratio"),
        y=Axis(title=LOSS, scale=scale_of(drawn, span=100.0)),
        curves=tuple(drawn),
        marks=(*marks, *gaps(drawn)),
        note=f"the batch stays as it is; dropout and other random numbers are drawn under {PHASES} seeds in turn, so "
        f"that a thick line is the mean of the last {span} steps",
    )


def two_runs(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The loss of two runs under one seed, where ``determinism`` found that they differ."""
    from pytest_trainloop.checks.state.determinism.repeat import repetition

    found = facts.ask(repetition) if facts.findings("determinism") else None
    if found is None or found.difference is None or max(map(len, found.losses), default=0) < 2:
        return
    roles: tuple[Role, Role] = ("own", "reference")
    drawn = [
        _steps(losses, name, role) for losses, name, role in zip(found.losses, ("first", "second"), roles, strict=True)
    ]
    difference = found.difference
    yield Picture(
        key="two_runs",
        kind="curves",
        title="Loss of two runs under one seed",
        look="The second run lies on the first, bit for bit; where they part, something is not restored by the seed.",
        of=f"the watched run, and the same again: {numbered(max(map(len, found.losses)), 'step')}",
        checks=("determinism",),
        where=facts.where(difference.where),
        y=Axis(title=LOSS, scale=scale_of(drawn, span=100.0)),
        curves=tuple(drawn),
        marks=(Mark(axis="x", at=difference.step + 1, text=f"first difference: {difference.what}"), *gaps(drawn)),
    )


def _is_adam(key: object) -> bool:
    return key == "quick" or isinstance(key, float)


def _steps(losses: Sequence[float], name: str, role: Role) -> Curve:
    return curve(name, range(1, len(losses) + 1), losses, role)


def _mean(run: Run, span: int, name: str, role: Role) -> Curve:
    """The mean over so many steps up to each: whole turns of the seeds."""
    ends = range(min(span, run.steps), run.steps + 1)
    return curve(name, ends, [mean(run.losses[max(0, end - span) : end]) for end in ends], role)
