"""The line "one step": the calls that lead from one optimizer step to the next, and how often they are the same.

A window is what lies between two steps, or of several optimizers that alternate (a discriminator's five steps for one
of the generator) what lies between two rounds.
"""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import (
    Backward,
    Event,
    Forward,
    GradWrite,
    ScalerCall,
    SchedulerStep,
    Step,
)
from pytest_trainloop.views.loop_facts.facts import none_seen
from pytest_trainloop.views.loop_facts.page import Line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.views.loop_facts.facts import Facts

MOST_ROUND = 12
"""Steps of a round of several optimizers, at most."""

_BEHIND = ("schedule", "update")
"""Calls that belong to the step before them."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a window, or several of the same line in a row."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a run by what they are made of, the commonest first, each with how many there are."""

    kinds: tuple[tuple[tuple[Call, ...], int], ...]

    @classmethod
    def of(cls, facts: Facts) -> Windows:
        calls = _without_first_zeros(list(_calls(facts)))
        windows = list(_windows(calls))
        if len(windows) > 1 and _names(windows[-1]) == _names(windows[-2])[: len(windows[-1])]:
            windows[-1] = windows[-2]  # what was watched in full ended in it
        as_made = {_names(window): window for window in reversed(windows)}
        return cls(tuple((as_made[names], often) for names, often in Counter(map(_names, windows)).most_common()))

    @property
    def same(self) -> str:
        """How often the commonest is made, in words."""
        most, often = self.kinds[0]
        several = sum(c.name.startswith("step") for c in most) > 1
        return f"the same in {often} of {self.windows} {'rounds' if several else 'steps'}"

    @property
    def windows(self) -> int:
        return sum(often for _, often in self.kinds)


def one_step(facts: Facts) -> Iterator[Line]:
    windows = Windows.of(facts)
    if not windows.kinds:
        yield none_seen("one step", "no optimizer stepped", odd=True)
        return
    most = windows.kinds[0][0]
    last = next((c for c in reversed(most) if c.name.startswith("step")), most[-1])
    where = facts.where(last.place)
    file = where.rpartition(":")[0]
    written = " ".join(_texts(most, facts, file))
    yield Line(label="one step", text=f"{written}   {windows.same}", where=where)
    for other, times in windows.kinds[1:3]:
        text = f"{times} of {windows.windows}: {_difference(most, other, facts, file)}"
        yield Line(label="", text=text, where=where)


def first_calls(facts: Facts) -> list[Call]:
    """The calls of a run that no optimizer steps in, each line in a row once."""
    return [call for call, _ in itertools.groupby(call for _, call in _calls(facts))]


def _calls(facts: Facts) -> Iterator[tuple[Event, Call]]:
    """The calls of the part of the run that was watched in full."""
    record = facts.record
    models = {f.module for f in record.root_forwards() if f.grad_enabled}
    for event in sorted(_in_full(record), key=_moment):
        if name := _name(event, facts, several=len(models) > 1):
            yield event, Call(name, event.place)


def _without_first_zeros(calls: list[tuple[Event, Call]]) -> list[tuple[Event, Call]]:
    """The calls without the zeros of lines that run once, before the first forward pass: they belong to no window."""
    often = Counter(call for _, call in calls)
    first = next((n for n, (_, call) in enumerate(calls) if call.name != "zero"), 0)
    return [(event, call) for event, call in calls[:first] if often[call] > 1] + calls[first:]


def _in_full(record: Record) -> list[Event]:
    return [e for e in record.events if not record.full_until or e.at <= record.full_until]


def _moment(event: Event) -> int:
    """When an event counts: a step, whose closure may hold all the others, when it reads its gradients."""
    return event.reads[-1].at if isinstance(event, Step) and event.reads else event.at


def _names(window: Sequence[Call]) -> tuple[str, ...]:
    return tuple(call.name for call in window)


def _name(event: Event, facts: Facts, *, several: bool) -> str:
    if isinstance(event, Forward):
        return (
            "" if event.in_backward or not event.grad_enabled else f"forward {event.module}" if several else "forward"
        )
    if isinstance(event, Backward):
        return event.kind
    if isinstance(event, GradWrite):
        return {"none": "zero", "zero": "zero", "clipped": "clip"}.get(event.how, "write")
    if isinstance(event, ScalerCall):
        return "" if event.what == "step" else event.what
    if isinstance(event, SchedulerStep):
        return "schedule"
    if isinstance(event, Step) and not event.nested:
        return f"step {facts.optimizer(event.optimizer)}".strip()
    return ""


def _windows(calls: Sequence[tuple[Event, Call]]) -> Iterator[tuple[Call, ...]]:
    steps = [e for e, _ in calls if isinstance(e, Step)]
    size = _round([s.optimizer for s in steps])
    if not size:
        return
    behind = _BEHIND if calls and calls[0][1].name == "zero" else (*_BEHIND, "zero")
    window: list[Call] = []
    made = 0
    for event, call in calls:
        if made == size and call.name not in behind:
            yield tuple(window)
            window, made = [], 0
        if not (window and window[-1] == call and call.name in ("zero", "clip", "write", "unscale")):
            window.append(call)
        made += isinstance(event, Step)
    if made == size:
        yield tuple(window)


def _round(optimizers: Sequence[int]) -> int:
    """The steps after which the order of the optimizers repeats."""
    if not optimizers:
        return 0
    for size in range(1, MOST_ROUND + 1):
        if all(a == b for a, b in zip(optimizers, optimizers[size:], strict=False)) and size * 2 <= len(optimizers):
            return size
    return 1


def _texts(window: Sequence[Call], facts: Facts, file: str) -> Iterator[str]:
    """The calls with their lines; a block of calls that follows itself once, with the number of times."""
    for calls, times in blocks(window):
        block = " ".join(f"{c.name}({facts.line_in(file, c.place)})" for c in calls)
        yield block if times == 1 else f"{times} x [{block}]"


def blocks(window: Sequence[Call]) -> Iterator[tuple[Sequence[Call], int]]:
    """The calls in order, in blocks that follow themselves so many times."""
    at = 0
    while at < len(window):
        size, times = _repeated(window, at)
        yield window[at : at + size], times
        at += size * times


def _repeated(window: Sequence[Call], at: int) -> tuple[int, int]:
    """The size of the block that begins here and follows itself most often, and how often it comes."""
    best = 1, 1
    for size in range(1, min(12, (len(window) - at) // 2) + 1):
        block, times = window[at : at + size], 1
        while window[at + size * times : at + size * (times + 1)] == block:
            times += 1
        if times > 1 and size * times > best[0] * best[1]:
            best = size, times
    return best


def _difference(most: Sequence[Call], other: Sequence[Call], facts: Facts, file: str) -> str:
    """How a window differs from the common one."""
    parts = []
    for what, a, b, c, d in difflib.SequenceMatcher(None, _names(most), _names(other), autojunk=False).get_opcodes():
        if what in ("delete", "replace"):
            parts.append(f"without {' '.join(_texts(most[a:b], facts, file))}")
        if what in ("insert", "replace"):
            parts.append(f"with {' '.join(_texts(other[c:d], facts, file))}")
    return "; ".join(parts)


def batches_a_step(record: Record) -> int:
    """How many batches the loop takes from one step of an optimizer to its next, most often; 0 where it has taken all
    of them before."""
    found: Counter[int] = Counter()
    last: dict[int, int] = {}
    taken = 0
    for event in sorted(_in_full(record), key=_moment):
        if isinstance(event, Backward):
            taken = event.item
        elif isinstance(event, Step) and not event.nested:
            if event.optimizer in last:
                found[taken - last[event.optimizer]] += 1
            last[event.optimizer] = taken
    return found.most_common(1)[0][0] if found else taken


def backwards_a_step(record: Record) -> Counter[int]:
    """How many steps came after how many backward passes through their weights, since the last step of the same
    optimizer or the last zeroing."""
    found: Counter[int] = Counter()
    since: Counter[int] = Counter()
    for event in sorted(_in_full(record), key=_moment):
        if isinstance(event, Backward) and event.kind == "backward":
            for index in range(len(record.optimizers)):
                held = record.optimizers[index].parameters
                since[index] += any(i in event.arrivals for i in held)
        elif isinstance(event, GradWrite) and event.how in ("none", "zero"):
            for index in [i for i in since if set(record.optimizers[i].parameters) <= set(event.parameters)]:
                since[index] = 0
        elif isinstance(event, Step) and not event.nested:
            found[since[event.optimizer]] += 1
            since[event.optimizer] = 0
    return found
