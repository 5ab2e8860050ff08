"""What is left of a root's gradient when the parts are taken away, by parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_components.fits import solved

if TYPE_CHECKING:
    from pytest_trainloop.checks.loss.loss_components.fits import Candidate
    from pytest_trainloop.checks.loss.loss_components.states import State

MOST = 3
"""Parameters that are named, at most."""


@dataclass(frozen=True, slots=True)
class Unreported:
    """What the root trains on and no part names."""

    share: float
    """Of the root's gradient."""
    value: float
    root: float
    names: tuple[str, ...]
    decay: float = math.nan
    """The weight of a sum of squares of these parameters, where that is what is left."""
    outside: bool = False
    """Whether no part reaches those parameters."""
    by_value: bool = False
    """Whether the parts are numbers without a gradient."""


def unreported(candidate: Candidate) -> Unreported:
    """The declared weights are taken for the real ones: what is left then is what the loop trains on besides."""
    state, fit = candidate.states[0], candidate.fits[0]
    own = [p.gradient for p in state.parts.values() if p.gradient is not None]
    left = state.gradient - (torch.stack(own).sum(0) if own else 0)
    whole = float(torch.linalg.vector_norm(state.gradient)) or 1.0
    sizes = {name: float(torch.linalg.vector_norm(left[start:end])) for name, start, end in spans(state)}
    largest = sorted(sizes, key=lambda n: -sizes[n])
    floor = 1e-6 * whole
    named = [n for n in largest if sizes[n] > floor]
    value = state.value - sum(p.value for p in state.parts.values())
    return Unreported(
        share=min(float(torch.linalg.vector_norm(left)) / whole, 99.0),
        value=value,
        root=state.value,
        names=tuple(named[:MOST]),
        decay=_decay(state, left, named),
        outside=fit is not None and bool(fit.outside) and set(named) <= set(fit.outside),
        by_value=not own,
    )


def spans(state: State) -> list[tuple[str, int, int]]:
    ends = [*[s[1] for s in state.sizes[1:]], len(state.gradient)]
    return [(name, start, end) for (name, start, _), end in zip(state.sizes, ends, strict=True)]


def _decay(state: State, left: torch.Tensor, named: list[str]) -> float:
    """Half the factor by which what is left is the weights themselves: the weight of the sum of their squares."""
    chosen = [(start, end) for name, start, end in spans(state) if name in named]
    if not chosen:
        return math.nan
    rest = torch.cat([left[a:b] for a, b in chosen])
    weights = torch.cat([state.weights[a:b] for a, b in chosen])
    solution = solved([[w] for w in weights.tolist()], rest.tolist())
    return solution[0][0] / 2 if solution is not None and solution[1] < 1e-9 else math.nan
