"""N ranks over their shares of the rows, against one process over all of them.

In float64 both must give the same gradients, but for rounding. Where they do not, the gradient of each share alone is
taken in one process, and both are written as weighted sums of these: the weights are the diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.checks.scale.distributed_equivalence import rank_work
from pytest_trainloop.checks.scale.distributed_equivalence.reads import (
    clip_norms,
    ends_of,
    first_arrivals,
    first_loss,
    first_read,
    first_reads,
    last_weights,
)
from pytest_trainloop.checks.scale.distributed_equivalence.weighing import Weighing
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.compositions.step_gradients import StepGradients
from pytest_trainloop.compositions.step_runs import StepRuns, bound, precision, separable
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.compare import agreement, first_step_difference, optimizers
from pytest_trainloop.gradients.tolerances import RESEEDED
from pytest_trainloop.gradients.vectors import combination, ends, vectors
from pytest_trainloop.ranks.launch import launch
from pytest_trainloop.recording.plain_names import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did
    from pytest_trainloop.gradients.compare import Agreement
    from pytest_trainloop.gradients.vectors import Gradient
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.ranks.facts import Launch
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

Layout = Literal["share", "whole", "chunk", "stride"]
"""What each rank is given: its share; all rows; or as many rows as all, of which those that a loop takes which cuts
its batches by itself are the rank's share: its chunk, or every Nth row."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The rows of the example batch, cut for the ranks."""

    parts: tuple[Composition, ...]
    """One for each micro-batch of each rank: all of rank 0 first."""
    world: int

    @property
    def window(self) -> int:
        return len(self.parts) // self.world

    @property
    def all(self) -> Composition:
        """The same rows in one process: each micro-batch has those of all ranks."""
        joined = [sum((self.of(r)[j].rows for r in range(self.world)), ()) for j in range(self.window)]
        sizes = tuple(map(len, joined)) if self.window > 1 else ()
        return Composition(sum(joined, ()), sizes)

    def of(self, rank: int) -> tuple[Composition, ...]:
        return self.parts[rank * self.window : (rank + 1) * self.window]

    def laid_out(self, rank: int, layout: Layout) -> tuple[Composition, ...]:
        """The micro-batches that a rank is given."""
        if layout == "share":
            return self.of(rank)
        if layout == "whole":
            return self.all.split()
        made = []
        for part in self.of(rank):
            size = len(part.rows)
            rows = [part.rows[0]] * (size * self.world)
            taken = slice(rank * size, (rank + 1) * size) if layout == "chunk" else slice(rank, None, self.world)
            rows[taken] = part.rows
            made.append(Composition(tuple(rows)))
        return tuple(made)

    def __str__(self) -> str:
        ranks = (" | ".join(str(list(part.rows)) for part in self.of(r)) for r in range(self.world))
        return "; ".join(f"rank {r}: rows {rows}" for r, rows in enumerate(ranks))


class Comparison:
    """The runs of one cut. Those of the ranks are one launch."""

    def __init__(self, evidence: Evidence, gradients: StepGradients, shares: Shares) -> None:
        self._evidence, self._gradients, self.shares = evidence, gradients, shares

    @classmethod
    def of(cls, evidence: Evidence, world: int, window: int) -> Comparison | None:
        """With windows of so many micro-batches; None where there are too few rows. Raises ``CannotDecide`` where
        no rows can be taken from the batch."""
        gradients = evidence.shared(StepGradients.of)
        order = gradients.cut.valid.order
        size = len(order) // (world * window)
        if not size:
            return None
        parts = Composition.evenly(order, world * window).split()
        return cls(evidence, gradients, Shares(parts, world))

    @cached_property
    def one(self) -> Record:
        """The run of one process. Raises ``CannotDecide`` where it makes no step."""
        made = self._gradients.at(self.shares.all)
        if made.refused:
            raise CannotDecide(f"{made.refused} on the rows of the batch in another order; give batch_dim=")
        if not made.finite:
            raise CannotDecide("in one process the gradients are not finite on the rows of the batch in another order")
        return made.record

    @cached_property
    def launched(self) -> Launch:
        return self.launch("share")

    def launch(self, layout: Layout) -> Launch:
        """What the ranks do over their rows. Raises ``CannotDecide`` and ``RanksRanOut`` as ``launch`` does."""
        _ = self.one  # the weights that all begin with
        keyed = not self._gradients.splits and self._runs.axes is not None and bool(self._runs.axes.axes)
        laid = [self.shares.laid_out(rank, layout) for rank in range(self.shares.world)]
        repeated = self._gradients.window if self.shares.window == 1 else 1
        work = rank_work.shares(
            self._evidence,
            self._runs,
            self.shares.world,
            lambda rank: [i for part in laid[rank] * repeated for i in self._gradients.composed(part)],
            knobs=(("accumulate", self.shares.window),) if self._gradients.splits else (),
            rows=lambda rank: tuple(part.rows for part in laid[rank]) * repeated if keyed else (),
        )
        return launch(work, self.shares.world, timeout=self._evidence.timeout)

    def over_and_over(self, rank: int, _loop: TrainLoop) -> Iterator[Any]:
        """A rank's share of the rows, again and again."""
        while True:
            for part in self.shares.of(rank):
                yield from self._gradients.composed(part)

    @property
    def _runs(self) -> StepRuns:
        return self._evidence.shared(StepRuns.of)

    def compared(self, dids: Sequence[Did]) -> Compared:
        """What the ranks read, beside one process."""
        return Compared(self, self.one, tuple(dids))

    def alone(self) -> list[Record]:
        """The gradient of each share alone, in one process. Raises ``CannotDecide`` where ``fit`` raises on one."""
        made = [self._gradients.at(part) for part in self.shares.parts]
        for part in made:
            if part.refused:
                raise CannotDecide(f"{part.refused} on one rank's share of the rows, in one process")
        return [part.record for part in made]

    def to_the_end(self) -> Record:
        """The run of one process, with all steps that it makes on these rows."""
        of_one = self._gradients.over(self._gradients.batch)
        return of_one.windows(self.shares.all)

    def outside_draw(self) -> str:
        """Words for python's or numpy's draws, with their line, where another seed for ``fit`` changes the gradient in
        one process; empty where it does not."""
        first, second = (self._gradients.windows(self.shares.all, fit_seed=seed) for seed in (None, RESEEDED))
        limit = bound(first, second)
        if all(first_step_difference(first, second, o) <= limit for o in optimizers(first)):
            return ""
        return f"python's or numpy's generators{self._gradients.outside_draw()}"

    def valid(self, weights: Sequence[float]) -> list[int] | None:
        """The valid targets of each share, where these explain the weights in one process."""
        return self._gradients.cut.valid.explaining(weights, [part.rows for part in self.shares.parts])


@dataclass(frozen=True, slots=True)
class Clips:
    """The norm by which each rank clips, and by which one process does."""

    ranks: tuple[float, ...]
    one: float
    line: str


@dataclass
class Compared:
    """What the first steps of the ranks read, beside that of one process."""

    by: Comparison
    one: Record
    dids: tuple[Did, ...]

    @cached_property
    def _before_clip(self) -> bool:
        """Whether gradients are compared as they were before any clipping: those of shards are known after it only."""
        return not any(did.seen.shards for did in self.dids)

    @cached_property
    def expected(self) -> Gradient:
        return first_read(self.one, before_clip=self._before_clip)

    @cached_property
    def got(self) -> list[Gradient]:
        return first_reads(self.dids, before_clip=self._before_clip)

    @property
    def records(self) -> list[Record]:
        return [did.require() for did in self.dids]

    @property
    def bound(self) -> float:
        return bound(self.one, *self.records)

    @property
    def precision(self) -> str:
        return precision(self.one, *self.records)

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
        expected, got = first_read(self.one), first_reads(self.dids)
        return all(agreement(*vectors([expected, g])).difference <= self.bound for g in got)

    def clips_apart(self) -> Clips | None:
        """The first clip before the step whose norm is another on some rank than in one process."""
        norms, _ = clip_norms(self.one)
        found = [clip_norms(record) for record in self.records]
        line = next((line for _, line in found if line), "")
        for number, norm in enumerate(norms):
            theirs = tuple(n[number] for n, _ in found if len(n) == len(norms))
            if len(theirs) == len(found) and any(abs(n - norm) > self.bound * norm for n in theirs):
                return Clips(theirs, norm, line)
        return None

    @cached_property
    def wrong(self) -> frozenset[str]:
        """The parameters of which some rank reads another gradient than one process."""
        size = max(float(torch.linalg.vector_norm(v)) for v in vectors([self.expected, *self.got]))
        apart = set()
        for got in self.got:
            for name in dict.fromkeys((*self.expected, *got)):
                a, b = vectors([{name: g[name]} if name in g else {} for g in (self.expected, got)])
                if float(torch.linalg.vector_norm(a - b)) > self.bound * size:
                    apart.add(name)
        return frozenset(apart)

    def weigh(self, names: frozenset[str]) -> tuple[Weighing | None, float]:
        """How much each share weighs in what the ranks read of these parameters, and the largest part of it that is
        none of their sums: None where that is more than rounding, or the shares are alike."""
        alone = [first_read(record, before_clip=self._before_clip) for record in self.by.alone()]
        chosen = [{n: v for n, v in g.items() if n in names} for g in (self.expected, *self.got, *alone)]
        expected, *rest = vectors(chosen)
        world = len(self.dids)
        got, parts = rest[:world], rest[world:]
        lengths = tuple(float(torch.linalg.vector_norm(v)) for v in parts)
        sums = [combination(g, parts) for g in got]
        if any(s is None for s in sums):
            own = self._own_alone(got, parts)
            return (Weighing(None, own, lengths) if own else None), 0.0
        residual = max(s.residual for s in sums if s is not None)
        if residual > separable(self.bound):
            return None, residual
        one = combination(expected, parts)
        known = one.weights if one is not None and one.residual <= separable(self.bound) else None
        return Weighing(known, tuple(s.weights for s in sums if s is not None), lengths), residual

    def _own_alone(self, got: list[torch.Tensor], parts: list[torch.Tensor]) -> tuple[tuple[float, ...], ...]:
        """Of so few entries that anything is a sum of the shares: the weights where each rank reads exactly what its
        own share alone gives, and nothing where some rank does not."""
        world = len(got)
        if len(parts) != world or any(agreement(g, p).difference > self.bound for g, p in zip(got, parts, strict=True)):
            return ()
        return tuple(tuple(float(i == rank) for i in range(world)) for rank in range(world))

    def same_losses(self, *, each: bool = False, factor: int = 1) -> bool:
        """Whether the mean of the ranks' first losses is so many times that of one process; ``each``: or their sum is,
        or every one."""
        one, losses = factor * first_loss(self.one), [first_loss(record) for record in self.records]
        known = [sum(losses) / len(losses)] + ([sum(losses)] if each else [])
        limit = self.bound * abs(one)
        return any(abs(k - one) <= limit for k in known) or (each and all(abs(x - one) <= limit for x in losses))

    def computed_apart(self) -> bool:
        """Whether every rank computes the gradient of its own share, whatever it reads in the end."""
        alone = [first_arrivals(record) for record in self.by.alone()[:: self.by.shares.window]]
        theirs = [first_arrivals(record) for record in self.records]
        pairs = zip(alone, theirs, strict=True)
        return all(agreement(*vectors([a, b])).difference <= self.bound for a, b in pairs)

    def shards_scaled(self) -> tuple[float, ...]:
        """The factor by which each rank's shards are those of one process, where all have one and they are not the
        same; else nothing."""
        factors = []
        for did in self.dids:
            known = {name: held for name, held in did.seen.shards.items() if name in self.expected and held[0]}
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

    def same_updates(self) -> bool:
        """Whether the weights end as those of one process: its rate is scaled to match, or its optimizer gathers
        the gradients."""
        record = self.by.to_the_end()
        if record.raised is not None:
            return False
        start = {plain(name): entries for name, entries in ends(record)[0].items()}
        expected = last_weights(record)
        for got in ends_of(self.dids):
            before, after, theirs = vectors([start, expected, got])
            moved = float(torch.linalg.vector_norm(after - before))
            if float(torch.linalg.vector_norm(theirs - after)) > self.bound * max(moved, 1e-300):
                return False
        return True
