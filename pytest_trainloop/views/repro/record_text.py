"""The record of a run as text to read: the weights, the optimizers, and every call in order with its line."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.wording import some
from pytest_trainloop.recording.events import (
    Backward,
    ClipCall,
    Event,
    Forward,
    GradWrite,
    LossCall,
    ModeCall,
    ScalerCall,
    SchedulerStep,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_trainloop.recording.record import Record

MOST_CALLS = 2_000
"""Calls that are listed: those of twelve steps and far more."""

MOST_NAMES = 4
"""Names that a line gives."""


def record_text(record: Record, base: Path) -> str:
    """The record in lines; files are relative to ``base`` where they lie below it."""
    return "\n".join([*_head(record), "", *_weights(record), "", *_optimizers(record), "", *_calls(record, base), ""])


def _head(record: Record) -> Iterator[str]:
    yield f"{record.steps} optimizer steps, {len(record.backwards())} backward passes, {record.items} batches taken"
    if record.knobs:
        yield f"called with {', '.join(f'{name}={value!r}' for name, value in record.knobs.items())}"
    if record.raised is not None:
        yield f"fit raised {record.raised.summary}"
    yield from record.notes
    for mistake in record.mistakes:
        yield mistake.sentence


def _weights(record: Record) -> Iterator[str]:
    yield "WEIGHTS   name, shape, dtype, device, optimizer"
    held = record.held
    width = max((len(p.name) for p in record.parameters), default=0)
    for parameter in record.parameters:
        of = ", ".join(f"{record.optimizers[o].kind} {o}" for o in held.get(parameter.index, ())) or "none"
        frozen = "" if parameter.requires_grad else ", no gradient asked"
        shape, dtype = list(parameter.shape), parameter.dtype.removeprefix("torch.")
        yield f"{parameter.name:{width}}  {shape!s:16}  {dtype}  {parameter.device}  {of}{frozen}"


def _optimizers(record: Record) -> Iterator[str]:
    yield "OPTIMIZERS   groups with their options at the last step"
    for optimizer in record.optimizers:
        yield f"{optimizer.kind} {optimizer.index}: {optimizer.steps} steps"
        for group, settings in enumerate(optimizer.settings):
            names = record.names({p for p, g in zip(optimizer.parameters, optimizer.groups, strict=True) if g == group})
            options = ", ".join(f"{name}={value}" for name, value in settings.items())
            yield f"  group {group}: {some(names, MOST_NAMES) or 'no parameter'}; {options}"


def _calls(record: Record, base: Path) -> Iterator[str]:
    yield "CALLS   position in the run, call, line"
    events = sorted(record.events, key=lambda event: event.at)
    for event in events[:MOST_CALLS]:
        file = event.place.file.removeprefix(f"{base}/")
        line = f"{file}:{event.place.line}   {event.place.code}".rstrip()
        yield f"{event.at:6}  {_told(event, record)}   {line}"
    if len(events) > MOST_CALLS:
        yield f"        and {len(events) - MOST_CALLS} more"


def _told(event: Event, record: Record) -> str:
    """The call in words, with its numbers."""
    if isinstance(event, Forward):
        return f"forward {event.module}{'' if event.training else ', evaluation mode'}" + (
            "" if event.grad_enabled else ", no gradient"
        )
    if isinstance(event, LossCall):
        value = "" if event.value is None else f" = {event.value:.8g}"
        return f"{event.name}({event.input_shape}, {event.target_shape}){value}"
    if isinstance(event, Backward):
        values = ", ".join(f"{root.value:.8g}" for root in event.roots)
        return f"{event.kind} of {values or 'nothing'}, to {len(event.arrivals)} weights"
    if isinstance(event, Step):
        lrs = ", ".join(f"{lr:.6g}" for lr in event.lrs)
        return f"step of {record.optimizers[event.optimizer].kind} {event.optimizer}, rate {lrs}"
    if isinstance(event, SchedulerStep):
        return f"step of {event.scheduler}, rate {_lrs(event.before)} -> {_lrs(event.after)}"
    if isinstance(event, GradWrite):
        how = {"none": "gradients set to None", "zero": "gradients zeroed"}.get(event.how, f"gradients {event.how}")
        return f"{how} of {some(record.names(event.parameters), MOST_NAMES)}"
    if isinstance(event, ClipCall):
        norms = ", ".join(f"{total:.6g}" for total in event.totals if not math.isnan(total))
        return f"{event.by} to {event.limit:g}{f', norm {norms}' if norms else ''}"
    if isinstance(event, ScalerCall):
        return f"scaler {event.what}{'' if event.stepped is not False else ', step skipped'}"
    if isinstance(event, ModeCall):
        return f"{'train' if event.on else 'eval'}() of {event.below or 'the model'}"
    return f"{type(event).__name__} {_fields(event)}".rstrip()


def _lrs(lrs: tuple[float, ...]) -> str:
    return ", ".join(f"{lr:.6g}" for lr in lrs)


def _fields(event: Event) -> str:
    """The plain fields of an event of another kind."""
    own = [f.name for f in dataclasses.fields(event) if f.name not in ("at", "place", "site", "until")]
    values: list[tuple[str, Any]] = [(name, getattr(event, name)) for name in own]
    return ", ".join(f"{name}={value!r}" for name, value in values if isinstance(value, (str, int, float)))
