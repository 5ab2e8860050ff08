"""What a loop did between two steps, in words that keep when lines move and files are renamed."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from pytest_trainloop.baselines.trajectory import Event
from pytest_trainloop.recording.events import (
    Backward,
    ClipCall,
    Forward,
    GradWrite,
    LossCall,
    ModeCall,
    ScalerCall,
    SchedulerStep,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.recording import events
    from pytest_trainloop.recording.record import Record

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def between(record: Record, since: int, until: int) -> tuple[Event, ...]:
    """What happened after the position ``since`` and up to ``until``; the same several times in a row is one event."""
    inside = [e for e in sorted(record.events, key=lambda e: e.at) if since < e.at <= until]
    scaling = [(call.at, call.until) for call in record.scaler_calls()]
    found = [
        Event(what=what, where=str(event.place))
        for event in inside
        if not (isinstance(event, ScalerCall) and any(a < event.at < b for a, b in scaling))
        for what in _words(record, event)
    ]
    joined: list[Event] = []
    for what, group in itertools.groupby(found, key=lambda event: event.what):
        times = list(group)
        joined.append(times[0] if len(times) == 1 else Event(what=f"{what} x {len(times)}", where=times[0].where))
    return tuple(joined)


def _words(record: Record, event: events.Event) -> Iterator[str]:
    """One text, or none for what says nothing of its own."""
    match event:
        case GradWrite(how="clipped", by=by, limit=limit):
            if by not in _CLIPS:  # those are calls
                yield f"{by}({'' if limit is None else f'{limit:g}'})"
        case GradWrite(how=how, by=by):
            yield f"{by} of gradients" if how == "altered" else by
        case ClipCall(by=by, limit=limit):
            yield f"{by}({limit:g})"
        case Forward(in_backward=False):
            modes = [*([] if event.training else ["eval"]), *([] if event.grad_enabled else ["no grad"])]
            yield f"forward of {event.module}" + (f" ({', '.join(modes)})" if modes else "")
        case LossCall(name=name, reduction=reduction, ignore_index=ignored):
            given = [*([reduction] if reduction else []), *([] if ignored in (None, -100) else [f"ignores {ignored}"])]
            yield f"{name}({', '.join(given)})"
        case Backward(kind=kind):
            yield "backward" if kind == "backward" else "autograd.grad"
        case Step(nested=False, optimizer=optimizer):
            yield "step" if len(record.optimizers) == 1 else f"step of optimizer {optimizer}"
        case SchedulerStep(scheduler=scheduler, metric=metric):
            yield f"{scheduler}.step({'metric' if metric else ''})"
        case ScalerCall(what=what, enabled=True):
            yield f"scaler.{what}"
        case ModeCall(below=below, on=on):
            yield f"{below or 'model'}.{'train' if on else 'eval'}()"
        case _:
            return


_FUNCTION = re.compile(r"(\S+) at [^()]*?:\d+\(")
_IDENTITY = re.compile(r"\b([A-Za-z_]\w*) \d{6,}\b")


def settings(given: Mapping[str, str]) -> dict[str, str]:
    """Settings of a scheduler without lines of functions and identities of objects, which differ between two runs."""
    return {name: _IDENTITY.sub(r"\1", _FUNCTION.sub(r"\1(", text)) for name, text in sorted(given.items())}
