"""N ranks over their shares of the rows of the example batch, and one process over all of them.

In float64 both must give the same gradients, but for rounding. Here are the runs and what is read of them; what a
difference means is said in ``gradients``.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.checks.scale.distributed_equivalence.rank_runs import over_shares, results_of
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.compositions.step_gradients import StepGradients
from pytest_trainloop.instruments.compositions.step_runs import StepRuns, bound, precision, separable
from pytest_trainloop.instruments.gradients.compare import agreement, first_step_difference, optimizers
from pytest_trainloop.instruments.gradients.tolerances import RESEEDED
from pytest_trainloop.instruments.gradients.vectors import combination, consumed, ends, steps_of, values, vectors
from pytest_trainloop.recording.events import ClipCall, Step
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.runs.ranks.launch import launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_trainloop.checks.scale.distributed_equivalence.rank_runs import RankResult, Shard
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.instruments.gradients.compare import Agreement
    from pytest_trainloop.instruments.gradients.vectors import Gradient
    from pytest_trainloop.recording.events import TensorSample
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.ranks.facts import Launch

Weights = tuple["tuple[float, ...] | None", "tuple[tuple[float, ...], ...]", "tuple[float, ...]"]
"""Gradients as weighted sums of the shares' own gradients, a share being one micro-batch of one rank: the weights in
one process (None where its gradient is no such sum), those in what each rank's step reads, and the lengths of the
shares' own gradients."""

Layout = Literal["share", "whole", "chunk", "stride"]
"""What each rank is given: its share; all rows; or as many rows as all, of which those that a loop takes which cuts
its batches by itself are the rank's share: its chunk, or every Nth row."""


class Comparison:
    """One cut of the rows, and the runs over it: one launch of the ranks, and those of one process.

    ``parts`` has the rows of each micro-batch of each rank, all of rank 0 first.
    """

    def __init__(
        self, evidence: Evidence, parts: tuple[Composition, ...], world: int, layout: Layout = "share"
    ) -> None:
        self._evidence, self._gradients = evidence, evidence.shared(StepGradients.of)
        self.parts, self.world, self._layout = parts, world, layout
        self.window = len(parts) // world
        self._layouts: dict[Layout, Comparison] = {}

    @classmethod
    def of(cls, evidence: Evidence, world: int, window: int) -> Comparison | None:
        """With windows of so many micro-batches; None where there are too few rows. Raises ``CannotDecide`` where
        no rows can be taken from the batch."""
        order = evidence.shared(StepGradients.of).cut.valid.order
        if len(order) < world * window:
            return None
        return cls(evidence, Composition.evenly(order, world * window).split(), world)

    def laid_out(self, layout: Layout) -> Comparison:
        """The same rows, given to the ranks in another way."""
        if layout not in self._layouts:
            self._layouts[layout] = Comparison(self._evidence, self.parts, self.world, layout)
        return self._layouts[layout]

    def __str__(self) -> str:
        ranks = (" | ".join(str(list(part.rows)) for part in self._of(rank)) for rank in range(self.world))
        return "; ".join(f"rank {rank}: rows {rows}" for rank, rows in enumerate(ranks))

    # the runs

    def _of(self, rank: int) -> Sequence[Composition]:
        return self.parts[rank * self.window : (rank + 1) * self.window]

    @property
    def _all(self) -> Composition:
        """The same rows in one process: each micro-batch has those of all ranks."""
        joined = [sum((self._of(r)[j].rows for r in range(self.world)), ()) for j in range(self.window)]
        return Composition(sum(joined, ()), tuple(map(len, joined)) if self.window > 1 else ())

    def _given(self, rank: int) -> Sequence[Composition]:
        """The micro-batches that a rank is given."""
        if self._layout == "share":
            return self._of(rank)
        if self._layout == "whole":
            return self._all.split()
        made = []
        for part in self._of(rank):
            size = len(part.rows)
            rows = [part.rows[0]] * (size * self.world)
            taken = slice(rank * size, (rank + 1) * size) if self._layout == "chunk" else slice(rank, None, self.world)
            rows[taken] = part.rows
            made.append(Composition(tuple(rows)))
        return made

    def over_and_over(self, rank: int, _loop: TrainLoop) -> Iterator[Any]:
        """A rank's share of the rows, again and again."""
        while True:
            for part in self._of(rank):
                yield from self._gradients.composed(part)

    @cached_property
    def one(self) -> Record:
        """The run of one process. Raises ``CannotDecide`` where it makes no step."""
        made = self._gradients.at(self._all)
        if made.refused:
            raise CannotDecide(f"{made.refused} on the rows of the batch in another order; give batch_dim=")
        if not made.finite:
            raise CannotDecide("in one process the gradients are not finite on the rows of the batch in another order")
        return made.record

    @cached_property
    def launched(self) -> Launch:
        """What the ranks do over their rows. Raises ``CannotDecide`` and ``RanksRanOut`` as ``launch`` does."""
        _ = self.one  # the weights that all begin with
        runs, gradients = self._evidence.shared(StepRuns.of), self._gradients
        keyed = not gradients.splits and runs.axes is not None and bool(runs.axes.axes)
        repeated = gradients.window if self.window == 1 else 1
        given = [[*self._given(rank)] * repeated for rank in range(self.world)]
        work = over_shares(
            self._evidence,
            runs,
            self.world,
            lambda rank: [item for part in given[rank] for item in gradients.composed(part)],
            knobs=(("accumulate", self.window),) if gradients.splits else (),
            rows=lambda rank: tuple(part.rows for part in given[rank]) if keyed else (),
        )
        return launch(work, self.world, timeout=self._evidence.timeout)

    @cached_property
    def results(self) -> list[RankResult]:
        """What the ranks did. Raises ``CannotDecide`` where they did not come to their end on rows of ours."""
        found = results_of(self.launched)
        raised = next((r.record.raised for r in found if r.record is not None and r.record.raised), None)
        if raised is not None:
            raise CannotDecide(f"fit raised {raised.summary} on a share of the rows with ranks={self.world}")
        if self.launched.hang is not None or any(r.record is None for r in found):
            raise CannotDecide(
                f"on equal shares of the rows, with ranks={self.world}, the ranks wait for each other for ever, and "
                "over the loop's own batches they do not"
            )
        return found

    @cached_property
    def _alone(self) -> list[Record]:
        """The run of each share alone, in one process. Raises ``CannotDecide`` where ``fit`` raises on one."""
        made = [self._gradients.at(part) for part in self.parts]
        for part in made:
            if part.refused:
                raise CannotDecide(f"{part.refused} on one rank's share of the rows, in one process")
        return [part.record for part in made]

    def outside_draw(self) -> str:
        """Words for python's or numpy's draws, with their line, where another seed for ``fit`` changes the gradient in
        one process; empty where it does not."""
        first, second = (self._gradients.windows(self._all, fit_seed=seed) for seed in (None, RESEEDED))
        limit = bound(first, second)
        if all(first_step_difference(first, second, o) <= limit for o in optimizers(first)):
            return ""
        return f"python's or numpy's generators{self._gradients.outside_draw()}"

    def valid(self, weights: Sequence[float]) -> list[int] | None:
        """The valid targets of each share, where these explain the weights in one process."""
        return self._gradients.cut.valid.explaining(weights, [part.rows for part in self.parts])

    # what the first steps read

    @property
    def _records(self) -> list[Record]:
        return [result.require() for result in self.results]

    @property
    def bound(self) -> float:
        return bound(self.one, *self._records)

    @property
    def precision(self) -> str:
        return precision(self.one, *self._records)

    @cached_property
    def _before_clip(self) -> bool:
        """Whether gradients are compared as they were before any clipping: those of shards are known after it only."""
        return not any(result.shards for result in self.results)

    @cached_property
    def expected(self) -> Gradient:
        return first_read(self.one, before_clip=self._before_clip)

    @cached_property
    def got(self) -> list[Gradient]:
        return first_reads(self.results, before_clip=self._before_clip)

    @cached_property
    def agreements(self) -> list[Agreement]:
        """By rank."""
        return [agreement(*vectors([self.expected, got])) for got in self.got]

    @property
    def equal(self) -> bool:
        return all(a.difference <= self.bound for a in self.agreements)

    @cached_property
    def equal_as_read(self) -> bool:
        """Whether the gradients agree after clipping as well."""
        expected, got = first_read(self.one), first_reads(self.results)
        return all(agreement(*vectors([expected, g])).difference <= self.bound for g in got)

    def clips_apart(self) -> tuple[tuple[float, ...], float, str] | None:
        """The first clip before the step whose norm is another on some rank than in one process: the norms of the
        ranks, that of one process, and the line."""
        norms, _ = clip_norms(self.one)
        found = [clip_norms(record) for record in self._records]
        line = next((line for _, line in found if line), "")
        for number, norm in enumerate(norms):
            theirs = tuple(n[number] for n, _ in found if len(n) == len(norms))
            if len(theirs) == len(found) and any(abs(n - norm) > self.bound * norm for n in theirs):
                return theirs, norm, line
        return None

    def clipped_by_rank(self) -> tuple[str, ...]:
        """The parameters that all ranks hold whole, where all have the gradient of one process before a clip, and not
        all the same one after it."""
        names = set(self.expected).intersection(*self.got).difference(*(result.strange for result in self.results))
        read = first_reads(self.results)
        before = vectors([{name: g[name] for name in names} for g in (self.expected, *self.got)])
        after = vectors([{name: g[name] for name in names & g.keys()} for g in read])
        same = all(agreement(before[0], got).difference <= self.bound for got in before[1:])
        differ = any(agreement(after[0], got).difference > self.bound for got in after[1:])
        return tuple(name for name in self.expected if name in names) if same and differ else ()

    @cached_property
    def wrong(self) -> frozenset[str]:
        """The parameters of which some rank reads another gradient than one process."""
        size = max(float(torch.linalg.vector_norm(v)) for v in vectors([self.expected, *self.got]))
        differ = set()
        for got in self.got:
            for name in dict.fromkeys((*self.expected, *got)):
                a, b = vectors([{name: g[name]} if name in g else {} for g in (self.expected, got)])
                if float(torch.linalg.vector_norm(a - b)) > self.bound * size:
                    differ.add(name)
        return frozenset(differ)

    def weights(self) -> tuple[Weights | None, float]:
        """How much each share weighs in what the ranks read of the wrong parameters, and the largest part of it that is
        no weighted sum of the shares: None where that is more than rounding, or the shares are nearly the same."""
        alone = [first_read(record, before_clip=self._before_clip) for record in self._alone]
        chosen = [{n: v for n, v in g.items() if n in self.wrong} for g in (self.expected, *self.got, *alone)]
        expected, *rest = vectors(chosen)
        got, parts = rest[: self.world], rest[self.world :]
        lengths = tuple(float(torch.linalg.vector_norm(v)) for v in parts)
        sums = [combination(g, parts) for g in got]
        known = [s for s in sums if s is not None]
        if len(known) < len(sums):
            # of so few entries that anything is a sum of the shares: what is exactly the rank's own share alone
            if len(parts) != len(got):
                return None, 0.0
            if any(agreement(g, p).difference > self.bound for g, p in zip(got, parts, strict=True)):
                return None, 0.0
            ranks = range(self.world)
            return (None, tuple(tuple(float(i == r) for i in ranks) for r in ranks), lengths), 0.0
        residual = max(s.residual for s in known)
        if residual > separable(self.bound):
            return None, residual
        one = combination(expected, parts)
        of_one = one.weights if one is not None and one.residual <= separable(self.bound) else None
        return (of_one, tuple(s.weights for s in known), lengths), residual

    def same_losses(self, *, each: bool = False, factor: int = 1) -> bool:
        """Whether the mean of the ranks' first losses is so many times that of one process; ``each``: or their sum is,
        or every one."""
        one, losses = factor * _first_loss(self.one), [_first_loss(record) for record in self._records]
        known = [sum(losses) / len(losses)] + ([sum(losses)] if each else [])
        limit = self.bound * abs(one)
        return any(abs(k - one) <= limit for k in known) or (each and all(abs(x - one) <= limit for x in losses))

    def computed_by_rank(self) -> bool:
        """Whether every rank computes the gradient of its own share, whatever it reads in the end."""
        pairs = zip(self._alone[:: self.window], self._records, strict=True)
        made = ([_first_arrivals(record) for record in pair] for pair in pairs)
        return all(agreement(*vectors(pair)).difference <= self.bound for pair in made)

    def shards_scaled(self) -> tuple[float, ...]:
        """The factor by which each rank's shards are those of one process, where all have one and they are not the
        same; else nothing."""
        factors = []
        for result in self.results:
            known = {name: held for name, held in result.shards.items() if name in self.expected and held[0]}
            if not known:
                return ()
            whole = torch.cat([self.expected[name][list(numbers)] for name, (numbers, _, _) in known.items()])
            held = torch.cat([torch.tensor(entries, dtype=torch.float64) for _, entries, _ in known.values()])
            size = float(whole @ whole)
            factor = float(whole @ held) / size if size else 0.0
            if not factor or agreement(whole * factor, held).difference > self.bound:
                return ()
            factors.append(factor)
        return tuple(factors) if max(factors) - min(factors) > self.bound * max(factors) else ()

    def same_updates(self) -> bool | None:
        """Whether the weights end as those of one process: its rate is scaled to match, or its optimizer gathers
        the gradients. None where none moves (a first step at rate 0)."""
        record = self._gradients.over(self._gradients.batch).windows(self._all)
        if record.raised is not None:
            return False
        start = {plain(name): entries for name, entries in ends(record)[0].items()}
        expected = entries_of(record, record.end)
        whole = _joined([result.ends for result in self.results])
        parts = {name for result in self.results for name in result.ends}
        for one in self._records:
            got = {name: entries for name, entries in entries_of(one, one.end).items() if name not in parts} | whole
            before, after, theirs = vectors([start, expected, got])
            moved, off = (float(torch.linalg.vector_norm(v)) for v in (after - before, theirs - after))
            if off > self.bound * max(moved, 1e-300):
                return False
        return True if moved else None


# what records say


def entries_of(record: Record, samples: Mapping[int, TensorSample | None]) -> Gradient:
    """The entries of dense samples by the parameters' names."""
    dense = {i: sample for i, sample in samples.items() if sample is not None and sample.raw and not sample.sparse}
    return {plain(record.name(i)): values(sample, record.parameters[i].dtype) for i, sample in dense.items()}


def first_read(record: Record, *, before_clip: bool = False) -> Gradient:
    """What the first step of each parameter reads in one process, as it is or as it was before any clipping."""
    found: Gradient = {}
    for optimizer in optimizers(record):
        if before_clip:
            read = {plain(name): entries for name, entries in (consumed(record, optimizer, 0) or {}).items()}
        else:
            read = entries_of(record, steps_of(record, optimizer)[0].reads[0].grads)
        found = read | found
    return found


def first_reads(results: Sequence[RankResult], *, before_clip: bool = False) -> list[Gradient]:
    """The same by rank. A parameter that no optimizer of a rank steps is taken from a rank that steps it: ranks may
    share the steps out; so are the shards that a rank does not hold."""
    records = [result.require() for result in results]
    reads = [first_read(record, before_clip=before_clip) for record in records]
    whole = _joined([result.shards for result in results])
    for result, read in zip(results, reads, strict=True):
        for name in result.shards:
            read.pop(name, None)  # a part
        read.update(whole)
    for record, read in zip(records, reads, strict=True):
        stepped = {plain(record.name(i)) for s in record.of(Step) if not s.nested and s.reads for i in s.reads[0].grads}
        for other in reads:
            read.update({name: entries for name, entries in other.items() if name not in read.keys() | stepped})
    return reads


def _joined(parts: Sequence[dict[str, Shard]]) -> Gradient:
    """Whole samples from the shards of all ranks; one with an entry that no rank holds is left out."""
    made: Gradient = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        held = [part[name] for part in parts if name in part]
        entries = torch.full((held[0][2],), math.nan, dtype=torch.float64)
        for numbers, found, _ in held:
            entries[list(numbers)] = torch.tensor(found, dtype=torch.float64)
        if not bool(entries.isnan().any()):
            made[name] = entries
    return made


def _first_arrivals(record: Record) -> Gradient:
    """What the first backward pass brings to each parameter, before ranks exchange anything."""
    first = next((b for b in record.backwards() if b.arrivals), None)
    arrivals = first.arrivals if first is not None else {}
    return entries_of(record, {i: found[0].incoming for i, found in arrivals.items() if found})


def _first_loss(record: Record) -> float:
    """What the first backward pass begins with, summed; NaN where nothing is known of it."""
    first = next((b for b in record.backwards() if b.arrivals), None)
    return sum(root.value for root in first.roots) if first is not None and first.roots else math.nan


def clip_norms(record: Record) -> tuple[tuple[float, ...], str]:
    """The norms that torch's clips by norm found before the first step, and the line of the first one."""
    first = min((s.reads[0].at for o in optimizers(record) for s in steps_of(record, o)[:1]), default=0)
    calls = [c for c in record.of(ClipCall) if c.at < first and c.by == "clip_grad_norm_" and c.limit < float("inf")]
    return tuple(n for c in calls for n in c.totals), str(calls[0].place) if calls else ""
