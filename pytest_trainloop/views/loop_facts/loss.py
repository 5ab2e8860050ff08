"""The lines "loss" and "terms"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import LossCall
from pytest_trainloop.views.loop_facts.facts import none_seen
from pytest_trainloop.views.loop_facts.page import Line
from pytest_trainloop.views.loop_facts.words import marked, percent, span, two

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.views.loop_facts.facts import Facts

MOST_CALLS = 4
"""Loss functions that are shown."""


def loss(facts: Facts) -> Iterator[Line]:
    roots: dict[tuple[Place, int], list[float]] = {}
    passes = facts.record.backwards() or facts.record.autograd_passes()
    for backward in passes:
        for number, root in enumerate(backward.roots):
            roots.setdefault((backward.place, number), []).append(root.value)
    chance = chances(facts)
    calls: dict[tuple[str, Place], list[LossCall]] = {}
    for call in facts.record.of(LossCall):
        calls.setdefault((call.name, call.place), []).append(call)
    for (name, place), made in list(calls.items())[:MOST_CALLS]:
        seen = [c.value for c in made if c.value is not None]
        ignored = f", ignore {made[0].ignore_index}" if made[0].ignore_index is not None else ""
        where = facts.where(place)
        at_chance = chance.get((name, where), math.nan)
        parts = [f"{name} ({made[0].reduction}{ignored})"]
        parts.append(span(seen[0], seen[-1]) if seen else f"{list(made[0].input_shape)} values")
        if not math.isnan(at_chance):
            parts.append(f"chance {two(at_chance)}")
        yield Line(label="loss", text=", ".join(parts).replace("), ", ") ", 1), where=where)
    plain = {two(v) for made in calls.values() for c in made[:1] if (v := c.value) is not None}
    for (place, _), values in list(roots.items())[:MOST_CALLS]:
        if len(roots) == len(calls) == 1 and two(values[0]) in plain:
            continue  # the loss function's value itself
        text = f"{span(values[0], values[-1])} backpropagated"
        yield Line(label="" if calls else "loss", text=text, where=facts.where(place))
    if not calls and not roots:
        yield none_seen("loss", "nothing was backpropagated", odd=True)


def chances(facts: Facts) -> dict[tuple[str, str], float]:
    """The loss of an uninformed input, by function and line."""
    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialRuns

    runs = facts.ask(InitialRuns) if facts.evidence.repeatable else None
    if runs is None:
        return {}
    found = facts.ask(lambda _evidence: runs.losses())
    return {(one.name, facts.where(one.where)): one.chance for one in found or ()}


def terms(facts: Facts) -> Iterator[Line]:
    from pytest_trainloop.checks.loss.loss_components.weights import terms as terms_of

    if "parts" not in facts.measured.given:
        yield none_seen("terms", "give parts=")
        return
    found = facts.ask(terms_of)
    if found is None:
        yield none_seen("terms", facts.why)
        return
    for number, term in enumerate(found.weights):
        weight = "a weight that moves" if term.how == "anneals" else two(term.trained)
        odd = term.trained == 0 or term.share == 0
        text = f"{term.name} {two(term.plain)} x {weight}: {percent(term.share)} of the terms' gradients"
        label = "" if number else "terms"
        yield Line(label=label, text=marked(text, odd), where=facts.where(found.place), odd=odd)
