"""Calls of the loop that changed: one that is gone or new, and one that comes before or after another one now."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.checks.guard.baseline.facts import Fact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.baselines.trajectory import Course, Event
    from pytest_trainloop.checks.guard.baseline.first import Kind

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
        yield from _change(name, was, now, kinds, old)


def _seen(events: tuple[Event, ...], pattern: re.Pattern[str]) -> list[tuple[str, Phase, str]]:
    """The calls of one kind: what, when, where."""
    backwards = [i for i, event in enumerate(events) if re.match(r"backward|autograd", event.what)]
    first = backwards[0] if backwards else len(events)
    return [
        (event.what, "before backward()" if i < first else "between backward() and step()", event.where)
        for i, event in enumerate(events)
        if pattern.search(event.what)
    ]


def _change(
    name: str,
    was: list[list[tuple[str, Phase, str]]],
    now: list[list[tuple[str, Phase, str]]],
    kinds: frozenset[Kind],
    old: Course,
) -> Iterator[Fact]:
    before = {(what, phase) for step in was for what, phase, _ in step}
    after = {(what, phase) for step in now for what, phase, _ in step}
    where = next((place for step in now for *_, place in step), "")
    whats, olds = {what for what, _ in after}, {what for what, _ in before}
    shown = name or next(iter(sorted(whats | olds)), "")
    counts = f"{sum(map(len, now))} calls in the first {len(now)} steps, {sum(map(len, was))} in the baseline"
    if not after:
        text = f"{shown} is no longer called between two steps"
    elif not before:
        text = f"{shown} is called between two steps, and not in the baseline"
    elif {phase for _, phase in before} != {phase for _, phase in after}:
        phase = _one({phase for _, phase in after} - {phase for _, phase in before} or {p for _, p in after})
        other = _one({phase for _, phase in before})
        text = f"{shown} is called {phase}; in the baseline {other}"
    elif not name and whats != olds:
        text = f"{_one(whats - olds or whats)} is called; in the baseline {_one(olds - whats or olds)}"
    elif [len(step) for step in was] != [len(step) for step in now]:
        text = f"{shown} is called at other steps than in the baseline"
    else:
        return
    gone = "" if after else _without_effect(whats | olds, old)
    yield Fact(
        cause="calls_differ",
        culprits=(re.sub(r"\(.*| x \d+$", "()", shown) if "(" in shown else f"{shown}()",),
        summary=text,
        measured=counts,
        kinds=kinds,
        where=where,
        unseen=gone,
    )


_LIMIT = re.compile(r"clip_grad_norm_\(([^)]+)\)")


def _without_effect(calls: set[str], old: Course) -> str:
    """Why a call of the baseline that is gone changes no recorded step; empty where it did something there, and what
    does the same now stands in its place."""
    limits = [float(found[1]) for found in map(_LIMIT.match, calls) if found]
    norms = [norm for step in old.steps for norm in step.clips]
    if limits and len(limits) == len(calls) and norms and max(norms) < min(limits):
        return f"the largest norm in the steps of the baseline is {max(norms):.4g}, and the limit {min(limits):g}"
    if all(_SCHEDULED.match(what) for what in calls):
        rates = [
            {step.rates for step in old.steps if step.optimizer == number} for number in range(len(old.optimizers))
        ]
        if all(len(seen) <= 1 for seen in rates):
            return "in the steps of the baseline the rate stays as it is"
    return ""


def _one(texts: set[str] | set[Phase]) -> str:
    return min(texts)
