"""Who consumed which backward: the accounts of gradients, kept from a record. Plain data, no torch.

Per parameter: a gradient that arrives is added to what stands in ``.grad`` (the residual). If nothing stands there,
what arrived before was wiped. A step consumes
what it reads. A residual that is bit-identical to what an earlier step left after consuming it is *stale*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import Arrival, Backward, Fact, GradWrite, Read, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record


@dataclass(slots=True)
class Account:
    """What became of one backward pass."""

    backward: Backward
    consumed: set[int] = field(default_factory=set)
    wiped: set[int] = field(default_factory=set)

    @property
    def pending(self) -> set[int]:
        """Parameters whose gradient was neither consumed nor wiped when the run ended."""
        return (
            {i for i, a in self.backward.arrivals.items() if any(not x.incoming.zero for x in a)}
            - self.consumed
            - self.wiped
        )


@dataclass(slots=True)
class Meal:
    """What one step consumed of one parameter: ``stale`` holds the earlier step whose gradient was still in it;
    ``fresh`` whether anything new was."""

    step: Step
    parameter: int
    stale: Step | None
    fresh: bool
    repeated: bool = False


@dataclass(slots=True)
class Ledger:
    """The accounts of one run."""

    accounts: list[Account]
    meals: list[Meal]
    empty: list[Step]
    steps: list[Step]
    by_hand: set[int]


@dataclass(slots=True)
class _State:
    pending: list[Account] = field(default_factory=list)
    eaten_by: Step | None = None
    left: Fact | None = None
    carries: Step | None = None
    fresh: bool = False
    arrived: bool = False


def consuming_steps(record: Record) -> list[Step]:
    """The innermost steps watched in full."""
    return [s for s in record.of(Step) if s.full and not s.nested and s.reads and s.consumes]


def keep(record: Record) -> Ledger:
    """Go through the run in order and settle every parameter's accounts."""
    accounts = [Account(b) for b in record.of(Backward) if b.kind == "backward"]
    steps = consuming_steps(record)
    by_hand = {i for w in record.of(GradWrite) if w.assigns for i in w.parameters}
    ledger = Ledger(accounts, [], [], steps, by_hand)
    states: dict[int, _State] = {}
    for _, what, account, step in _timeline(accounts, steps):
        if isinstance(what, tuple):
            index, arrival = what
            if account is not None:
                _arrive(states.setdefault(index, _State()), arrival, index, account)
        elif step is not None:
            _consume(ledger, states, what, step)
    return ledger


_Entry = tuple[int, "tuple[int, Arrival] | Read", "Account | None", "Step | None"]


def _timeline(accounts: list[Account], steps: list[Step]) -> Iterator[_Entry]:
    entries: list[_Entry] = []
    for account in accounts:
        for index, arrivals in account.backward.arrivals.items():
            entries += [(a.at, (index, a), account, None) for a in arrivals]
    for step in steps:
        entries += [(read.at, read, None, step) for read in step.reads]
    return iter(sorted(entries, key=lambda e: e[0]))


def _arrive(state: _State, arrival: Arrival, index: int, account: Account) -> None:
    state.arrived = True
    if arrival.residual is None or arrival.residual.zero:
        for earlier in state.pending:
            if earlier is not account:
                earlier.wiped.add(index)
        state.pending = []
        state.carries = None
    elif state.eaten_by is not None and not state.pending and arrival.residual.same(state.left):
        state.carries = state.eaten_by
    elif not state.pending:
        state.carries = None
    if arrival.incoming.zero:
        return
    state.fresh = True
    if account not in state.pending:
        state.pending.append(account)


def _consume(ledger: Ledger, states: dict[int, _State], read: Read, step: Step) -> None:
    consumed_any = False
    for index, grad in read.grads.items():
        state = states.setdefault(index, _State())
        if grad is None or grad.zero:
            for account in state.pending:
                account.wiped.add(index)
            state.pending, state.carries, state.fresh, state.eaten_by = [], None, False, None
            continue
        consumed_any = True
        for account in state.pending:
            account.consumed.add(index)
        repeated = not state.pending and not state.arrived and state.eaten_by is not None and grad.same(state.left)
        ledger.meals.append(Meal(step, index, state.carries if not repeated else state.eaten_by, state.fresh, repeated))
        state.pending, state.fresh, state.carries, state.arrived = [], False, None, False
        state.eaten_by = step
        state.left = step.left.get(index, grad) if read is step.reads[-1] else grad
    if not consumed_any and read.grads and read is step.reads[-1]:
        ledger.empty.append(step)
