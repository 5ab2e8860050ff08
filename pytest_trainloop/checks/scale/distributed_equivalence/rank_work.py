"""What one rank does: one run of the loop with the knob ``ranks`` at their number, as plain data for the parent."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.scale.distributed_equivalence.ledger import Ledger, Seen, Wrappers
from pytest_trainloop.checks.scale.distributed_equivalence.shards import local_part_of
from pytest_trainloop.compositions.step_runs import StepRuns, Variation
from pytest_trainloop.errors import BrokenRun, CannotDecide, TimeRanOut, UsageError, UserCodeError
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.recording.shards import local
from pytest_trainloop.runs import own_exceptions
from pytest_trainloop.runs.run import run
from pytest_trainloop.runs.same_start import state_of
from pytest_trainloop.whose import of_the_project

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan

_REFUSALS = (CannotDecide, UsageError, UserCodeError, TimeRanOut, BrokenRun)

PEER_IS_GONE = re.compile(r"gloo.*(Connection (closed|reset)|Broken pipe|Read error|Write error)", re.DOTALL)
"""What gloo says in a rank that waits when another one has gone."""


@dataclass(slots=True)
class Did:
    """What one rank did in one run."""

    record: Record | None = None
    seen: Seen = field(default_factory=Seen)
    refused: tuple[str, Any] | None = None
    """The exception of this package that ended it: its class, and its arguments."""

    def require(self) -> Record:
        """The record. Raises what ended the run in the rank."""
        if self.refused is not None:
            kind, given = self.refused
            raise next(known for known in _REFUSALS if known.__name__ == kind)(*given)
        if self.record is None:
            raise CannotDecide("a rank gave no record")
        return self.record


def own_batches(
    evidence: Evidence,
    ranks: int,
    seeds: Callable[[int], int],
    batches: int,
    stream: Callable[[int, TrainLoop], Iterator[Any]] | None = None,
) -> Callable[[int], Did]:
    """The work of a rank over the loop's own batches, or over what ``stream`` gives it, in the loop's own precision,
    under the seed that ``seeds`` gives it."""
    plan = with_ranks(evidence, evidence.plan(), ranks)

    def work(rank: int) -> Did:
        wrappers = Wrappers()
        did = Did(seen=Seen(wrapped=wrappers.wrapped))
        made = replace(
            plan,
            seed=seeds(rank),
            count=min(plan.count, batches),
            read_ahead=None,
            stream=None if stream is None else lambda loop: stream(rank, loop),
            enough=lambda _record: False,  # what ends one rank must end all: the batches
            around=wrappers.watching,
            contexts=lambda watch: (Ledger(watch, did.seen),),
            kept=None,
            further=True,
        )
        return _kept(did, lambda: run(evidence.make, made))

    return work


def raises_by_itself(evidence: Evidence, ranks: int) -> Callable[[int], bool]:
    """Whether ``fit`` raises in a rank where nothing watches it as well."""
    plan = replace(with_ranks(evidence, evidence.plan(), ranks), read_ahead=None, kept=None)
    return lambda _rank: own_exceptions.is_own(evidence.make, plan)


def shares(
    evidence: Evidence,
    runs: StepRuns,
    ranks: int,
    items: Callable[[int], Sequence[Any]],
    *,
    knobs: tuple[tuple[str, Any], ...] = (),
    rows: Callable[[int], tuple[tuple[int, ...], ...]] = lambda rank: (),
) -> Callable[[int], Did]:
    """The work of a rank over the items that are given for it, in float64, from the weights of ``runs``."""
    start = GivenStart(runs.start)
    plans = runs.elsewhere(lambda chosen: _endless(with_ranks(evidence, evidence.plan(**chosen), ranks)), start)

    def work(rank: int) -> Did:
        did = Did()
        did.seen.strange = start.strange
        varied = Variation(knobs=knobs, rows=rows(rank), contexts=(lambda watch: (Ledger(watch, did.seen),),))
        return _kept(did, lambda: plans.made("share", lambda: items(rank), varied))

    return work


def with_ranks(evidence: Evidence, plan: RunPlan, ranks: int) -> RunPlan:
    return replace(plan, knobs={**plan.knobs, evidence.knobs["ranks"]: ranks})


def _endless(plan: RunPlan) -> RunPlan:
    """Ended by its batches alone: a rank that ended after a step of its own would leave the others waiting."""
    return replace(plan, enough=lambda _record: False)


def _kept(did: Did, make: Callable[[], Record]) -> Did:
    try:
        did.record = make()
        if did.record.raised is not None and PEER_IS_GONE.search(did.record.raised.summary):
            gone = ConnectionError(did.record.raised.summary)
            raise of_the_project(gone)  # for the launch, which knows who waited for whom
    except TimeRanOut as refusal:
        did.refused = TimeRanOut.__name__, (refusal.steps, refusal.seconds, " of a rank")
    except UserCodeError as refusal:
        did.refused = UserCodeError.__name__, (refusal.error,)
    except _REFUSALS as refusal:
        did.refused = next(known.__name__ for known in _REFUSALS if isinstance(refusal, known)), refusal.args
    return did


class GivenStart:
    """A ``RunPlan.prepare`` that gives a rank's model the weights and buffers of one process.

    ``strange`` names those that are only on one side, or of another shape: the ranks share out the model itself.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {plain(name): tensor for name, tensor in tensors.items()}
        self.strange: list[str] = []

    def __call__(self, watch: Watch) -> None:
        state = {plain(name): tensor for name, tensor in state_of(watch)}
        self.strange += sorted(state.keys() ^ self._tensors.keys())
        for name, tensor in state.items():
            first = self._tensors.get(name)
            if first is None:
                continue
            if first.shape != tensor.shape:
                self.strange.append(name)
                continue
            with torch.no_grad():
                local(tensor).copy_(local_part_of(first, tensor))
