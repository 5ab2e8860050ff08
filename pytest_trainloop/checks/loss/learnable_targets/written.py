"""Loss functions that write into a tensor of the batch which another term reads after them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.learnable_targets.comparisons import FirstSteps
from pytest_trainloop.recording.events import Backward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.learnable_targets.writes import Write
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Written:
    """``function`` writes into the tensor ``name`` of the batch; ``restored`` is the loss with the tensor put back."""

    function: str
    name: str
    place: Place
    loss: float
    restored: float
    repair: str


def written_by_loss(evidence: Evidence) -> Iterator[Written]:
    """One finding for each line that writes into a target which is read afterwards."""
    first = evidence.shared(FirstSteps.on)
    lines = {(w.call.place.file, w.call.place.line): w for w in reversed(first.writes.writes) if _suspected(first, w)}
    for write in lines.values():
        _, as_it_is = FirstSteps.seen(evidence, {})
        _, put_back = FirstSteps.seen(evidence, {}, restores=write.call.number)
        pair = _first_difference(as_it_is, put_back)
        if pair is not None:
            argument = write.argument
            repair = f"{argument} = {argument}.clone()" if argument.isidentifier() else ""
            yield Written(write.function, first.batch[write.leaf].of_batch, write.call.place, *pair, repair)


def _suspected(first: FirstSteps, write: Write) -> bool:
    """Whether the function computes a term of the loss, what it writes is not learned, and the tensor is read later."""
    if write.returned is None or not any(first.reaches_a_root(call) for call in write.reads):
        return False
    if any(first.origin(value).trained for value in write.call.inputs[1:]):
        return False  # it keeps results in the batch
    inside = [c for c in first.calls[write.call.number : write.returned] if c.grad]
    scalars = [v for c in inside for v in c.outputs if v.history and math.prod(v.shape) == 1]
    return any(id(v) in first.leads for v in scalars)


def _first_difference(one: Record, other: Record) -> tuple[float, float] | None:
    """The first value that is backpropagated before the first step and differs; None where none does."""
    pairs = zip(_roots(one), _roots(other), strict=False)
    return next(((a, b) for a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b))), None)


def _roots(record: Record) -> list[float]:
    steps = [s.at for s in record.innermost_steps()]
    until = min(steps, default=math.inf)
    return [root.value for b in record.of(Backward) if b.at < until for root in b.roots]
