"""Calls of the loop that changed: one that is gone or new, and one that comes before or after another one now."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from pytest_trainloop.checks.guard.baseline.facts import Fact
from pytest_trainloop.checks.guard.baseline.schedulers import is_flat
from pytest_trainloop.wording import count, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.baselines.trajectory import Course, Event
    from pytest_trainloop.checks.guard.baseline.first import Kind

_Text = TypeVar("_Text", bound=str)
Phase = Literal["before backward()", "between backward() and step()"]

_SCHEDULED = re.compile(r"^\w+\.step\(.*\)$")

_WATCHED: tuple[tuple[re.Pattern[str], str, frozenset[Kind]], ...] = (
    (re.compile(r"zero_grad|^zero_$|^_foreach_zero_"), "zero_grad()", frozenset({"gradient", "update"})),
    (re.compile(r"^clip_grad_norm_|^clip_grad_value_"), "", frozenset({"gradient", "update"})),
    (re.compile(r"^scaler\.unscale"), "scaler.unscale_()", frozenset({"gradient", "update"})),
    (_SCHEDULED, "", frozenset({"rate"})),
)
"""Calls between two steps that change what a step reads, by what they can change."""


def calls(old: Course, new: Course) -> Iterator[Fact]:
    """The changes, from the steps of which both courses have the calls."""
    pairs = [(a, b) for a, b in old.paired(new) if a.events is not None and b.events is not None]
    for pattern, name, kinds in _WATCHED:
        was = [_seen(a.events or (), pattern) for a, _ in pairs]
        now = [_seen(b.events or (), pattern) for _, b in pairs]
        if was == now:
            continue
        if pattern is _SCHEDULED and not new.schedulers and not {s.kind for s in old.schedulers} & set(new.idle):
            continue  # the scheduler itself is gone
        yield from _change(_Watched(pattern, name, kinds, was, now), old, new)


def _seen(events: tuple[Event, ...], pattern: re.Pattern[str]) -> list[tuple[str, Phase, str]]:
    """The calls of one kind: what, when, where."""
    backwards = [i for i, event in enumerate(events) if re.match(r"backward|autograd", event.what)]
    first = backwards[0] if backwards else len(events)
    return [
        (event.what, "before backward()" if i < first else "between backward() and step()", event.where)
        for i, event in enumerate(events)
        if pattern.search(event.what)
    ]


@dataclass(frozen=True, slots=True)
class _Watched:
    """The calls of one kind, by step."""

    pattern: re.Pattern[str]
    name: str
    kinds: frozenset[Kind]
    was: list[list[tuple[str, Phase, str]]]
    now: list[list[tuple[str, Phase, str]]]


def _change(calls: _Watched, old: Course, new: Course) -> Iterator[Fact]:
    was, now, name = calls.was, calls.now, calls.name
    before = {(what, phase) for step in was for what, phase, _ in step}
    after = {(what, phase) for step in now for what, phase, _ in step}
    where = next((place for step in now for *_, place in step), "")
    whats, olds = {what for what, _ in after}, {what for what, _ in before}
    shown = name or next(iter(sorted(whats | olds)), "")
    measured = (
        f"{count(sum(map(len, now)), 'call')} in the first {count(len(now), 'step')}, {sum(map(len, was))} in the "
        "baseline"
    )
    if not after:
        text = f"{shown} is no longer called between two steps"
        if calls.pattern is _SCHEDULED and {s.kind for s in old.schedulers} & set(new.idle):
            text = f"{shown} is no longer called: the scheduler is built, and its rate stays as it is"
    elif not before:
        text = f"{shown} is called between two steps, and not in the baseline"
    elif {phase for _, phase in before} != {phase for _, phase in after}:
        phase = _one({phase for _, phase in after} - {phase for _, phase in before} or {p for _, p in after})
        other = _one({phase for _, phase in before} - {phase for _, phase in after} or {p for _, p in before})
        here, there = _neighbours(new, calls.pattern, phase), _neighbours(old, calls.pattern, other)
        text = f"{shown} is called {here or phase}; in the baseline {there or other}"
    elif not name and whats != olds:
        text = f"{_one(whats - olds or whats)} is called; in the baseline {_one(olds - whats or olds)}"
        measured = _norms(old, new) or measured
    elif [len(step) for step in was] != [len(step) for step in now]:
        text = f"{shown} is called {_at(now)}; in the baseline {_at(was)}"
    else:
        return
    gone = "" if after else _without_effect(whats | olds, old)
    idle = not after and calls.pattern is _SCHEDULED and not new.schedulers
    yield Fact(
        cause="calls_differ",
        culprits=(re.sub(r"\(.*| x \d+$", "()", shown) if "(" in shown else f"{shown}()",),
        summary=text,
        measured=measured,
        kinds=calls.kinds,
        where=where,
        alone=idle and is_flat(old),  # the rate of the baseline moves after the recorded steps
        unseen="" if idle else gone,
    )


def _neighbours(course: Course, pattern: re.Pattern[str], phase: Phase) -> str:
    """What is called right before and right after the first such call of a step after the first one: ``after step() and
    before zero_grad()``."""
    watched = [step.events for step in course.steps if step.events is not None]
    for before, events in itertools.pairwise(watched):
        wanted = {(what, where) for what, own, where in _seen(events, pattern) if own == phase}
        places = [i for i, event in enumerate(events) if (event.what, event.where) in wanted]
        places = [i for i in places if pattern.search(events[i].what)]
        if not places:
            continue
        earlier = [*before, *events[: places[0]]]
        later = events[places[-1] + 1 :]
        sides = [f"after {_called(earlier[-1].what)}"] if earlier else []
        sides += [f"before {_called(later[0].what)}"] if later else []
        return " and ".join(sides)
    return ""


def _called(what: str) -> str:
    """An event of a step as its call is written."""
    plain = re.sub(r" x \d+$", "", what)
    if plain.startswith("forward of"):
        return f"the {plain}"
    return plain if "(" in plain or " " in plain else f"{plain}()"


def _at(steps: list[list[tuple[str, Phase, str]]]) -> str:
    """The steps before which a call is made, in words."""
    own = [str(number) for number, calls in enumerate(steps, 1) if calls]
    if len(own) == len(steps):
        return "before each step" if all(len(calls) == 1 for calls in steps) else "several times a step"
    if len(own) == 1:
        return f"only before step {own[0]}"
    if own == [str(number) for number in range(2, len(steps) + 1)]:
        return "before each step but the first"
    return f"before the steps {some(own, most=6)}"


def _norms(old: Course, new: Course) -> str:
    """The norms that a clip found in the first step of both."""
    first = [(a.clips[0], b.clips[0]) for a, b in old.paired(new) if a.clips and b.clips]
    if not first:
        return ""
    then, now = first[0]
    return f"the gradient's norm before the clip is {now:.4g} at the first clip, {then:.4g} in the baseline"


_LIMIT = re.compile(r"clip_grad_norm_\(([^)]+)\)")


def _without_effect(calls: set[str], old: Course) -> str:
    """Why a call of the baseline that is gone changes no recorded step; empty where it did something there, and what
    does the same now stands in its place."""
    limits = [float(found[1]) for found in map(_LIMIT.match, calls) if found]
    norms = [norm for step in old.steps for norm in step.clips]
    if limits and len(limits) == len(calls) and norms and max(norms) < min(limits):
        return f"the largest norm in the steps of the baseline is {max(norms):.4g}, and the limit {min(limits):g}"
    if all(_SCHEDULED.match(what) for what in calls) and is_flat(old):
        return "in the steps of the baseline the rate stays as it is"
    return ""


def _one(texts: set[_Text]) -> _Text:
    return min(texts)
