"""The findings, in the order in which one explains the next."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_trainloop.batches.own_data import makes_own_data
from pytest_trainloop.checks.scale.distributed_equivalence import own_batches, rank_work
from pytest_trainloop.checks.scale.distributed_equivalence.comparison import Comparison
from pytest_trainloop.checks.scale.distributed_equivalence.diagnosis import Diagnosis
from pytest_trainloop.checks.scale.distributed_equivalence.drift import of_drift
from pytest_trainloop.checks.scale.distributed_equivalence.endings import dids_of, of_launch
from pytest_trainloop.checks.scale.distributed_equivalence.of_gradients import judged
from pytest_trainloop.errors import BrokenRun, CannotDecide, UserCodeError
from pytest_trainloop.finding import Finding
from pytest_trainloop.gradients.compare import (
    first_backward,
    line_of_forward,
    made_by_library,
    optimizers,
    step_place,
)
from pytest_trainloop.ranks.launch import launch
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.wording import direction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.scale.distributed_equivalence.comparison import Compared
    from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.ranks.facts import Launch
    from pytest_trainloop.runs.evidence import Evidence

RANKS = 2
"""Processes of a launch: a third would show no further fault, and cost a half more."""

STEPS = 8
"""Steps over the loop's own batches: weights may be averaged every few of them on purpose."""

APART = 7919
"""Between the seeds of two ranks."""

AT_THE_STEP = ("never_synchronised", "summed_over_ranks", "weights_drift")
"""Causes that show where the optimizer steps; the others at the backward pass."""


CALLS = {
    **dict.fromkeys(AT_THE_STEP, "optimizer.step()"),
    "norm_of_one_shard": "clip_grad_norm_()",
    "same_draws_on_every_rank": "manual_seed()",
    "same_rows_on_every_rank": "batches",
}
"""What is named where nothing of the project's own is: a call that others would find too."""


class Findings:
    """What is found of one loop with so many ranks."""

    def __init__(self, evidence: Evidence, world: int) -> None:
        self._evidence, self._world = evidence, world

    def all(self) -> Iterator[Finding]:
        """Raises ``CannotDecide`` where nothing was found and the gradients could not be compared."""
        seen = self._evidence.run()
        if seen.raised is not None:
            raise CannotDecide(f"fit raised {seen.raised.summary} in one process")
        if not seen.steps:
            raise CannotDecide("the loop makes no optimizer step in one process")
        ended = self._ended()
        if ended is not None:
            yield self._finding(ended)
            return
        undecided, found = None, None
        try:
            found = judged(self._evidence, self._world, self._dids)
        except CannotDecide as reason:
            undecided = reason
        if found is not None:
            yield self._of_comparison(*found)
        named = found is not None and found[1].level == "fault"
        apart = found is not None and found[1].cause == "never_synchronised"  # also where the knob is not read
        others = [self._finding(d) for d in self._of_own(parts=not named and not apart)]
        if named or any(f.level == "fault" for f in others):  # which says more of the same
            others = [f for f in others if f.level == "fault" or f.cause != "start_differs"]
        yield from others
        if undecided is not None and not any(f.level == "fault" for f in others):
            raise undecided

    def _ended(self) -> Diagnosis | None:
        """Why the ranks do not come to their end over the loop's own batches; advice where that is so only under
        different seeds, which the project's launcher may not give."""
        found, error = _ending(self._own)
        if error is not None:
            if _ending(self._under_one_seed) == (None, None):
                raise CannotDecide(f"{error}, and not under one seed on all ranks")
            self._require_own(error)
            raise error
        if found is not None and _ending(self._under_one_seed) == (None, None):
            return replace(
                found,
                level="advice",
                shown=f"{found.shown}; under one seed on all ranks they come to their end",
                repair="draw what all ranks must have in common from a generator of one seed, or on rank 0 and send it",
            )
        return found

    def _require_own(self, error: UserCodeError) -> None:
        """Raise ``BrokenRun`` where the ranks come back when nothing watches them."""
        if error.error.stage.startswith("fit"):
            work = rank_work.raises_by_itself(self._evidence, self._world)
            bare = launch(work, self._world, timeout=self._evidence.timeout)
            if all(rank.value is False for rank in bare):
                raise BrokenRun(f"{error} only while the ranks were watched")

    @cached_property
    def _own(self) -> Launch:
        return self._evidence.shared(over_own_batches)

    def over_own_batches(self) -> Launch:
        """What the ranks do over the loop's own batches, each under a seed of its own."""
        return self._launch(lambda rank: self._evidence.seed + rank * APART)

    @cached_property
    def _under_one_seed(self) -> Launch:
        """The same with one seed for all."""
        return self._launch(lambda _rank: self._evidence.seed)

    @cached_property
    def _dids(self) -> list[Did]:
        return dids_of(self._own)

    def _launch(self, seeds: Callable[[int], int]) -> Launch:
        work = rank_work.own_batches(self._evidence, self._world, seeds, self._batches, self._stream)
        return launch(work, self._world, timeout=self._evidence.timeout)

    @cached_property
    def _stream(self) -> Callable[[int, TrainLoop], Iterator[Any]] | None:
        """What each rank is given in place of the loop's batches, where these are the same on all by the way they are
        handed over: every Nth batch; of one example batch the rank's share, again and again. With the same rows all
        ranks would seem in step whatever they do."""
        if self._shared_out:
            return None
        if "batches" in self._evidence.offers:
            return self._every_nth
        try:
            made = Comparison.of(self._evidence, self._world, 1)
        except CannotDecide:
            return None
        return None if made is None else made.over_and_over

    @cached_property
    def _shared_out(self) -> bool:
        """Whether it is the loop that shares rows out: by its own DataLoader, or inside of ``fit``."""
        from torch.utils.data import DataLoader

        given = self._evidence.fresh_loop().batches
        return isinstance(given, DataLoader) or self._makes_own

    @cached_property
    def _makes_own(self) -> bool:
        return self._evidence.shared(makes_own_data)

    def _every_nth(self, rank: int, loop: TrainLoop) -> Iterator[Any]:
        yield from first_batches(loop, self._world * self._batches)[rank :: self._world]

    @cached_property
    def _batches(self) -> int:
        """How many are enough for ``STEPS`` steps, or two windows."""
        seen = self._evidence.run()
        window = max(1, round(seen.items / max(1, seen.rounds)))
        return max(STEPS, 2 * window) + 1

    def _of_own(self, *, parts: bool) -> Iterator[Diagnosis]:
        """What the ranks did over their own batches; ``parts``: whether weights that part are no consequence."""
        dids = self._dids
        if not self._shares_out_the_model():
            start = own_batches.starts_apart(dids)
            if start:
                yield from self._start(start, parts=parts)
            elif parts:
                yield from self._drift()
        yield from self._of_rows()
        yield from own_batches.of_files(dids)

    def _shares_out_the_model(self) -> bool:
        """Whether a rank has other weights than one process: each holds a part of the model."""
        one = {plain(p.name): p.shape for p in self._evidence.run().parameters if p.declared}
        theirs = ({plain(p.name): p.shape for p in did.require().parameters} for did in self._dids)
        return any(found.get(name) != shape for found in theirs for name, shape in one.items())

    def _dids_under_one_seed(self) -> list[Did]:
        """Raises ``CannotDecide`` where the ranks then do not come to their end."""
        if of_launch(self._under_one_seed) is not None:
            raise CannotDecide("under one seed on all ranks they do not come to their end")
        return dids_of(self._under_one_seed)

    def _start(self, names: tuple[str, ...], *, parts: bool) -> Iterator[Diagnosis]:
        """Weights that differ at the start: advice where the seeds alone make the difference, and then what parts
        under one seed."""
        once_more = self._dids_under_one_seed()
        by_seed = not set(names) & set(own_batches.starts_apart(once_more))
        yield own_batches.of_start(names, only_by_seed=by_seed)
        if by_seed and parts:
            yield from of_drift(once_more)

    def _drift(self) -> Iterator[Diagnosis]:
        """Weights that part: advice where that is so only under different seeds (noise that is added to weights)."""
        for found in of_drift(self._dids):
            if found.level == "fault" and not own_batches.ends_apart(self._dids_under_one_seed()):
                yield replace(
                    found, level="advice", shown=f"{found.shown}; under one seed on all ranks they stay alike"
                )
            else:
                yield found

    def _of_rows(self) -> Iterator[Diagnosis]:
        """Whether the ranks get the same rows, or draw the same, though they have different seeds."""
        same = own_batches.same_everywhere(self._dids)
        if not same:
            yield from own_batches.of_draws(self._dids)
        yield from self._of_samplers()
        if not self._shared_out:
            return
        alike = 0 if same or self._makes_own else own_batches.same_everywhere(self._dids_under_one_seed())
        if same or alike:
            first = first_backward(self._dids[0].require(), 0)
            yield Diagnosis(
                "same_rows_on_every_rank",
                f"all {self._world} ranks train on the same rows: {self._world} times the work of one"
                if same
                else "every rank goes over all rows, and ranks that are seeded alike get the same ones at each step",
                f"the first {same or alike} losses and their gradients are the same on all ranks, bit for bit"
                f"{'' if same else ', under one seed on all ranks'}",
                level="fault" if same else "advice",
                where=str(first.place) if first is not None else "",
            )

    def _of_samplers(self) -> Iterator[Diagnosis]:
        """Rows that the samplers leave out: advice where that is so under different seeds only."""
        for found in own_batches.of_samplers(self._dids):
            if any(True for _ in own_batches.of_samplers(self._dids_under_one_seed())):
                yield found
            else:
                shown = f"{found.shown}; under one seed on all ranks they are shared out"
                yield replace(found, level="advice", shown=shown)

    def _of_comparison(self, compared: Compared, diagnosis: Diagnosis) -> Finding:
        worst = max(compared.agreements, key=lambda a: a.difference)
        return self._finding(
            diagnosis,
            measured=f"|g_{self._world}| / |g_1| = {worst.ratio:.4g}, {direction(worst.cosine)}, {compared.precision}, "
            f"{len(compared.wrong)} of {len(compared.expected)} parameters differ",
            smallest=str(compared.by.shares),
        )

    def _finding(self, diagnosis: Diagnosis, *, measured: str = "", smallest: str = "") -> Finding:
        return Finding(
            cause=diagnosis.cause,
            level=diagnosis.level,
            summary=diagnosis.summary,
            measured=measured or f"{self._world} processes of torch.distributed, {STEPS} steps",
            shown_by=diagnosis.shown,
            culprits=diagnosis.culprits or (CALLS.get(diagnosis.cause, "loss.backward()"),),
            where=diagnosis.where or self._line(diagnosis.cause),
            smallest=smallest,
            repair=diagnosis.repair,
        )

    def _line(self, cause: str) -> str:
        """Where the loop steps or backpropagates in one process; where it calls the model, if a trainer does both."""
        record = self._evidence.run()
        optimizer = next(iter(optimizers(record)), 0)
        backward = first_backward(record, optimizer)
        if backward is None:
            return step_place(record, optimizer)
        if cause == "wrapper_bypassed" or made_by_library(backward):
            return line_of_forward(record, backward) or str(backward.place)
        return step_place(record, optimizer) if cause in AT_THE_STEP else str(backward.place)


def _ending(launched: Launch) -> tuple[Diagnosis | None, UserCodeError | None]:
    """Why the ranks did not come to their end, or what the project's code raised."""
    try:
        return of_launch(launched), None
    except UserCodeError as error:
        return None, error


def over_own_batches(evidence: Evidence) -> Launch:
    """The launch over the loop's own batches, for the check and for the loop card."""
    return Findings(evidence, RANKS).over_own_batches()
