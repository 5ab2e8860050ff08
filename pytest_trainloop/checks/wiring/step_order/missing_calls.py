"""Calls of ``backward()`` and ``step()`` that a loop never makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.step_order.uncalled_steps import may_step_later
from pytest_trainloop.runs.further_runs import longer_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.events import Backward, Step
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import BackwardOutcome, GradientLedger
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class MissingBackward:
    """Steps of a run without any backward pass, gradient or changed parameter."""

    optimizers: frozenset[int]
    steps: int
    first: Step


@dataclass(frozen=True, slots=True)
class MissingStep:
    """An optimizer that never steps although backward passes bring gradients for it."""

    optimizers: frozenset[int]
    kind: str
    """The optimizer's class."""
    parameters: tuple[str, ...]
    backwards: int
    first: Backward
    onto_nonfinite: int
    """Backward passes that bring finite gradients to a residual that is not."""
    scaled: bool
    """Whether a gradient scaler scales the loss."""


def missing_backward(record: Record, ledger: GradientLedger) -> Iterator[MissingBackward]:
    """Steps without any backward pass, gradient or changed parameter."""
    touched = record.autograd_passes() or ledger.assigned or record.moved_outside_steps() or record.changed()
    if len(ledger.empty) >= 2 and len(ledger.empty) >= len(ledger.steps) and not touched and record.raised is None:
        yield MissingBackward(frozenset(s.optimizer for s in ledger.empty), len(ledger.empty), ledger.empty[0])


def missing_steps(evidence: Evidence, record: Record, ledger: GradientLedger) -> Iterator[MissingStep]:
    """Optimizers that never step although backward passes bring gradients for them again and again."""
    if record.raised is not None or any(c.what == "step" for c in record.scaler_calls()):
        return
    moved = record.moved_outside_steps() | record.changed()
    stepped = {i for o in record.optimizers if o.steps for i in o.parameters}
    for optimizer in record.optimizers:
        mine = set(optimizer.parameters) - stepped
        lost = [
            b
            for b in ledger.backwards
            if b.backward.reached and mine & set(b.backward.arrivals) and not mine & b.consumed
        ]
        if optimizer.steps or len(lost) < 2 or mine & moved or mine & ledger.assigned:
            continue
        if any(b.consumed for b in lost) and not _never_steps(evidence, optimizer.index, mine, lost):
            continue
        if record.steps and len(lost) < record.rounds // 2:
            continue
        yield MissingStep(
            optimizers=frozenset({optimizer.index}),
            kind=optimizer.kind,
            parameters=record.names(mine),
            backwards=len(lost),
            first=lost[0].backward,
            onto_nonfinite=sum(_onto_nonfinite(b, mine) for b in lost),
            scaled=any(c.what == "scale" for c in record.scaler_calls()),
        )


def _never_steps(evidence: Evidence, optimizer: int, mine: set[int], lost: Sequence[BackwardOutcome]) -> bool:
    """Whether an optimizer that trains next to others makes no step in a longer run either.

    Its gradients must be cleared each time, and the source may not hold a call of ``step()`` that was not made: the
    optimizer may wait for its turn.
    """
    if not all(mine & b.cleared for b in lost[:-1]) or may_step_later(evidence.run()):
        return False
    if not evidence.repeatable:  # what was ended from outside shows no more than a beginning
        return not evidence.run().cut_short
    later = evidence.shared(longer_run).optimizers
    return optimizer < len(later) and not later[optimizer].steps


def _onto_nonfinite(outcome: BackwardOutcome, parameters: set[int]) -> bool:
    """Whether the pass adds finite gradients of these parameters to a residual that is not finite."""
    arrived = [a for i in parameters for a in outcome.backward.arrivals.get(i, ())]
    return any(a.incoming.finite and a.residual is not None and not a.residual.finite for a in arrived)
