"""The trajectory of a loop, from two further runs: in float64 by construction, and in the loop's own precision."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.baselines import words
from pytest_trainloop.baselines.looking import Looking, Moment
from pytest_trainloop.baselines.trajectory import (
    STEPS,
    Course,
    Environment,
    Group,
    Made,
    Optimizer,
    Scheduler,
    Step,
    Trajectory,
)
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.memory_layout import write
from pytest_trainloop.recording.events import Backward, ClipCall

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MANY = 50
"""Batches of a loop that reads far ahead or fills a buffer first: it is given no more of them."""

Nudge = int | dict[str, float] | None
"""How the weights at the start are moved: by one rounding each, up or down as drawn by this seed; or by normal draws
times a size, by name of the parameter."""


def captured(evidence: Evidence, made: Made | None = None) -> Trajectory:
    """The trajectory of the loop as it is now; ``made`` is how a stored one was made (default: as the watched run, with
    twice its batches).

    Raises ``CannotDecide`` for a loop whose ``fit`` raises or makes no step.
    """
    made = how(evidence) if made is None else made
    own, place = _run(evidence, made, double=False)
    try:
        double, _ = _run(evidence, made, double=True)
        why = ""
    except CannotDecide as reason:
        double, why = None, str(reason)
    if double is not None:
        double = _with_facts_of(own, double)
    return Trajectory(environment=place, made=made, double=double, why=why, own=own)


def course(evidence: Evidence, made: Made, *, double: bool, nudge: Nudge = None) -> Course:
    """One course alone, from the loop's own weights at the start or from moved ones."""
    return _run(evidence, made, double=double, nudge=nudge)[0]


def how(evidence: Evidence) -> Made:
    """How the runs of a new trajectory are made."""
    raised = evidence.run().raised
    if raised is not None:
        raise CannotDecide(f"fit raises {raised.summary}; a loop that raises has no trajectory to record")
    plan = evidence.plan()
    count = plan.count if plan.count > MANY else 2 * plan.count
    return Made(seed=plan.seed, count=count, read_ahead=plan.read_ahead)


def _run(evidence: Evidence, made: Made, *, double: bool, nudge: Nudge = None) -> tuple[Course, Environment]:
    looking = Looking()
    record = evidence.rerun(
        seed=made.seed,
        count=made.count,
        read_ahead=made.read_ahead,
        enough=lambda record: record.rounds >= STEPS,
        double=double,
        prepare=_moving(nudge),
        contexts=lambda watch: (looking.on(watch),),
        before_item=looking.drawn,
    )
    if record.raised is not None:
        raise CannotDecide(f"fit raises {record.raised.summary}; a loop that raises has no trajectory")
    if not looking.moments or looking.environment is None:
        raise CannotDecide("no optimizer makes a step: there is no trajectory to record")
    return _course(record, looking, double=double), looking.environment


def _course(record: Record, looking: Looking, *, double: bool) -> Course:
    since = 0
    steps = []
    for number, moment in enumerate(looking.moments[: 2 * STEPS], 1):
        steps.append(_step(record, moment, number, since))
        since = moment.event.until
    return Course(
        precision="float64" if double else "own",
        lower=record.lower if double else (),
        asked=record.asked if double else (),
        tensors=looking.tensors,
        optimizers=tuple(_optimizers(record)),
        schedulers=tuple(
            Scheduler(kind=s.kind, optimizer=s.optimizer, settings=words.settings(s.settings))
            for s in record.schedulers
            if s.calls or s.declared
        ),
        idle=tuple(s.kind for s in record.schedulers if not s.calls),
        layers=looking.layers,
        batches=tuple(tuple(leaves) for leaves in looking.batches[: steps[-1].batches]),
        steps=tuple(steps),
    )


def _step(record: Record, moment: Moment, number: int, since: int) -> Step:
    event = moment.event
    window = [e for e in record.events if since < e.at <= event.until]
    backwards = [e for e in window if isinstance(e, Backward)]
    watched = event.until <= record.full_until
    return Step(
        number=number,
        optimizer=event.optimizer,
        batches=moment.batches,
        losses=tuple(root.value for backward in backwards for root in backward.roots),
        rates=event.lrs,
        clips=tuple(total for e in window if isinstance(e, ClipCall) for total in e.totals),
        gradients=moment.gradients,
        updates=moment.updates,
        weights=moment.weights,
        calls=tuple(moment.calls) if watched else None,
        events=words.between(record, since, event.until) if watched else None,
        where=str(event.place),
    )


def _optimizers(record: Record) -> list[Optimizer]:
    return [
        Optimizer(
            kind=entry.kind,
            groups=tuple(
                Group(
                    parameters=tuple(
                        record.name(index)
                        for index, group in zip(entry.parameters, entry.groups, strict=True)
                        if group == number
                    ),
                    options=dict(sorted(options.items())),
                )
                for number, options in enumerate(entry.settings)
            ),
        )
        for entry in record.optimizers
    ]


def _with_facts_of(own: Course, double: Course) -> Course:
    """The course in float64 with the facts of the other: dtypes are those of the loop, and so is the order of calls."""
    events = {step.number: step.events for step in own.steps}
    return dataclasses.replace(
        double,
        tensors={
            name: dataclasses.replace(own.tensors[name], start=tensor.start)
            for name, tensor in double.tensors.items()
            if name in own.tensors
        },
        optimizers=own.optimizers,
        schedulers=own.schedulers,
        idle=own.idle,
        layers=own.layers,
        steps=tuple(dataclasses.replace(step, events=events.get(step.number)) for step in double.steps),
    )


def _moving(nudge: Nudge) -> Callable[[Watch], None]:
    """What moves the weights at the start; the draws are no random numbers of the loop."""

    def prepare(watch: Watch) -> None:
        if nudge is None:
            return
        draws = torch.Generator().manual_seed(nudge if isinstance(nudge, int) else 0)
        with torch.no_grad():
            for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                if not tensor.is_floating_point() or torch.nn.parameter.is_lazy(tensor) or not tensor.requires_grad:
                    continue
                moved = (
                    _by_one_rounding(tensor, draws) if isinstance(nudge, int) else _by(nudge, entry.name, tensor, draws)
                )
                write(tensor, moved)
        watch.table.begin_anew()

    return prepare


def _by_one_rounding(tensor: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    up = torch.randint(0, 2, tensor.shape, generator=draws).to(tensor.device, torch.bool)
    eps = torch.finfo(tensor.dtype).eps
    return torch.where(up, tensor * (1 + eps), tensor * (1 - eps))


def _by(sizes: Mapping[str, float], name: str, tensor: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    if name not in sizes:
        return tensor
    normal = torch.randn(tensor.shape, generator=draws, dtype=torch.float64)
    return tensor + sizes[name] * normal.to(tensor.device, tensor.dtype)
