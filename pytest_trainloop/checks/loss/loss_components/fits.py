"""A root written as a weighted sum of the declared parts, by gradients where they have some."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.gradients.vectors import combination

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_trainloop.checks.loss.loss_components.states import Part, State
    from pytest_trainloop.recording.events import Place, Site

Key = tuple[str, "Site | None"]
"""How roots were put together, and the site of their backward passes."""

EQUAL = 1e-6
"""Weights that differ by less are the same: they come from gradients that are exact to 1e-9 of the whole, of terms that
may be a thousandth of it."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One state: the root is the sum of the parts times ``weights``, but for ``residual``, a share of its gradient."""

    weights: dict[str, float]
    """NaN where the part has no gradient at this state, so that its weight cannot be told."""
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
    found = _fitted(state, small=0)
    if found is None or found.explains(rounding):
        return found
    without = _fitted(state, small=2 * len(state.parts))
    return without if without is not None and without.explains(rounding) else found


def _fitted(state: State, small: int) -> Fit | None:
    """``small``: tensors of so many entries and fewer are left out of the equations."""
    reached = torch.zeros(len(state.gradient), dtype=torch.bool)
    sizes: dict[str, int] = {}
    outside: list[str] = []
    left_out = False
    for (name, start, numel), end in zip(state.sizes, [*[s[1] for s in state.sizes[1:]], len(reached)], strict=True):
        gradients = [p.gradient for p in state.parts.values() if p.gradient is not None]
        if numel <= small:
            left_out = left_out or bool(state.gradient[start:end].any())
        elif any(bool(g[start:end].any()) for g in gradients):
            reached[start:end] = True
        elif bool(state.gradient[start:end].any()):
            outside.append(name)
            sizes[name] = numel
    own = {name: p.gradient[reached] for name, p in state.parts.items() if p.gradient is not None}
    own = {name: g for name, g in own.items() if bool(g.any())}
    whole = state.gradient[reached]
    learned = left_out or (bool(outside) and sum(sizes.values()) <= 2 * len(state.parts))
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

    @property
    def place(self) -> Place:
        return self.states[0].place

    def of(self, rounding: float) -> Candidate:
        """Without the first batch, where the parts explain the root from the second on: a loss that is a module with a
        state of its own is not known before its first call."""
        later = [n for n, state in enumerate(self.states) if state.item > 0]
        if self._explained(range(len(self.fits)), rounding) or not self._explained(later, rounding):
            return self
        return replace(self, states=tuple(self.states[n] for n in later), fits=tuple(self.fits[n] for n in later))

    def explains(self, rounding: float) -> bool:
        return self._explained(range(len(self.fits)), rounding)

    def explains_some(self, rounding: float) -> bool:
        return any(self._explained([n], rounding) for n in range(len(self.fits)))

    def _explained(self, chosen: Sequence[int], rounding: float) -> bool:
        return bool(chosen) and all((f := self.fits[n]) is not None and f.explains(rounding) for n in chosen)

    @property
    def absent(self) -> set[str]:
        """Parts whose weight is zero at each state."""
        names = self.states[0].parts
        return {n for n in names if all(f is None or not abs(f.weights[n]) > EQUAL for f in self.fits)}


def candidates(states: Sequence[State], rounding: float) -> list[Candidate]:
    """Each line's roots one by one; summed over a batch; and all roots of a batch together."""
    found: list[Candidate] = []
    sites = dict.fromkeys(s.site for s in states)
    for site in sites:
        mine = [s for s in states if s.site == site]
        found.append(_candidate(("each", site), mine, rounding))
        if len({s.item for s in mine}) < len(mine):
            found.append(_candidate(("batch", site), _summed(mine), rounding))
    if len(sites) > 1:
        found.append(_candidate(("all", None), _summed(states), rounding))
    return [candidate.of(rounding) for candidate in found]


def _candidate(key: Key, states: Sequence[State], rounding: float) -> Candidate:
    return Candidate(key, tuple(states), tuple(fitted(s, rounding) for s in states))


def _summed(states: Iterable[State]) -> list[State]:
    """The roots of each batch added up, beside the parts as they were at the last of them."""
    merged: dict[int, State] = {}
    for state in states:
        before = merged.get(state.item)
        if before is None or len(before.gradient) != len(state.gradient):
            merged[state.item] = state
        else:
            merged[state.item] = replace(
                state, value=before.value + state.value, gradient=before.gradient + state.gradient
            )
    return list(merged.values())


def chosen(found: Sequence[Candidate], rounding: float) -> list[Candidate]:
    """The candidate that the parts explain, that with the fewest parts of weight zero, and others that have these.

    Empty where the parts explain none.
    """
    explained = (c for c in found if c.explains(rounding) and len(c.absent) < len(c.states[0].parts))
    able = sorted(explained, key=lambda c: (len(c.absent), not _common(c)))
    kept: list[Candidate] = []
    for candidate in able:
        absent = set.intersection(*(c.absent for c in kept)) if kept else set()
        if not kept or absent - candidate.absent:
            kept.append(candidate)
    return kept


def _common(candidate: Candidate) -> bool:
    return all(f is not None and agree(f.weights.values()) for f in candidate.fits)


def agree(weights: Iterable[float]) -> bool:
    """Whether weights are the same, those that cannot be told left out."""
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


def gradient_of(part: Part) -> float:
    return 0.0 if part.gradient is None else float(torch.linalg.vector_norm(part.gradient))
