"""Gradients that more than one step consumes. Plain data, no torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.step_order.clearing import cleared_elsewhere
from pytest_trainloop.recording.events import GradWrite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Backward, Place, Step
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import Consumption, GradientLedger

LEAST_KEPT = 3
"""Steps that must consume one assigned gradient again."""


@dataclass(frozen=True, slots=True)
class Stale:
    """Parameters of one optimizer whose steps add gradients that were consumed before."""

    optimizers: frozenset[int]
    parameters: tuple[str, ...]
    stale: int
    """Steps that consumed a stale residual."""
    steps: int
    """All steps of the optimizer."""
    first: Step
    """The first of the stale steps."""
    cleared_elsewhere: GradWrite | None
    """A ``zero_grad()`` that clears other parameters."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Parameters that are stepped again on the same gradient, with no backward pass between."""

    optimizers: frozenset[int]
    parameters: tuple[str, ...]
    kinds: tuple[str, str]
    """The classes of the optimizers of the first and of the repeated step."""
    steps: int
    first: Step


@dataclass(frozen=True, slots=True)
class Kept:
    """Parameters of one optimizer whose gradient was assigned once and consumed by many steps."""

    optimizers: frozenset[int]
    parameters: tuple[str, ...]
    steps: int
    place: Place


def stale_gradients(record: Record, ledger: GradientLedger) -> Iterator[Stale]:
    """Gradients that are consumed together with what an earlier step has consumed already."""
    stale: dict[int, dict[int, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for c in ledger.consumptions:
        if c.stale is not None and not c.repeated and _by_backward(c, ledger):
            stale[c.step.optimizer][c.parameter].append(c.step)
    for index, by_parameter in stale.items():
        again = {i: steps for i, steps in by_parameter.items() if len(steps) >= 2}
        if again:
            first = next(iter(again.values()))
            yield Stale(
                optimizers=frozenset({index}),
                parameters=record.names(again),
                stale=max(len({s.at for s in steps}) for steps in again.values()),
                steps=len([s for s in ledger.steps if s.optimizer == index]),
                first=first[0],
                cleared_elsewhere=cleared_elsewhere(record, set(again), index, before=first[-1].at),
            )


def repeated_gradients(record: Record, ledger: GradientLedger) -> Iterator[Repeated]:
    """Gradients that are consumed again with no backward pass between."""
    pairs: dict[tuple[int, int], list[Consumption]] = defaultdict(list)
    for c in ledger.consumptions:
        if c.repeated and c.stale is not None and _by_backward(c, ledger):
            pairs[c.stale.optimizer, c.step.optimizer].append(c)
    for (first, second), found in pairs.items():
        count = len({c.step.at for c in found})
        if count >= 2:
            yield Repeated(
                optimizers=frozenset({first, second}),
                parameters=record.names({c.parameter for c in found}),
                kinds=(record.optimizers[first].kind, record.optimizers[second].kind),
                steps=count,
                first=found[0].step,
            )


def _by_backward(c: Consumption, ledger: GradientLedger) -> bool:
    """Whether the gradient is judged here. User code answers for one that it assigned, and ``frozen_stays_frozen`` for
    one that is left of a parameter's training before it was frozen."""
    return c.parameter not in ledger.assigned and c.parameter not in c.step.frozen


def kept_gradients(record: Record, ledger: GradientLedger) -> Iterator[Kept]:
    """Optimizers whose steps consume one assigned gradient again and again, while the backward passes between bring
    others to other tensors, as to the weights that these are float32 masters of."""
    again: dict[int, dict[int, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for c in ledger.consumptions:
        if not c.repeated or c.stale is None or c.parameter not in ledger.assigned:
            continue
        writes = [w for w in record.of(GradWrite) if c.stale.at < w.at < c.step.at and c.parameter in w.parameters]
        if not writes and _others_arrived(record, c.stale, c.step):
            again[c.step.optimizer][c.parameter].append(c.step)
    for index, by_parameter in again.items():
        found = {i: steps for i, steps in by_parameter.items() if len(steps) >= LEAST_KEPT}
        if found:
            assigned = [w for w in record.of(GradWrite) if w.assigns and set(w.parameters) & set(found)]
            yield Kept(
                optimizers=frozenset({index}),
                parameters=record.names(found),
                steps=max(len(steps) for steps in found.values()),
                place=assigned[0].place if assigned else next(iter(found.values()))[0].place,
            )


def _others_arrived(record: Record, since: Step, until: Step) -> bool:
    """Whether the backward passes before the two steps brought different gradients."""
    before = [b for b in record.backwards() if b.at < since.at]
    between = [b for b in record.backwards() if since.at < b.at < until.at]
    return bool(before and between) and _differ(before[-1], between[-1])


def _differ(one: Backward, other: Backward) -> bool:
    return any(
        not a.incoming.same(b.incoming)
        for index, arrived in one.arrivals.items()
        for a, b in zip(arrived, other.arrivals.get(index, ()), strict=False)
    )
