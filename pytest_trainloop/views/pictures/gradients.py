"""The norm of the gradient with its clip, and the scale of the loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.numerics.grad_scaler.calls import joined as joined_traces
from pytest_trainloop.checks.numerics.grad_scaler.calls import traces
from pytest_trainloop.checks.numerics.grad_scaler.enabled_scaler import EnabledScaler
from pytest_trainloop.instruments.records.clips import clip_facts
from pytest_trainloop.instruments.records.gradient_ledger import LOGGED_NORM, Ledger
from pytest_trainloop.recording.events import Step
from pytest_trainloop.views.loop_facts.words import numbered, two
from pytest_trainloop.views.pictures.picture import Axis, Mark, Picture, curve, gaps, scale_of
from pytest_trainloop.views.pictures.sizes import joined

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.pictures.picture import Curve, Role
    from pytest_trainloop.views.pictures.report_inputs import ReportInputs

CHECKS = (
    "step_order:clip_after_step",
    "step_order",
    "overfit_one_batch:gradients_clipped_away",
    "grad_scaler:clip_before_unscale",
    "finite",
    "precision_parity",
)


def gradient_norm(facts: Facts, looked: ReportInputs) -> Iterator[Picture]:
    """The norm that each step reads, and the norm before the clip where there is one."""
    record = looked.measured.record
    if record is None:
        return
    drawn: list[Curve] = []
    optimizers = sorted({moment.optimizer for moment in looked.moments if moment.gradients})
    for index in optimizers:
        own = [m for m in looked.moments if m.optimizer == index and m.gradients]
        name = facts.optimizer(index)
        before = _before_the_clip(record, index)
        if before:
            drawn.append(curve(f"{name} before the clip".strip(), before, before.values(), "reference"))
        role: Role = "own" if len(optimizers) == 1 else "each"
        norms = [joined(m.gradients.values()) for m in own]
        drawn.append(curve(f"{name} as the step reads it".strip(), [m.number for m in own], norms, role))
    if not drawn or max(len(one.x) for one in drawn) < 2:
        return
    clips = [fact for fact in clip_facts(record) if fact.limit < LOGGED_NORM]
    norms_clipped = [fact for fact in clips if fact.by == "clip_grad_norm_"]
    marks = [
        Mark(axis="y", at=fact.limit, text=f"clip at {two(fact.limit)}", where=facts.where(fact.place))
        for fact in norms_clipped
    ]
    partial = next((fact for fact in clips if 0 < fact.covers < fact.of), None)
    yield Picture(
        key="gradient_norm",
        kind="curves",
        title="Norm of the gradient" + (" and its clip" if clips else ""),
        look="What the step reads lies at or below the clip, and is neither 0 nor growing from step to step."
        if norms_clipped
        else "It is neither 0 nor growing from step to step; single peaks are common.",
        of=f"a run like the watched one, {numbered(max(len(one.x) for one in drawn), 'step')}",
        checks=CHECKS,
        where=facts.where(clips[0].place) if clips else "",
        y=Axis(title="norm of the gradient", scale=scale_of(drawn)),
        curves=tuple(drawn),
        marks=(*marks, *gaps(drawn)),
        note=f"the clip covers {partial.covers} of {partial.of} tensors; the curves are of all" if partial else "",
    )


def _before_the_clip(record: Record, optimizer: int) -> dict[int, float]:
    """The norm of all that the step reads, before the last clip in front of it, by the number of the step; none where
    a backward pass comes between the two."""
    backwards = [backward.at for backward in record.backwards()]
    numbers = {id(step): n for n, step in enumerate((s for s in record.of(Step) if s.optimizer == optimizer), 1)}
    found = {}
    for window in Ledger(record).windows:
        own = window.step.optimizer == optimizer and window.clips and window.stepped
        if own and not any(window.clips[-1].at < at < window.step.reads[-1].at for at in backwards):
            found[numbers[id(window.step)]] = joined(window.norms.get(i, math.nan) for i in window.stepped)
    return found


def loss_scale(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The scale of each gradient scaler at each step that was tried, and the steps that were skipped."""
    record, of = facts.record, "the watched run"
    if not EnabledScaler.enabled_in(record) and "grad_scaler" in facts.results and facts.evidence.repeatable:
        if "precision" not in facts.evidence.knobs and not record.scaler_calls():
            return
        other = facts.ask(EnabledScaler)
        made = None if other is None else facts.ask(lambda _evidence: other.run())
        if other is None or made is None:
            return
        record, of = made, f"grad_scaler's run, {other.how}"
    one = joined_traces(record)
    found = traces(record) if one is None else [one]
    drawn = []
    for number, trace in enumerate(found):
        several = f" of scaler {number}" if len(found) > 1 else ""
        tries = range(1, len(trace.factors) + 1)
        drawn.append(curve(f"scale{several}", tries, trace.factors, "own" if not number else "each", stepped=True))
        skipped = [(at, factor) for at, factor, made in zip(tries, trace.factors, trace.made, strict=True) if not made]
        if skipped:
            drawn.append(curve(f"skipped{several}", [at for at, _ in skipped], [f for _, f in skipped], "event"))
    if found:
        yield Picture(
            key="loss_scale",
            kind="curves",
            title="Scale of the loss",
            look="After a few skipped steps it settles; one that falls on and on has a gradient that is never finite.",
            of=of,
            checks=("grad_scaler", "precision_parity", "finite"),
            where=facts.where(found[0].place),
            x=Axis(title="step that was tried"),
            y=Axis(title="scale", scale=scale_of(drawn, span=4.0)),
            curves=tuple(drawn),
            marks=tuple(gaps(drawn)),
        )
