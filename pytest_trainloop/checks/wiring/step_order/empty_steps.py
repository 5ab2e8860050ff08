"""Steps that find no gradient although backward passes made some. Plain data, no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.step_order.clearing import cleared_after
from pytest_trainloop.recording.events import GradWrite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Backward, Step
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import GradientLedger


@dataclass(frozen=True, slots=True)
class EmptySteps:
    """Steps of one optimizer that consumed nothing, and the backward passes whose gradients were cleared unused."""

    optimizers: frozenset[int]
    parameters: tuple[str, ...]
    """Those whose gradients were cleared."""
    empty: int
    """Steps without a gradient."""
    steps: int
    """All steps of the optimizer."""
    cleared: int
    """Backward passes whose gradients were cleared unused."""
    first_step: Step
    backward: Backward
    """The first of the cleared passes."""
    clearing: GradWrite | None
    """The write that cleared it, where one was seen."""
    zeros_read_at: Step | None
    """The step that read zeros after that pass, before any write cleared the gradients."""
    overwritten: GradWrite | None
    """The last write to the gradients between the pass and that step."""


def empty_steps(record: Record, ledger: GradientLedger) -> Iterator[EmptySteps]:
    """Optimizers most of whose steps consume nothing, although backward passes brought gradients for them."""
    empty, every = Counter(s.optimizer for s in ledger.empty), Counter(s.optimizer for s in ledger.steps)
    for index, count in empty.items():
        mine = set(record.optimizers[index].parameters)
        lost = [b for b in ledger.backwards if mine & b.cleared and not mine & b.consumed]
        lost = [b for b in lost if b.finite(mine)]  # a gradient that is not finite may be dropped on purpose
        if count < 2 or 2 * count < every[index] or len(lost) < 2 or mine & ledger.assigned:
            continue
        backward = lost[0].backward
        clearing = cleared_after(record, backward, mine)
        until = clearing.at if clearing else float("inf")
        zeros = next((s for s in ledger.empty if s.optimizer == index and backward.until < s.at < until), None)
        end = zeros.at if zeros else 0
        writes = [w for w in record.of(GradWrite) if backward.at < w.at < end and mine & set(w.parameters)]
        yield EmptySteps(
            optimizers=frozenset({index}),
            parameters=record.names(set().union(*(mine & b.cleared for b in lost))),
            empty=count,
            steps=every[index],
            cleared=len(lost),
            first_step=next(s for s in ledger.steps if s.optimizer == index),
            backward=backward,
            clearing=clearing,
            zeros_read_at=zeros,
            overwritten=writes[-1] if writes else None,
        )
