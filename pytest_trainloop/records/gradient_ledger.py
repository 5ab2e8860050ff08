"""Which backward pass made each gradient, which optimizer step consumed it, and what was cleared unused.

A gradient that arrives is added to the residual: what stands in ``.grad`` already. An empty residual shows that the
gradients before it were cleared. A step consumes what it reads. A residual is stale if it is bit-identical to what an
earlier step left in ``.grad`` after consuming it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import Arrival, Backward, GradWrite, Read, Step, TensorSample

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pytest_trainloop.recording.record import Record


@dataclass(slots=True)
class BackwardOutcome:
    """What became of the gradients of one backward pass, by parameter index."""

    backward: Backward
    consumed: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)

    @property
    def pending(self) -> set[int]:
        """Parameters whose gradient was neither consumed nor cleared when the run ended."""
        nonzero = {i for i, found in self.backward.arrivals.items() if any(not a.incoming.zero for a in found)}
        return nonzero - self.consumed - self.cleared

    def finite(self, parameters: Collection[int] | None = None) -> bool:
        """Whether the gradients that the pass brought to these parameters, or to any, are finite."""
        arrivals = self.backward.arrivals
        return all(a.incoming.finite for i in arrivals if parameters is None or i in parameters for a in arrivals[i])


@dataclass(slots=True)
class Consumption:
    """The gradient that one optimizer step read for one parameter."""

    step: Step
    parameter: int
    stale: Step | None
    """The earlier step that had consumed a part of this gradient already."""
    fresh: bool
    """Whether a gradient arrived since that part."""
    repeated: bool = False
    """Whether no backward pass ran since the step before, and the gradient is bit-identical."""


@dataclass(slots=True)
class GradientLedger:
    """What became of every gradient of one run."""

    backwards: list[BackwardOutcome]
    steps: list[Step]
    assigned: set[int]
    """Parameters whose gradient user code assigned."""
    consumptions: list[Consumption] = field(default_factory=list)
    empty: list[Step] = field(default_factory=list)
    """Steps that found no gradient, or only zeros."""


@dataclass(slots=True)
class _InGrad:
    """What stands in one parameter's ``.grad``."""

    pending: list[BackwardOutcome] = field(default_factory=list)
    consumed_by: Step | None = None
    left: TensorSample | None = None
    stale: Step | None = None
    fresh: bool = False
    arrived: bool = False


def consuming_steps(record: Record) -> list[Step]:
    """The innermost steps that consumed gradients and were watched in full."""
    return [s for s in record.of(Step) if s.full and not s.nested and s.reads and s.consumes]


def gradient_ledger(record: Record) -> GradientLedger:
    """Follow every gradient of a run in the order of events."""
    assigned = {i for w in record.of(GradWrite) if w.assigns for i in w.parameters}
    ledger = GradientLedger([BackwardOutcome(b) for b in record.backwards()], consuming_steps(record), assigned)
    grads: dict[int, _InGrad] = defaultdict(_InGrad)
    timeline: list[tuple[int, Callable[[], None]]] = []
    for outcome in ledger.backwards:
        for index, arrivals in outcome.backward.arrivals.items():
            timeline += [(a.at, partial(_arrive, grads[index], a, index, outcome)) for a in arrivals]
    for step in ledger.steps:
        timeline += [(read.at, partial(_consume, ledger, grads, read, step)) for read in step.reads]
    for _, settle in sorted(timeline, key=itemgetter(0)):
        settle()
    return ledger


def _arrive(grad: _InGrad, arrival: Arrival, index: int, outcome: BackwardOutcome) -> None:
    grad.arrived = True
    if arrival.residual is None or arrival.residual.zero:
        for earlier in grad.pending:
            if earlier is not outcome:
                earlier.cleared.add(index)
        grad.pending = []
        grad.stale = None
    elif grad.consumed_by is not None and not grad.pending and arrival.residual.same(grad.left):
        grad.stale = grad.consumed_by
    elif not grad.pending:
        grad.stale = None
    if arrival.incoming.zero:
        return
    grad.fresh = True
    if outcome not in grad.pending:
        grad.pending.append(outcome)


def _consume(ledger: GradientLedger, grads: dict[int, _InGrad], read: Read, step: Step) -> None:
    last = read is step.reads[-1]
    for index, value in read.grads.items():
        grad = grads[index]
        if value is None or value.zero:
            for outcome in grad.pending:
                outcome.cleared.add(index)
            grad.pending, grad.stale, grad.fresh, grad.consumed_by = [], None, False, None
            continue
        for outcome in grad.pending:
            outcome.consumed.add(index)
        repeated = not grad.pending and not grad.arrived and grad.consumed_by is not None and value.same(grad.left)
        stale = grad.consumed_by if repeated else grad.stale
        ledger.consumptions.append(Consumption(step, index, stale, grad.fresh, repeated))
        grad.pending, grad.fresh, grad.stale, grad.arrived = [], False, None, False
        grad.consumed_by = step
        grad.left = step.left.get(index, value) if last else value
    if last and read.grads and all(value is None or value.zero for value in read.grads.values()):
        ledger.empty.append(step)
