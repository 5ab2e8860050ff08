"""Backward passes whose forward pass lies before an optimizer step. Plain data, no torch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Step
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import BackwardOutcome, GradientLedger


@dataclass(frozen=True, slots=True)
class LateBackwards:
    """Backward passes of one optimizer's parameters that come after a step made since their forward pass."""

    optimizers: frozenset[int]
    parameters: tuple[str, ...]
    late: int
    backwards: int
    """All backward passes that the optimizer consumed."""
    step: Step
    """The step between the forward pass and the first late backward pass."""


@dataclass(frozen=True, slots=True)
class RefusedBackward:
    """A backward pass that torch refused, since a step had changed the weights that it needs."""

    optimizers: frozenset[int]
    parameters: tuple[str, ...]
    steps: int
    """Optimizer steps between the forward pass and the refused one."""
    step: Step
    """The first of them."""
    raised: str


def late_backwards(record: Record, ledger: GradientLedger) -> Iterator[LateBackwards]:
    """Backward passes whose forward pass lies before the last step on the same parameters."""
    late: dict[int, list[BackwardOutcome]] = defaultdict(list)
    every: Counter[int] = Counter()
    held = record.held
    for outcome in ledger.backwards:
        consumed = outcome.consumed
        every.update({o for i in consumed for o in held.get(i, ())})
        behind = {i for i in consumed if any(a.steps_since_forward > 0 for a in outcome.backward.arrivals[i])}
        if behind and 2 * len(behind) >= len(consumed):
            for o in {o for i in behind for o in held.get(i, ())}:
                late[o].append(outcome)
    for index, found in late.items():
        steps = [s for s in ledger.steps if s.optimizer == index and not s.in_backward]
        if len(found) >= 2 and 2 * len(found) >= every[index] and steps:
            yield LateBackwards(
                optimizers=frozenset({index}),
                parameters=record.names({i for b in found for i in b.consumed}),
                late=len(found),
                backwards=every[index],
                step=next((s for s in reversed(steps) if s.at < found[0].backward.at), steps[0]),
            )


def refused_backward(record: Record) -> Iterator[RefusedBackward]:
    """The last backward pass, where torch refused it because a step had changed the weights that it needs."""
    raised, backwards = record.raised, record.backwards()
    if raised is None or "modified by an inplace operation" not in raised.message or not backwards:
        return
    refused = backwards[-1]
    forwards = [f.at for f in record.root_forwards() if f.at < refused.at]
    steps = [s for s in record.innermost_steps() if s.at < refused.at]
    between = [s for s in steps if s.at > max(forwards, default=0)]
    if not between and refused.item == 1:  # nothing is left of an earlier batch: one of these forward passes was before
        changed = _shape_in(raised.message)
        between = [s for s in steps if s.at > min(forwards, default=s.at) and _holds(record, s, changed)]
    if between:
        yield RefusedBackward(
            optimizers=frozenset(s.optimizer for s in between),
            parameters=record.names(record.optimizers[between[0].optimizer].parameters),
            steps=len(between),
            step=between[0],
            raised=raised.summary,
        )


def _shape_in(message: str) -> list[int]:
    """The sizes of the tensor that torch found changed, in order of size: it may have saved a transposed view."""
    found = re.search(r"\[torch\.\w+ \[([\d, ]*)\]\]", message)
    return sorted(int(n) for n in found[1].split(",") if n.strip()) if found else []


def _holds(record: Record, step: Step, sizes: list[int]) -> bool:
    """Whether the step changes a parameter of these sizes."""
    return any(sorted(record.parameters[i].shape) == sizes for i in record.optimizers[step.optimizer].parameters)
