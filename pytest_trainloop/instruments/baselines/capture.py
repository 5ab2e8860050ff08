"""The trajectory of a loop, from two further runs: in float64 by construction, and in the loop's own precision."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import torch
from torch import nn

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.instruments.baselines.trajectory import (
    RECORDED_STEPS,
    Course,
    Environment,
    Event,
    Group,
    Made,
    Optimizer,
    Scheduler,
    Step,
    Trajectory,
)
from pytest_trainloop.instruments.baselines.trajectory_recorder import Looking
from pytest_trainloop.recording import events

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.instruments.baselines.trajectory_recorder import Moment
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MANY = 50
"""Batches of a loop that reads far ahead or fills a buffer first: it is given no more of them."""

CLIPS = ("clip_grad_norm_", "clip_grad_value_")

Nudge = int | dict[str, float] | None
"""How the weights at the start are moved: by one rounding each, up or down as drawn by this seed; or by normal draws
times a size, by name of the parameter."""

_FUNCTION = re.compile(r"(\S+) at [^()]*?:\d+\(")
_IDENTITY = re.compile(r"\b([A-Za-z_]\w*) \d{6,}\b")


def captured(evidence: Evidence, made: Made | None = None) -> Trajectory:
    """The trajectory of the loop as it is now; ``made`` is how a stored one was made (default: as the watched run, with
    twice its batches).

    Raises ``CannotDecide`` for a loop whose ``fit`` raises or makes no step.
    """
    if made is None:
        raised, plan = evidence.run().raised, evidence.plan()
        if raised is not None:
            raise CannotDecide(f"fit raises {raised.summary}; a loop that raises has no trajectory to record")
        count = plan.count if plan.count > MANY else 2 * plan.count
        made = Made(seed=plan.seed, count=count, read_ahead=plan.read_ahead)
    own, place = _run(evidence, made, double=False)
    try:
        double, why = _run(evidence, made, double=True)[0].with_facts_of(own), ""
    except CannotDecide as reason:
        return Trajectory(environment=place, made=made, double=None, why=str(reason), own=own)
    return Trajectory(environment=place, made=made, double=double, why=why, own=own)


def course(evidence: Evidence, made: Made, *, double: bool, nudge: Nudge = None) -> Course:
    """One course alone, from the loop's own weights at the start or from moved ones."""
    return _run(evidence, made, double=double, nudge=nudge)[0]


def _run(evidence: Evidence, made: Made, *, double: bool, nudge: Nudge = None) -> tuple[Course, Environment]:
    looking = Looking()
    record = evidence.rerun(
        seed=made.seed,
        count=made.count,
        read_ahead=made.read_ahead,
        enough=lambda record: record.rounds >= RECORDED_STEPS,
        double=double,
        prepare=lambda watch: _move(watch, nudge),
        contexts=lambda watch: (looking.on(watch),),
        before_item=looking.drawn,
    )
    if record.raised is not None:
        raise CannotDecide(f"fit raises {record.raised.summary}; a loop that raises has no trajectory")
    if not looking.moments or looking.environment is None:
        raise CannotDecide("no optimizer makes a step: there is no trajectory to record")
    moments = looking.moments[: 2 * RECORDED_STEPS]
    since = [0, *(moment.event.until for moment in moments)]
    steps = tuple(_step(record, *one) for one in zip(moments, itertools.count(1), since, strict=False))
    found = Course(
        precision="float64" if double else "own",
        lower=record.lower if double else (),
        asked=record.asked if double else (),
        tensors=looking.tensors,
        optimizers=tuple(_optimizers(record)),
        schedulers=tuple(
            Scheduler(kind=s.kind, optimizer=s.optimizer, settings=_without_lines(s.settings))
            for s in record.schedulers
            if s.calls or s.declared
        ),
        idle=tuple(s.kind for s in record.schedulers if not s.calls),
        layers=looking.layers,
        batches=tuple(tuple(leaves) for leaves in looking.batches[: steps[-1].batches]),
        steps=steps,
    )
    return found, looking.environment


def _step(record: Record, moment: Moment, number: int, since: int) -> Step:
    event = moment.event
    window = [e for e in record.events if since < e.at <= event.until]
    watched = event.until <= record.full_until
    return Step(
        number=number,
        optimizer=event.optimizer,
        batches=moment.batches,
        losses=tuple(root.value for e in window if isinstance(e, events.Backward) for root in e.roots),
        lrs=event.lrs,
        clips=tuple(total for e in window if isinstance(e, events.ClipCall) for total in e.totals),
        gradients=moment.gradients,
        updates=moment.updates,
        weights=moment.weights,
        calls=tuple(moment.calls) if watched else None,
        events=tuple(_between(record, since, event.until)) if watched else None,
        where=str(event.place),
    )


def _optimizers(record: Record) -> Iterator[Optimizer]:
    for entry in record.optimizers:
        members = list(zip(entry.parameters, entry.groups, strict=True))
        yield Optimizer(
            kind=entry.kind,
            groups=tuple(
                Group(
                    parameters=tuple(record.name(index) for index, group in members if group == number),
                    options=dict(sorted(options.items())),
                )
                for number, options in enumerate(entry.settings)
            ),
        )


def _without_lines(given: Mapping[str, str]) -> dict[str, str]:
    """Settings without lines of functions and identities of objects, which differ between two runs."""
    return {name: _IDENTITY.sub(r"\1", _FUNCTION.sub(r"\1(", text)) for name, text in sorted(given.items())}


def _between(record: Record, since: int, until: int) -> Iterator[Event]:
    """What the loop did, in words that keep when lines move; a call that is repeated in a row is one event."""
    scaling = [(call.at, call.until) for call in record.scaler_calls()]
    found = [
        Event(what=what, where=str(event.place))
        for event in sorted(record.events, key=lambda e: e.at)
        if since < event.at <= until and (what := _words(record, event))
        if not (isinstance(event, events.ScalerCall) and any(a < event.at < b for a, b in scaling))
    ]
    for what, group in itertools.groupby(found, key=lambda event: event.what):
        times = list(group)
        yield times[0] if len(times) == 1 else Event(what=f"{what} x {len(times)}", where=times[0].where)


def _words(record: Record, event: events.Event) -> str:
    match event:
        case events.GradWrite(how="clipped", by=by, limit=limit):
            return "" if by in CLIPS else f"{by}({'' if limit is None else f'{limit:g}'})"  # those are calls
        case events.GradWrite(how=how, by=by):
            return f"{by} of gradients" if how == "altered" else by
        case events.ClipCall(by=by, limit=limit):
            return f"{by}({limit:g})"
        case events.Forward(in_backward=False):
            modes = [*([] if event.training else ["eval"]), *([] if event.grad_enabled else ["no grad"])]
            return f"forward of {event.module}" + (f" ({', '.join(modes)})" if modes else "")
        case events.LossCall(name=name, reduction=reduction, ignore_index=ignored):
            given = [*([reduction] if reduction else []), *([] if ignored in (None, -100) else [f"ignores {ignored}"])]
            return f"{name}({', '.join(given)})"
        case events.Backward(kind=kind):
            return "backward" if kind == "backward" else "autograd.grad"
        case events.Step(nested=False, optimizer=optimizer):
            return "step" if len(record.optimizers) == 1 else f"step of optimizer {optimizer}"
        case events.SchedulerStep(scheduler=scheduler, metric=metric):
            return f"{scheduler}.step({'metric' if metric else ''})"
        case events.ScalerCall(what=what, enabled=True):
            return f"scaler.{what}"
        case events.ModeCall(below=below, on=on):
            return f"{below or 'model'}.{'train' if on else 'eval'}()"
    return ""


def _move(watch: Watch, nudge: Nudge) -> None:
    """Move the weights at the start; the draws are no random numbers of the loop."""
    if nudge is None:
        return
    draws = torch.Generator().manual_seed(nudge if isinstance(nudge, int) else 0)
    with torch.no_grad():
        for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
            if not tensor.is_floating_point() or nn.parameter.is_lazy(tensor) or not tensor.requires_grad:
                continue
            if isinstance(nudge, int):
                up = torch.randint(0, 2, tensor.shape, generator=draws).to(tensor.device, torch.bool)
                eps = torch.finfo(tensor.dtype).eps
                write(tensor, torch.where(up, tensor * (1 + eps), tensor * (1 - eps)))
            elif entry.name in nudge:
                normal = torch.randn(tensor.shape, generator=draws, dtype=torch.float64)
                write(tensor, tensor + nudge[entry.name] * normal.to(tensor.device, tensor.dtype))
    watch.table.take_as_start()
