"""The weights at which the declared parts are trained, over several states, and what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from pytest_trainloop.checks.loss.loss_components.fits import (
    EQUAL,
    Candidate,
    Key,
    agree,
    candidates,
    chosen,
    solved,
    unreported,
)
from pytest_trainloop.checks.loss.loss_components.states import Seen, Setup, seen
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.instruments.gradients.tolerances import RESEEDED
from pytest_trainloop.instruments.gradients.vectors import combination

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.loss.loss_components.states import Part, State
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

LONG = 24
"""Steps over which a part that has weight zero may begin to count (a warm-up from zero, a penalty every 16 steps)."""

_TO_CONFIRM = ("left_out", "differs", "negated", "detached", "constant")

How = Literal["agrees", "left_out", "differs", "negated", "detached", "constant", "anneals", "unknown"]


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of one part, without the common factor of all."""

    name: str
    how: How
    declared: float
    found: float
    """What the loop trains it at, in the units of the declared weight; NaN where it moves or is not known."""
    share: float
    """Of the sizes of all terms' gradients."""
    value: float
    """With the declared weight."""
    plain: float
    """Without it."""
    bare: bool = False
    """Whether no weight was declared."""

    @classmethod
    def of(cls, name: str, part: Part, how: How, at: float, share: float) -> Weight:
        """``at``: without the common factor, in units of the declared weight."""
        return cls(name, how, part.weight, at * part.weight, share, part.value, part.plain, part.bare)

    @property
    def trained(self) -> float:
        """What the loop trains it at: NaN where it moves from step to step, what is declared where it is not known (a
        hinge that is met has no slope)."""
        return self.declared if self.how in ("unknown", "constant") else self.found


@dataclass(slots=True)
class Judged:
    """The parts of one root."""

    place: str
    weights: list[Weight]
    factor: float
    """What all parts are multiplied by: 1/k under accumulation, the scale of a scaler."""
    states: int
    residual: float
    by_value: bool = False
    unreported: Finding | None = None
    """Of a root that the parts do not explain."""


def terms(evidence: Evidence) -> Judged:
    """The same for the loop card. Raises ``CannotDecide`` where ``parts=`` is not given too."""
    if not {"fit", "parts"} <= evidence.offers:
        raise CannotDecide("TrainLoop.parts is not given", needs="parts=")
    return evidence.shared(judged)


def judged(evidence: Evidence) -> Judged:
    """Raises ``CannotDecide`` where parts and roots cannot be compared."""
    first = seen(evidence, Setup())
    if not any(p.gradient is not None for s in first.states for p in s.parts.values()):
        return _by_value(evidence, first)
    runs, keys = _matched(evidence, first)
    if not keys:
        return _unmatched(evidence, runs[0])
    made = _judge_all(runs, keys)
    parts = len(made.weights)
    if any(w.how in _TO_CONFIRM for w in made.weights):
        # further states, as many as there are parts and three: weights stirred, other batches in between
        chunks = runs[0].setup.chunks
        further = [Setup(rounds=1, stir=0.3, seed=n + 2, batch=n % 2 * n, chunks=chunks) for n in range(parts + 3)]
        runs += [seen(evidence, setup) for setup in further]
        if any(w.how in ("left_out", "detached") for w in made.weights):
            base = replace(runs[0].setup, rounds=LONG)
            runs += [seen(evidence, replace(base, count=count)) for count in (LONG, 3)]  # many batches, many passes
        made = _judge_all(runs, keys)
    if any(w.how == "constant" and not w.value for w in made.weights):
        # two passes of one model differ by their dropout alone in some methods
        states = seen(evidence, Setup(plain=True)).states
        moves = {name for s in states for name, part in s.parts.items() if part.value}
        checked = [replace(w, how="unknown") if w.how == "constant" and w.name in moves else w for w in made.weights]
        made.weights = checked
    return made


def _judge_all(runs: Sequence[Seen], keys: Sequence[Key]) -> Judged:
    """The parts by the root that trains them, where several are made of some of them."""
    made = [_judge(_with_key(runs, key), runs) for key in keys]
    lacking = ("left_out", "detached", "unknown", "constant")
    for other in made[1:]:
        known = {w.name: w for w in other.weights if w.how not in lacking}
        made[0].weights = [known.get(w.name, w) if w.how in lacking else w for w in made[0].weights]
    return made[0]


def _matched(evidence: Evidence, first: Seen) -> tuple[list[Seen], list[Key]]:
    """The run in which some root is made of the parts, and which one, or which ones."""
    tries = [Setup(batch=0)]  # the loop reads ahead
    of_item = max((sum(s.item == i for s in first.states) for i in {s.item for s in first.states}), default=1)
    if of_item > 1:
        tries.append(Setup(batch=0, chunks=of_item))  # it splits each batch
    for setup in (None, *tries):
        run = first if setup is None else seen(evidence, setup)
        if keys := chosen(run):
            return [run], keys
    return [first], []


def _with_key(runs: Sequence[Seen], key: Key) -> list[Candidate]:
    """The candidate of that key in each run, where its fits explain the root."""
    found = [c for run in runs for c in candidates(run) if c.key == key and all(c.explained)]
    if len(found) < len(runs):
        raise CannotDecide("the loss is a weighted sum of its parts at some weights and batches and not at others")
    return found


def _judge(found: Sequence[Candidate], runs: Sequence[Seen]) -> Judged:
    states = [s for c in found for s in c.states]
    fits = [f for c in found for f in c.fits if f is not None]
    names = list(states[0].parts)
    fitted = {n: [f.weights[n] for f in fits] for n in names}
    if any(f.dependent for f in fits) and not agree([1.0, *(w for ws in fitted.values() for w in ws)]):
        _require_independent(states)
    common = [_factor([fitted[n][t] for n in names]) for t in range(len(fits))]
    learned = any(f.learned for f in fits)
    parts, sizes = states[0].parts, dict.fromkeys(names, 0.0)
    for name in names:
        if (gradient := parts[name].gradient) is not None and not math.isnan(fitted[name][0]):
            sizes[name] = abs(fitted[name][0]) * float(torch.linalg.vector_norm(gradient))
    whole = sum(sizes.values()) or 1.0
    weights = []
    for name in names:
        relative = [w / c if c else 0.0 for w, c in zip(fitted[name], common, strict=True)]
        weights.append(Weight.of(name, parts[name], *_how(relative, learned=learned), sizes[name] / whole))
    known = {name: [0.0 if math.isnan(w) else w for w in fitted[name]] for name in names}
    weights = _valued(weights, states, known, common, runs)
    residual = max(f.residual for f in fits)
    return Judged(str(found[0].place), weights, common[0], len(states), residual)


def _factor(weights: Sequence[float]) -> float:
    """The common factor: 1 where any part has it, else that of most parts, else of the first."""
    known = [w for w in weights if not math.isnan(w) and abs(w) > EQUAL]
    if not known or any(abs(w - 1) <= EQUAL for w in known):
        return 1.0
    return max(known, key=lambda w: (sum(abs(v - w) <= EQUAL * abs(w) for v in known), -known.index(w)))


def _how(relative: Sequence[float], *, learned: bool) -> tuple[How, float]:
    known = [w for w in relative if not math.isnan(w)]
    if not known:
        return "unknown", math.nan
    if all(abs(w) <= EQUAL for w in known):
        return "left_out", 0.0
    if not agree(known):
        return "anneals", math.nan
    if abs(known[0] - 1) <= EQUAL:
        return "agrees", 1.0
    if learned:
        return "anneals", math.nan
    return ("negated" if abs(known[0] + 1) <= EQUAL else "differs"), known[0]


def _valued(
    weights: list[Weight],
    states: Sequence[State],
    fitted: dict[str, list[float]],
    common: Sequence[float],
    runs: Sequence[Seen],
) -> list[Weight]:
    """Parts that train nothing, by the value of the root: it holds them, or it does not."""
    silent = [w for w in weights if w.how in ("left_out", "unknown")]
    if not silent:
        return weights
    rest = [
        (s.value - sum(fitted[w.name][t] * s.parts[w.name].value for w in weights if w not in silent))
        / (common[t] or 1.0)
        for t, s in enumerate(states)
    ]
    size = max(abs(s.value / (c or 1.0)) for s, c in zip(states, common, strict=True)) or 1.0
    rounding = max(run.rounding for run in runs)
    moving = [w for w in silent if _moves([s.parts[w.name] for s in states])]
    steady = [w for w in silent if w not in moving]
    out = {w.name: w for w in weights}
    for part in steady:
        cut_off = bool(part.value) and states[0].parts[part.name].gradient is None
        zero = not part.value and bool(part.declared)
        how: How = "constant" if cut_off or zero else "unknown"
        out[part.name] = replace(part, how=how)
    if moving:
        rows = [[s.parts[w.name].value for w in moving] + [1.0] for s in states]
        held = solved(rows, rest) if max(map(abs, rest)) > rounding * size else ([0.0] * len(moving), 0.0)
        for number, part in enumerate(moving):
            in_value = held is not None and held[1] <= 100 * rounding and abs(held[0][number] - 1) <= 1e-4
            unclear = held is None or held[1] > 100 * rounding
            if part.how == "unknown" and states[0].parts[part.name].gradient is not None:
                continue  # it has a history, and no slope at these states: a hinge that is met
            how = "detached" if in_value else "unknown" if unclear and part.how == "unknown" else "left_out"
            out[part.name] = replace(part, how=how, found=0.0)
    return [out[w.name] for w in weights]


def _moves(parts: Sequence[Part]) -> bool:
    values = [p.value for p in parts]
    return max(values) - min(values) > 1e-9 * max(map(abs, values))


def _by_value(evidence: Evidence, first: Seen) -> Judged:
    """Parts that are numbers only: the values of root and parts at several weights and batches."""
    roots = _value_states(first)
    parts = roots[0].parts
    whole = sum(abs(p.value) for p in parts.values()) or 1.0

    def made(how: dict[str, tuple[How, float]], factor: float, residual: float, states: int) -> Judged:
        weights = [Weight.of(n, p, *how[n], abs(p.value) / whole) for n, p in parts.items()]
        return Judged(str(roots[0].place), weights, factor, states, residual, by_value=True)

    ratios = [s.value / t if (t := sum(p.value for p in s.parts.values())) else math.nan for s in roots]
    if agree(ratios) and len(roots) > 1 and not math.isnan(ratios[0]) and ratios[0]:
        return made(dict.fromkeys(parts, ("agrees", 1.0)), ratios[0], 0.0, len(roots))
    setups = [Setup(rounds=2, stir=0.3, seed=n + 2, batch=n % 2 * n) for n in range(len(parts) + 4)]
    runs = [_value_states(seen(evidence, setup)) for setup in setups]
    fitted: list[list[float]] = []
    residual = 0.0
    for at in list(zip(*runs, strict=False))[:2]:
        solution = solved([[s.parts[n].value for n in parts] for s in at], [s.value for s in at])
        if solution is None:
            raise CannotDecide(
                f"the parts {', '.join(parts)} are numbers that do not vary on their own: which has which weight "
                "cannot be known; return tensors with their history"
            )
        fitted.append(solution[0])
        residual = max(residual, solution[1])
    if residual > 1e-8:
        raise CannotDecide(
            "the parts are numbers without a history, and no constant weights of them give the loss: return tensors, "
            "so that weights that move can be distinguished from what is missing"
        )
    common = [_factor(weights) for weights in fitted]
    relative = [[w / c for w in weights] for weights, c in zip(fitted, common, strict=True)]
    how = {n: _how(of_part, learned=False) for n, of_part in zip(parts, zip(*relative, strict=True), strict=True)}
    return made(how, common[0], residual, len(runs) * len(fitted))


def _value_states(run: Seen) -> list[State]:
    sites = dict.fromkeys(s.site for s in run.states)
    items = [s.item for s in run.states]
    if len(sites) > 1 or len(set(items)) < len(items):
        raise CannotDecide(
            "the parts are numbers without a history, and the loop backpropagates several losses on a batch: return "
            "tensors, so that each can be compared with them"
        )
    return run.states


def _unmatched(evidence: Evidence, run: Seen) -> Judged:
    """No root is a weighted sum of the parts. It is a fault only where nothing else explains it."""
    states = run.states
    if any(any(c.explained) for c in candidates(run)):
        raise CannotDecide(
            "the parts add up to the loss at some batches and not at others: they depend on what the loop carries from "
            "batch to batch, or a term begins later"
        )
    _require_independent(states)
    sites = list(dict.fromkeys(s.site for s in states))
    if len(sites) > 1:
        lines = ", ".join(dict.fromkeys(f"line {s.place.line}" for s in states))
        raise CannotDecide(
            f"the loop backpropagates several losses ({lines}) and none is made of the parts: give those of one",
            needs="parts=",
        )
    if evidence.shared(makes_own_data):
        raise CannotDecide(
            "fit makes its own data, so that parts(model, batch) is asked about another batch: hand the data over",
            needs="batches=",
        )
    if any(s.draws != s.parts_draw for s in states):
        raise CannotDecide(
            "parts draws other random numbers than the loop: give the model's own function that makes the loss"
        )
    by_item = [s.item for s in states]
    if len(set(by_item)) < len(by_item) or run.items > len(states) + 1:
        raise CannotDecide(
            "fit backpropagates parts of a batch, or several batches together, and parts is asked about one batch: "
            "give what fit splits as batches=, or split_batch=",
            needs="split_batch=",
        )
    again = seen(evidence, Setup(batch=0, fit_seed=evidence.plan().seed + RESEEDED))
    same = seen(evidence, Setup(batch=0))
    if abs(again.states[0].value - same.states[0].value) > same.rounding * abs(same.states[0].value):
        raise CannotDecide("the loop draws random numbers outside of torch, and parts may draw others")
    if not same.double:
        raise CannotDecide("the loop computes in low precision, so that its loss is no exact sum of its parts")
    candidate = candidates(same)[0]
    return Judged(
        str(candidate.place),
        [Weight.of(name, part, "unknown", math.nan, 0.0) for name, part in candidate.states[0].parts.items()],
        1.0,
        len(candidate.states),
        math.nan,
        unreported=unreported(candidate),
    )


def _require_independent(states: Sequence[State]) -> None:
    """Raise ``CannotDecide`` where one part is a sum of others: the total is among them."""
    parts = states[0].parts
    own = {n: p.gradient for n, p in parts.items() if p.gradient is not None and bool(p.gradient.any())}
    sums: dict[str, dict[str, float]] = {}
    for name, gradient in own.items():
        others = {n: g for n, g in own.items() if n != name}
        found = combination(gradient, list(others.values())) if others else None
        if found is not None and found.residual < 1e-9:
            weights = dict(zip(others, found.weights, strict=True))
            sums[name] = {n: w for n, w in weights.items() if abs(w) > EQUAL}
    if sums:
        name = max(sums, key=lambda n: (min(sums[n].values()) > 0, len(sums[n])))
        raise CannotDecide(
            f"{name} of parts= is itself a sum of {' and '.join(sums[name])}: give each term once, and no total",
            needs="parts=",
        )
