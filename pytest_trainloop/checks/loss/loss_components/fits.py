"""A root written as a weighted sum of the declared parts, by gradients where they have some; and what is left of its
gradient when the parts are taken away."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_components.causes import found
from pytest_trainloop.instruments.gradients.vectors import combination

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_trainloop.checks.loss.loss_components.states import Seen, State
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import Place, Site

Key = tuple[str, "Site | None"]
"""How roots were put together, and the site of their backward passes."""

MOST_NAMED = 3
"""Parameters that are named, at most."""

EQUAL = 1e-6
"""Weights that differ by less are the same: they come from gradients that are exact to 1e-9 of the whole, of terms that
may be a thousandth of it."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One state: the root is the sum of the parts times ``weights``, but for ``residual``, a share of its gradient."""

    weights: dict[str, float]
    """NaN where the part has no gradient at this state, so that its weight is not known."""
    residual: float
    outside: tuple[str, ...]
    """Parameters that the root trains and that none of its parts reaches."""
    learned: bool
    """Whether those are so small that they can only be weights of the parts (uncertainty weighting)."""
    dependent: bool = False
    """Whether one part is a sum of others, so that other weights would do as well."""

    def explains(self, rounding: float) -> bool:
        return self.residual <= rounding and (not self.outside or self.learned)


def fitted(state: State, rounding: float) -> Fit | None:
    """None where the parts are not independent: the gradient of one is a sum of those of others.

    Where the parts do not explain the root, a few numbers that it trains may be weights of theirs which were declared
    as numbers: all other parameters are asked alone.
    """
    fit = _fitted(state, small=0)
    if fit is None or fit.explains(rounding):
        return fit
    without = _fitted(state, small=2 * len(state.parts))
    return without if without is not None and without.explains(rounding) else fit


def _fitted(state: State, small: int) -> Fit | None:
    """``small``: tensors of so many entries and fewer are left out of the equations."""
    reached = torch.zeros(len(state.gradient), dtype=torch.bool)
    outside: list[str] = []
    left_out = False
    gradients = [p.gradient for p in state.parts.values() if p.gradient is not None]
    for name, start, end in state.spans:
        if state.numels[name] <= small:
            left_out = left_out or bool(state.gradient[start:end].any())
        elif any(bool(g[start:end].any()) for g in gradients):
            reached[start:end] = True
        elif bool(state.gradient[start:end].any()):
            outside.append(name)
    own = {name: p.gradient[reached] for name, p in state.parts.items() if p.gradient is not None}
    own = {name: g for name, g in own.items() if bool(g.any())}
    whole = state.gradient[reached]
    learned = left_out or (bool(outside) and sum(state.numels[name] for name in outside) <= 2 * len(state.parts))
    if not own or not bool(whole.any()):
        nothing = dict.fromkeys(state.parts, math.nan)  # a root without a gradient says nothing
        return Fit(nothing, 1.0 if bool(state.gradient.any()) else 0.0, tuple(outside), learned)
    total = torch.stack(list(own.values())).sum(0)
    common = float(whole @ total) / max(float(total @ total), 1e-300)
    left = float(torch.linalg.vector_norm(whole - common * total) / torch.linalg.vector_norm(whole))
    weights = dict.fromkeys(state.parts, math.nan)
    found = combination(whole, list(own.values()))
    if found is None or left <= 1e-12:
        if found is None and left > 1e-9:
            return None
        return Fit(weights | dict.fromkeys(own, common), left, tuple(outside), learned, dependent=found is None)
    return Fit(weights | dict(zip(own, found.weights, strict=True)), found.residual, tuple(outside), learned)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Roots that the parts may belong to, and how they were found."""

    key: Key
    states: tuple[State, ...]
    fits: tuple[Fit | None, ...]
    explained: tuple[bool, ...]
    """Whether the parts explain the root, at each state."""

    @property
    def place(self) -> Place:
        return self.states[0].place

    @property
    def absent(self) -> set[str]:
        """Parts whose weight is zero at each state."""
        names = self.states[0].parts
        return {n for n in names if all(f is None or not abs(f.weights[n]) > EQUAL for f in self.fits)}


def candidates(run: Seen) -> list[Candidate]:
    """Each line's roots one by one; summed over a batch; and all roots of a batch together."""
    groups: list[tuple[Key, list[State]]] = []
    sites = dict.fromkeys(s.site for s in run.states)
    for site in sites:
        mine = [s for s in run.states if s.site == site]
        groups.append((("each", site), mine))
        if len({s.item for s in mine}) < len(mine):
            groups.append((("batch", site), _summed(mine)))
    if len(sites) > 1:
        groups.append((("all", None), _summed(run.states)))
    made = []
    for key, states in groups:
        fits = [fitted(s, run.rounding) for s in states]
        explained = [f is not None and f.explains(run.rounding) for f in fits]
        # a loss that is a module with a state of its own is not known before its first call
        later = [n for n, s in enumerate(states) if s.item > 0]
        kept = later if later and all(explained[n] for n in later) else range(len(states))
        kept = range(len(states)) if all(explained) else kept
        kept_states, kept_fits = tuple(states[n] for n in kept), tuple(fits[n] for n in kept)
        made.append(Candidate(key, kept_states, kept_fits, tuple(explained[n] for n in kept)))
    return made


def _summed(states: Iterable[State]) -> list[State]:
    """The roots of each batch added up, with the parts as they were at the last of them."""
    merged: dict[int, State] = {}
    for state in states:
        before = merged.get(state.item)
        if before is not None and len(before.gradient) == len(state.gradient):
            value, gradient = before.value + state.value, before.gradient + state.gradient
            state = replace(state, value=value, gradient=gradient)
        merged[state.item] = state
    return list(merged.values())


def chosen(run: Seen) -> list[Key]:
    """Of the candidate that the parts explain, with the fewest parts of weight zero, and of others that have these.

    Empty where the parts explain none.
    """
    explained = [c for c in candidates(run) if all(c.explained) and len(c.absent) < len(c.states[0].parts)]

    def mixed(candidate: Candidate) -> bool:
        return not all(f is not None and agree(f.weights.values()) for f in candidate.fits)

    kept: list[Candidate] = []
    for candidate in sorted(explained, key=lambda c: (len(c.absent), mixed(c))):
        absent = set.intersection(*(c.absent for c in kept)) if kept else set()
        if not kept or absent - candidate.absent:
            kept.append(candidate)
    return [candidate.key for candidate in kept]


def agree(weights: Iterable[float]) -> bool:
    """Whether weights are the same, those that are not known left out."""
    known = [w for w in weights if not math.isnan(w)]
    return not known or max(known) - min(known) <= EQUAL * max(abs(w) for w in known)


def solved(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> tuple[list[float], float] | None:
    """Weights by least squares, and the share that is left; None where the columns are not independent."""
    matrix = torch.tensor(rows, dtype=torch.float64)
    goal = torch.tensor(wanted, dtype=torch.float64)
    lengths = torch.linalg.vector_norm(matrix, dim=0)
    if not bool((lengths > 0).all()) or len(matrix) <= matrix.shape[1]:
        return None
    found = combination(goal, list(matrix.T))
    return None if found is None else (list(found.weights), found.residual)


def unreported(candidate: Candidate) -> Finding:
    """What is said of a root that its parts do not explain. The declared weights are taken for the real ones: what is
    left then is what else the loop trains on."""
    state, fit, variant = candidate.states[0], candidate.fits[0], ""
    own = [p.gradient for p in state.parts.values() if p.gradient is not None]
    left = state.gradient - (torch.stack(own).sum(0) if own else 0)
    whole = float(torch.linalg.vector_norm(state.gradient)) or 1.0
    sizes = {name: float(torch.linalg.vector_norm(left[start:end])) for name, start, end in state.spans}
    named = [name for name in sorted(sizes, key=lambda n: -sizes[n]) if sizes[name] > 1e-6 * whole]
    facts: dict[str, Any] = {"root": state.value, "sum": sum(p.value for p in state.parts.values())}
    facts |= {"left": min(float(torch.linalg.vector_norm(left)) / whole, 99.0), "by_gradient": bool(own)}
    facts |= {"weights": tuple(named[:MOST_NAMED]), "most": named[0] if named else ""}
    if fit is not None and fit.outside and set(named) <= set(fit.outside):
        variant = "outside"
    chosen = [(start, end) for name, start, end in state.spans if name in named]
    if chosen:  # half the factor by which what is left is the weights is the weight of the sum of their squares
        rest, weights = (torch.cat([vector[a:b] for a, b in chosen]) for vector in (left, state.weights))
        solution = solved([[w] for w in weights.tolist()], rest.tolist())
        if solution is not None and solution[1] < 1e-9:
            facts["decay"], variant = solution[0][0] / 2, "decay"
    return found("something_unreported", candidate.place, tuple(state.parts), variant, **facts)
