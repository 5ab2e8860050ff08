"""The terms of a loss, for the loop card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_components.judged import judged
from pytest_trainloop.errors import CannotDecide

if TYPE_CHECKING:
    from pytest_trainloop.checks.loss.loss_components.judged import Weight
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Term:
    """One declared part of the loss."""

    name: str
    value: float
    """At the first step, without a weight."""
    weight: float
    """What the loop trains it at: NaN where it moves from step to step, what is declared where it cannot be told (a
    hinge that is met has no slope)."""
    share: float
    """Of the sizes of all terms' gradients, 0 to 1."""
    moves: bool
    """Whether its weight moves from step to step (annealed, learned)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """All of them, at the line that backpropagates their sum."""

    place: str
    terms: tuple[Term, ...]
    factor: float
    """What all of them are multiplied by: 1/k under accumulation."""

    @classmethod
    def of(cls, evidence: Evidence) -> Terms:
        """To be asked for by ``evidence.shared(Terms.of)``. Raises ``CannotDecide`` where ``parts=`` is not given."""
        if not {"fit", "parts"} <= evidence.offers:
            raise CannotDecide("TrainLoop.parts is not given", needs="parts=")
        found = evidence.shared(judged)
        terms = [Term(w.name, w.plain, _weight(w), w.share, w.how == "anneals") for w in found.weights]
        return cls(found.place, tuple(terms), found.factor)


def _weight(weight: Weight) -> float:
    return weight.declared if weight.how in ("untold", "constant") else weight.found
