"""What is read off a run about the terms of what it backpropagates: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pytest_trainloop.recording.events import Site

Cut = Literal["", "end", "derivative", "number", "before"]
"""How a term lost its history: "end": it had one until it was detached as a whole; "derivative": it holds a derivative
that was taken without a graph; "number": it is a plain number; "before": what it is computed of has none."""


@dataclass(slots=True, eq=False)
class Scalar:
    """A single number with a history that the loop computed."""

    op: str
    place: str
    site: Site
    module: str
    value: float
    weights: list[float] = field(default_factory=list)
    """The gradient of each root at it, that is its weight; none where no backward pass went through it."""
    consumed: bool = False
    """Whether another single number with a history was made of it: not a total whose other parts are backpropagated by
    themselves."""
    window: int = 0
    """The roots that were backpropagated before it was made."""
    parameters: frozenset[int] = frozenset()
    """Those that it was computed of, by their number in the record; of a number that no backward pass went through."""
    data: frozenset[str] = frozenset()
    """What it was computed of that comes from the batch alone: equal for equal tensors."""
    of_weights: bool = False
    """Whether it was computed of parameters alone, as a norm that is logged."""
    of_losses: bool = False
    """Whether a loss function of torch is among what it was computed of."""
    of_used: bool = False
    """Whether it trains nothing that is not trained already: a function of one number that is backpropagated, as a
    logarithm or a copy for a log, or a sum of terms that a root is the sum of."""

    @property
    def used(self) -> bool:
        return bool(self.weights)


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a root that is added to the rest."""

    op: str
    place: str
    site: Site
    live: bool
    value: float
    """The sum of its entries."""
    cut: Cut = ""
    derivative: str = ""
    """The line that took a derivative that it holds."""
    parameters: frozenset[int] = frozenset()
    """Those that it was computed of; of a term with a history, those that get a gradient from it."""
    elsewhere: bool = False
    """Whether a term with a history gives a gradient to what is no known parameter as well."""
    stopped: tuple[tuple[str, bool, frozenset[int]], ...] = ()
    """What it was computed of that has no history: its line, whether that detached it, and the parameters below."""
    ended: frozenset[str] = frozenset()
    """The lines at which what it was computed of lost its history, of a term without one."""
    sides: tuple[frozenset[int], ...] = ()
    """Of a comparison without a history: the parameters that each side was computed of."""
    shared: bool = False
    """Whether a factor of what does train was computed of the same value without a history."""
    twin: bool = False
    """Whether the value is added in place of one that trains: x + (y - x).detach()."""


@dataclass(frozen=True, slots=True)
class DetachedDerivative:
    """A derivative that was taken without a graph and is added, entry by entry, to what has one."""

    taken: str
    added: str
    parameters: frozenset[int]


@dataclass(frozen=True, slots=True)
class TermsOfRoot:
    at: int
    """The position in the run just before the backward pass."""
    place: str
    terms: tuple[Term, ...]
    live_values: frozenset[float] = frozenset()
    detached_derivative: DetachedDerivative | None = None
    reads: frozenset[int] = frozenset()
    """Parameters that its value was computed of, with a gradient or not, but not by way of a single detached number."""
