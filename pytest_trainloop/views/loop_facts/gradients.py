"""The lines "clip", "gradient" and "units"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.instruments.records.clips import ClipFact, clip_facts
from pytest_trainloop.instruments.records.gradient_ledger import LOGGED_NORM
from pytest_trainloop.recording.events import GradWrite
from pytest_trainloop.views.loop_facts.facts import none_seen
from pytest_trainloop.views.loop_facts.page import Line
from pytest_trainloop.views.loop_facts.words import marked, names, percent, span, two

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.instruments.gradients.stopped_slope import Site
    from pytest_trainloop.views.loop_facts.facts import Facts

MOST_LAYERS = 6
"""Layers whose units are shown."""


def clip(facts: Facts) -> Iterator[Line]:
    facts_of_clips = clip_facts(facts.record)
    lines = {facts.where(fact.place) for fact in facts_of_clips}
    by_hand: dict[str, GradWrite] = {}
    for write in facts.record.of(GradWrite):
        if write.how in ("clipped", "altered") and (line := facts.where(write.place)) not in lines:
            by_hand.setdefault(line, write)
    if not facts_of_clips and not by_hand:
        yield none_seen("clip", "no gradient is clipped")
    for fact in facts_of_clips:
        yield from _clip(fact, facts)
    for line, write in by_hand.items():
        what = "clipped" if write.how == "clipped" else "changed"
        yield Line(label="clip", text=f"gradients {what} by {write.by or 'the loop itself'}", where=line)


def _clip(fact: ClipFact, facts: Facts) -> Iterator[Line]:
    where = facts.where(fact.place)
    if fact.limit >= LOGGED_NORM:
        yield Line(label="clip", text=f"{fact.by} without limit: the norm is only computed", where=where)
        return
    some, idle = fact.covers < fact.of, not fact.bites
    leaves = "" if idle or math.isnan(fact.leaves) else f", leaves {_left(fact.leaves)}"
    limit = "" if math.isnan(fact.limit) else f" {two(fact.limit)}"
    parts = ", in parts that have the limit each" if fact.in_parts else ""
    open_ = "" if not fact.uncovered > 0 else f"; {percent(fact.uncovered)} of |g|^2 not covered"
    of = f" of {fact.of}" if fact.of else ""
    covered = marked(f"{fact.covers}{of} tensors", some)
    bites = marked(f"bites in {fact.bites} of {fact.calls} calls", idle)
    yield Line(
        label="clip",
        text=f"{fact.by}{limit} over {covered}{parts}, {bites}{leaves}{open_}",
        where=where,
        odd=some or idle,
    )
    for group in fact.groups_left_out:
        which = f"group {group.group} of {group.of_groups}: " if group.of_groups > 1 else ""
        whole = "all" if group.whole else f"{group.tensors}"
        text = f"left out: {which}{whole} of {group.of_tensors} tensors ({names(group.names)}), |g| {two(group.norm)} *"
        yield Line(label="", text=text, where=where, odd=True)


def _left(part: float) -> str:
    """The part of the norm that a clip leaves; what it bites off is not rounded away."""
    return percent(part) if part < NEARLY_ALL else "over 99 %"


NEARLY_ALL = 0.995
"""Where two digits of a percentage say 100."""


def gradient(facts: Facts) -> Iterator[Line]:
    """How much of the slope of the loss is stopped on its way to the weights, and where."""
    from pytest_trainloop.instruments.gradients.stopped_slope import StoppedSlope

    found = facts.ask(StoppedSlope.of)
    if found is None:
        yield none_seen("gradient", facts.why)
        return
    if not found.share:
        yield Line(label="gradient", text="every part of the first loss backpropagates to the weights")
        return
    first, *rest = found.sites or (None,)
    text = f"{percent(found.share)} of the first loss's gradient does not reach the weights"
    if first is None or 2 * sum(site.share for site in found.sites) < found.share:
        # a rollout by the model itself, data that depend on the weights: no reader can act on it
        yield Line(label="gradient", text=f"{text}; no single line stops most of it")
        return
    text = marked(text, True)
    yield Line(label="gradient", text=f"{text}: {_site(first)}", where=facts.where(first.place), odd=True)
    for site in rest:
        yield Line(label="", text=_site(site), where=facts.where(site.place))


_STOPS = {
    "grad_off": "gradients switched off",
    "value": "a plain number (item(), .data)",
    "zero_slope": "a slope of zero",
}


def _site(site: Site) -> str:
    return f"{percent(site.share)} by {_STOPS.get(site.what, site.what)}"


def units(facts: Facts) -> Iterator[Line]:
    from pytest_trainloop.checks.learning.activations_alive.units import Units

    if "activations_alive" not in facts.results:
        yield Line(label="units", text="not looked at: activations_alive was not run", seen=False)
        return
    found = facts.ask(Units.of)
    if found is None:
        yield none_seen("units", facts.why)
        return
    if not found.layers:
        yield none_seen("units", "no layer of eight units and more behind relu, tanh or sigmoid")
    dead = sorted(found.layers, key=lambda layer: (-layer.dead / max(layer.units, 1), layer.path))
    for number, layer in enumerate(dead[:MOST_LAYERS]):
        share = layer.dead / max(layer.units, 1)
        text = f"{layer.path} {layer.kind}({layer.units}): {_share(layer.dead_at_start, layer.units, layer.dead)} dead"
        if layer.saturated or layer.saturated_at_start:
            text += f", {_share(layer.saturated_at_start, layer.units, layer.saturated)} saturated"
        odd = share > MOST_DEAD
        label = "" if number else "units"
        yield Line(label=label, text=marked(text, odd), where=facts.where(layer.place), odd=odd)


MOST_DEAD = 0.5
"""Share of dead units that no correct loop passed after 25 steps, measured on 426 layers."""


def _share(start: int, units: int, end: int) -> str:
    return span(100 * start / max(units, 1), 100 * end / max(units, 1)) + " %"
