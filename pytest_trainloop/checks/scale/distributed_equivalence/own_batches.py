"""What the ranks do over the loop's own batches, each under a seed of its own: how the launch ends, weights and buffers
that differ at the start or later, rows and draws that are the same on all ranks, files that all write.

What is so only under different seeds is advice: the project's launcher may seed all ranks in the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from array import array
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.scale.distributed_equivalence.causes import (
    DRAW_IN_COMMON,
    RANKS,
    STEPS,
    UNREDUCED,
    found,
)
from pytest_trainloop.checks.scale.distributed_equivalence.comparison import Comparison, entries_of
from pytest_trainloop.checks.scale.distributed_equivalence.rank_runs import (
    error_of_a_rank,
    over_own_batches,
    raises_by_itself,
    results_of,
)
from pytest_trainloop.core.errors import BrokenRun, CannotDecide, UserCodeError
from pytest_trainloop.core.finding import UserError
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.instruments.gradients.compare import first_backward
from pytest_trainloop.instruments.tracing.definitions import argument
from pytest_trainloop.instruments.tracing.statements import condition_on_rank
from pytest_trainloop.recording.events import Backward, SchedulerStep, Step
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.ranks.facts import LOST
from pytest_trainloop.runs.ranks.launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.checks.scale.distributed_equivalence.rank_runs import RankResult, State
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.ranks.facts import Hang, Launch, Other

BETWEEN_SEEDS = 7919
"""Between the seeds of two ranks."""

ROUNDING = {"float64": 2.2e-13, "float32": 1.2e-4}
"""A thousand machine epsilons: numbers that ranks reduce in another order may part by so much of their size. In lower
precision nothing is judged."""

_NO_PART = "its gradients are in no all_reduce: that of the others sums gradients of other steps"

SAME = 2
"""Backward passes that must be the same before the rows are called so."""


class OwnBatches:
    """The launches over the loop's own batches, to be asked for by ``evidence.shared``."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    @cached_property
    def launched(self) -> Launch:
        """Each rank under a seed of its own."""
        return self._launch(lambda rank: self._evidence.seed + rank * BETWEEN_SEEDS)

    @cached_property
    def _seeded_alike(self) -> Launch:
        return self._launch(lambda _rank: self._evidence.seed)

    @cached_property
    def results(self) -> list[RankResult]:
        return results_of(self.launched)

    @cached_property
    def under_one_seed(self) -> list[RankResult]:
        """Raises ``CannotDecide`` where the ranks then do not come to their end."""
        if of_ending(self._seeded_alike) is not None:
            raise CannotDecide("under one seed on all ranks they do not come to their end")
        return results_of(self._seeded_alike)

    def _launch(self, seeds: Callable[[int], int]) -> Launch:
        seen = self._evidence.run()
        window = max(1, round(seen.items / max(1, seen.rounds)))
        batches = max(STEPS, 2 * window) + 1

        def every_nth(rank: int, loop: TrainLoop) -> Iterator[Any]:
            yield from first_batches(loop, RANKS * batches)[rank::RANKS]

        stream: Callable[[int, TrainLoop], Iterator[Any]] | None = None
        if not self.shared_out:  # given in the same way on all ranks: with the same rows they would seem in step
            if "batches" in self._evidence.offers:
                stream = every_nth
            else:
                with contextlib.suppress(CannotDecide):
                    made = Comparison.of(self._evidence, RANKS, 1)
                    stream = made.over_and_over if made is not None else None
        work = over_own_batches(self._evidence, RANKS, seeds, batches, stream)
        return launch(work, RANKS, timeout=self._evidence.timeout)

    @cached_property
    def makes_own(self) -> bool:
        return self._evidence.shared(makes_own_data)

    @cached_property
    def shared_out(self) -> bool:
        """Whether it is the loop that shares rows out: by its own DataLoader, or inside of ``fit``."""
        from torch.utils.data import DataLoader

        return isinstance(self._evidence.fresh_loop().batches, DataLoader) or self.makes_own

    # how they end

    def ending(self) -> Finding | None:
        """Why the ranks do not come to their end. Raises what the project's code raised in one, and ``CannotDecide``
        where that is no fault of the loop's."""
        finding, error = _ended(self.launched)
        if finding is None and error is None:
            return None
        comes_back = _ended(self._seeded_alike) == (None, None)
        if error is not None:
            if comes_back:
                raise CannotDecide(f"{error}, and not under one seed on all ranks")
            if error.error.stage.startswith("fit"):
                bare = launch(raises_by_itself(self._evidence, RANKS), RANKS, timeout=self._evidence.timeout)
                if all(rank.value is False for rank in bare):
                    raise BrokenRun(f"{error} only while the ranks were watched")
            raise error
        if finding is not None and comes_back:
            return by_seed(finding, "they come to their end", repair=DRAW_IN_COMMON)
        return finding

    # what they hold, read and write

    def rules(self, *, parts: bool) -> Iterator[Finding]:
        """``parts``: whether weights that part are no consequence of what is found already."""
        one = {plain(p.name): p.shape for p in self._evidence.run().parameters if p.declared}
        theirs = [{plain(p.name): p.shape for p in result.require().parameters} for result in self.results]
        # ranks that share out the model hold parts of it
        if all(held.get(name) == shape for held in theirs for name, shape in one.items()):
            if start := starts_apart(self.results):
                yield from self._start(start, parts=parts)
            elif parts:
                yield from self._parting()
        same = same_everywhere(self.results)
        if not same:
            yield from of_draws(self.results)
        for finding in of_samplers(self.results):
            only = not any(True for _ in of_samplers(self.under_one_seed))
            yield by_seed(finding, "they are shared out") if only else finding
        if self.shared_out:
            equal = 0 if same or self.makes_own else same_everywhere(self.under_one_seed)
            if same or equal:
                first = first_backward(self.results[0].require(), 0)
                level, variant = ("fault", "") if same else ("advice", "seeded")
                yield found("same_rows_on_every_rank", first or "", (), variant, same=same or equal, level=level)
        yield from of_files(self.results)

    def _start(self, names: tuple[str, ...], *, parts: bool) -> Iterator[Finding]:
        """Weights that differ at the start: advice where the seeds alone make the difference, and then what parts
        under one seed."""
        seeds = not set(names) & set(starts_apart(self.under_one_seed))
        yield found("start_differs", "", names, seeds=seeds, level="advice" if seeds else "fault")
        if seeds and parts:
            yield from of_parting(self.under_one_seed)

    def _parting(self) -> Iterator[Finding]:
        """Weights that part: advice where that is so only under different seeds (noise that is added to weights)."""
        for finding in of_parting(self.results):
            only = finding.level == "fault" and not ends_apart(self.under_one_seed)
            yield by_seed(finding, "they stay alike") if only else finding


def by_seed(finding: Finding, what: str, **more: Any) -> Finding:
    """The finding as advice, since it is not so under one seed on all ranks."""
    return replace(finding, level="advice", shown_by=f"{finding.shown_by}; under one seed on all ranks {what}", **more)


def own_launch(evidence: Evidence) -> Launch:
    """The launch over the loop's own batches, for the loop card."""
    return evidence.shared(OwnBatches).launched


# a launch that did not come to its end


def _ended(launched: Launch) -> tuple[Finding | None, UserCodeError | None]:
    """Why the ranks did not come to their end, or what the project's code raised in one."""
    try:
        return of_ending(launched), None
    except UserCodeError as error:
        return None, error


def of_ending(launched: Launch) -> Finding | None:
    """Why the ranks did not come to their end: one raised, or waits for ever; None where they did.

    Raises ``CannotDecide`` where that is no fault of the loop's, and ``UserCodeError`` where it raised by itself.
    """
    results = results_of(launched)
    made = [(rank, result.record) for rank, result in enumerate(results) if result.record is not None]
    # what a rank raises that waited for another which is gone follows from that, as it does where it was ended
    made = [(rank, r) for rank, r in made if not (rank in launched.waiting and r.raised and LOST in _said(r.raised))]
    raised = [(rank, record.raised) for rank, record in made if record.raised]
    for rank, what in raised:
        if unreduced := of_unreduced(results[rank], what):
            return unreduced
    for rank, what in raised:
        error = UserError(stage="fit", summary=what.summary, traceback=what.traceback)
        raise error_of_a_rank(launched, rank, error, _said(what))
    if (hang := launched.hang) is not None:
        if any(not record.ended for _, record in made):
            raise CannotDecide(
                "a rank made all the steps that it was to make, and another was in the middle of one: the ranks step "
                "unequally often"
            )
        bare = next(filter(None, itertools.starmap(_bare_steps, enumerate(results))), None)
        return of_hang(hang, "bare", **bare) if bare and hang.collective.in_backward else of_hang(hang)
    ended = next((rank for rank in launched if rank.ended), None)
    if ended is not None:
        raise CannotDecide(f"the process of rank {ended.number} of {len(launched)} ended early: {ended.ended}")
    return None


def of_unreduced(result: RankResult, what: Raised) -> Finding | None:
    """What torch raises for parameters without a gradient; None for anything else that a rank raised."""
    if UNREDUCED not in _said(what):
        return None
    if late := result.late:
        return found("parameters_not_in_wrapper", what.place, late, "late", kind=what.kind)
    record = result.require()
    first = next(iter(record.backwards()), None)
    without = (
        plain(p.name)
        for p in record.parameters
        if p.declared and p.requires_grad and first is not None and not first.arrivals.get(p.index)
    )
    return found("unused_parameters", what.place, without, kind=what.kind)


def _bare_steps(rank: int, result: RankResult) -> dict[str, Any] | None:
    """The steps of a rank that are made without a call of DistributedDataParallel, where it calls it in others."""
    without = [before == after for before, after in itertools.pairwise([0, *result.called])]
    if not any(without) or all(without):
        return None
    return {"alone": rank, "bare": sum(without), "steps": len(without), "first": without.index(True) + 1}


def of_hang(hang: Hang, variant: str = "", **more: Any) -> Finding:
    """A rank that waits for others which never come."""
    facts = more | {
        "rank": hang.rank,
        "others": "; ".join(_other(other, hang) for other in hang.others),
        "call": str(hang.collective),
        "line": str(hang.line),
        "step": hang.collective.steps,
    }
    if variant != "bare":
        facts["change"] = _tensor_at(hang) or condition_on_rank(str(hang.line)) or str(hang.line)
    return found("one_rank_waits", hang.line, (hang.collective.kind,), variant, **facts)


def _tensor_at(hang: Hang) -> str:
    """The statement that made what a rank gives to a collective, where another rank waits in that call with a tensor of
    another shape."""
    if not any(other.how == "waited" and other.last and other.last.place == hang.line for other in hang.others):
        return ""
    return argument(str(hang.line), hang.collective.kind, "tensor", 1)


def _said(what: Raised) -> str:
    return f"{what.summary} {what.message}"


def _other(other: Other, hang: Hang) -> str:
    """What another rank does while one waits."""
    number, how, last = other.number, other.how, other.last
    at = f" at {last.place}" if last is not None and last.place.file else ""
    kind = last.kind if last is not None else "another"
    if how == "waited" and hang.different and last is not None and at:
        if last.place != hang.line:
            own = "another " if kind == hang.collective.kind else ""
            return f"rank {number} is at another line, and waits in {own}{kind} there:{at.removeprefix(' at')}"
        return f"rank {number} waits in {kind}{' of other shapes' if kind == hang.collective.kind else ''}{at}"
    if how == "waited":
        return f"rank {number} waits in {kind}{at}"
    known = f" (last in {kind}{at})" if at else ""
    return f"rank {number} has come to its end without it{known}" if how == "left" else f"rank {number} {how}{known}"


# weights and buffers


def starts_apart(results: Sequence[RankResult]) -> tuple[str, ...]:
    """The weights and buffers that differ as ``fit`` begins, and still before the first step."""
    entered = differing(results, [result.entered for result in results])
    return tuple(name for name in differing(results, [result.states[0] for result in results]) if name in entered)


def ends_apart(results: Sequence[RankResult]) -> tuple[str, ...]:
    """The weights and buffers that the ranks begin equal and that differ at the end, and did not come together again in
    between."""
    last = differing(results, [result.states[-1] for result in results])
    if any(len(result.states) == 1 for result in results):  # some rank makes no step
        entered = differing(results, [result.entered for result in results])
        return tuple(name for name in last if name not in entered)
    # a forward pass may change buffers before the first step
    first = [r.states[0] | {name: v for name, v in r.entered.items() if name in r.buffers} for r in results]
    states = [first, *_at_once(results)[1:]]
    equal = {name: [len({state.get(name) for state in at_once}) == 1 for at_once in states] for name in last}
    return tuple(name for name, at in equal.items() if at[0] and at == sorted(at, reverse=True))


def come_together(results: Sequence[RankResult], names: Sequence[str]) -> bool:
    """Whether these weights are the same on all ranks after some step that moves them."""
    return any(
        all(len({state.get(name) for state in after}) == 1 for name in names)
        and any(
            after[0].get(name) != before[0].get(name) for name in names
        )  # not at rate 0 (pair: bare_at_every_other_step)
        for before, after in itertools.pairwise(_at_once(results))
    )


def bypassed_steps(results: Sequence[RankResult], names: Sequence[str]) -> list[int]:
    """The steps, from 0, that are made without a call of DistributedDataParallel; none unless these are just the steps
    at which the ranks read different gradients of the parameters."""
    records = [result.require() for result in results]
    at_once = list(zip(*map(steps_of, records), strict=False))
    calls = list(zip(*(itertools.pairwise([0, *result.called]) for result in results), strict=False))
    bare = [number for number, of_ranks in enumerate(calls) if all(before == after for before, after in of_ranks)]
    # several optimizers may step after one call (odd: embedding_stepped_every_other_time)
    if not 0 < len(bare) < len(calls) or len({step.optimizer for of_ranks in at_once for step in of_ranks}) > 1:
        return []
    return bare if bare == [n for n, steps in enumerate(at_once) if read_apart(records, steps, names)] else []


def _at_once(results: Sequence[RankResult]) -> list[tuple[State, ...]]:
    """The states of all ranks before each step, and after the last."""
    return list(zip(*(result.states for result in results), strict=False))


def differing(results: Sequence[RankResult], sides: Sequence[State]) -> list[str]:
    """The names of which some entry differs by more than rounding."""
    dtypes = {plain(p.name): p.dtype for p in results[0].require().parameters}
    ending = []
    for name in sides[0]:
        read = [array("d", side.get(name, b"")) for side in sides]
        limit = ROUNDING.get(dtypes.get(name, "float32"), math.inf) * max(map(abs, read[0]), default=0.0)
        pairs = [pair for other in read[1:] for pair in zip(read[0], other, strict=False)]
        if all(len(other) == len(read[0]) for other in read) and any(abs(a - b) > limit for a, b in pairs):
            ending.append(name)
    return ending


def of_parting(results: Sequence[RankResult]) -> Iterator[Finding]:
    """Weights that an optimizer steps and that part; else buffers and averages that do; norms by rank."""
    norms = {plain(s.name): plain(s.owner) for s in results[0].require().statistics}
    stepped = set().union(*(result.stepped for result in results))
    ending = ends_apart(results)
    weights = tuple(name for name in ending if name in stepped)
    others = tuple(name for name in ending if name not in stepped and name not in norms)
    if weights and (bare := bypassed_steps(results, weights)):
        yield found("wrapper_bypassed", "", (), "steps", bare=len(bare), steps=len(results[0].called), step=bare[0] + 1)
    elif weights:
        first, line = parts_first(results, weights)
        yield found("weights_drift", line, weights, first=first)
    elif others:
        yield found("weights_drift", "", others, "state", level="advice")
    if of_norms := tuple(dict.fromkeys(norms[name] for name in ending if name in norms)):
        yield found("batch_norm_per_rank", "", of_norms, level="advice")


def parts_first(results: Sequence[RankResult], names: Sequence[str]) -> tuple[str, str]:
    """What is another on some rank before the weights are, in words, and its line where that is known."""
    records = [result.require() for result in results]
    steps = [steps_of(record) for record in records]
    counts = [len(of_rank) for of_rank in steps]
    if min(counts) != max(counts):
        return f"the optimizer steps {by_rank(counts, ' times')}", ""
    for who, result in enumerate(results):
        alone = [n for n in names if n in result.stepped and sum(n in other.stepped for other in results) == 1]
        if alone:
            stepped = f"{some(alone, most=1)} {'is' if len(alone) == 1 else 'are'} stepped by rank {who} alone"
            return f"{stepped}, and not sent to the others", ""
    states = _at_once(results)
    differ = (n for n, at_once in enumerate(states) if any(len({s.get(name) for s in at_once}) > 1 for name in names))
    until = next(differ, len(states))  # steps that were made before some of these weights differ
    for number, at_once in enumerate(list(zip(*steps, strict=True))[:until]):
        lrs = [(s.lrs, *s.named_lrs.values()) for s in at_once]
        if any(r != lrs[0] for r in lrs[1:]):
            groups = [of_group for of_group in zip(*(s.lrs for s in at_once), strict=False) if len(set(of_group)) > 1]
            shown = f": {by_rank(groups[0])}" if groups else ""
            scheduled = [
                call
                for record, step in zip(records, at_once, strict=True)
                for call in record.of(SchedulerStep)
                if call.at < step.at and call.optimizer in (None, step.optimizer)
            ]
            line = str(scheduled[-1].place) if scheduled else ""
            return f"the learning rates differ from step {number + 1}{shown}", line
        if first := read_apart(records, at_once, names):
            what = f"at step {number + 1} the ranks read different gradients of {some(first, most=2)}"
            calls = [result.called[number] - (result.called[number - 1] if number else 0) for result in results]
            if any(calls) and not all(calls):
                return f"{what}: rank {calls.index(0)} calls the bare model there, and {_NO_PART}", ""
            zero = [who for who, (r, s) in enumerate(zip(records, at_once, strict=True)) if _all_zero(r, s, first[0])]
            lost = f", all zero on rank {zero[0]}: what was reduced is lost there" if zero else ""
            return f"{what}{lost}", str(at_once[0].place)
    return f"after step {until} they differ, though rates and gradients are the same on all ranks until then", ""


def steps_of(record: Record) -> list[Step]:
    return [step for step in record.of(Step) if not step.nested]


def read_apart(records: Sequence[Record], steps: Sequence[Step], names: Sequence[str]) -> list[str]:
    """The parameters of which the ranks' steps read different gradients, by more than rounding."""
    read = [entries_of(r, s.reads[0].grads) if s.reads else {} for r, s in zip(records, steps, strict=True)]
    ending = []
    for name in names:
        held = [gradients[name] for gradients in read if name in gradients]
        if len(held) == len(read) and len(set(map(len, held))) == 1:
            limit = ROUNDING["float32"] * max(map(abs, held[0].tolist()), default=0.0)
            if any(bool(((other - held[0]).abs() > limit).any()) for other in held[1:]):
                ending.append(name)
    return ending


def _all_zero(record: Record, step: Step, name: str) -> bool:
    return bool(step.reads) and not entries_of(record, step.reads[0].grads)[name].any()


def by_rank(numbers: Sequence[float], unit: str = "") -> str:
    return ", ".join(f"{number:.6g}{unit} on rank {rank}" for rank, number in enumerate(numbers))


# rows, draws and files


def same_everywhere(results: Sequence[RankResult]) -> int:
    """How many backward passes in a row, from the first, are the same on all ranks bit for bit: values and gradients.

    0 where fewer than two are, or some pass differs.
    """
    passes = [_passes(result.require()) for result in results]
    count = min(map(len, passes))
    same = all(other[:count] == passes[0][:count] for other in passes[1:])
    return count if same and count >= SAME else 0


def _passes(record: Record) -> list[object]:
    """The values and the incoming gradients of each backward pass, before anything is reduced."""
    return [
        (
            tuple(root.value for root in b.roots),
            tuple((plain(record.name(i)), *(a.incoming.raw for a in found)) for i, found in sorted(b.arrivals.items())),
        )
        for b in record.of(Backward)
        if b.arrivals
    ]


def of_draws(results: Sequence[RankResult]) -> Iterator[Finding]:
    """Lines at which every rank draws the same."""
    for place, drawn in results[0].draws.items():
        fresh = len(set(drawn)) > 1  # else it is a constant, whatever draws it
        if fresh and place.file and all(other.draws.get(place) == drawn for other in results[1:]):
            yield found("same_draws_on_every_rank", place, level="advice")


def of_samplers(results: Sequence[RankResult]) -> Iterator[Finding]:
    """Rows that several ranks go over in one epoch, or none does."""
    for shares in zip(*(result.samplers for result in results), strict=False):
        if any(s.replicas != len(results) for s in shares):
            continue
        if len({s.rows for s in shares}) > 1:
            common = len(set.intersection(*(set(s.rows or range(s.size)) for s in shares)))
            counts = ", ".join(str(s.size) for s in shares)
            yield found("rows_left_out", "", common=common, counts=counts, samplers=len(shares))
        elif len({s.seed for s in shares}) > 1 and all(s.shuffle for s in shares):
            facts = {
                "twice": len(set.intersection(*(set(s.order) for s in shares))),
                "never": shares[0].size - len(set().union(*(s.order for s in shares))),
                "rows": shares[0].size,
                "seeds": ", ".join(str(s.seed) for s in shares),
            }
            yield found("rows_left_out", "", (), "seeds", **facts)


def of_files(results: Sequence[RankResult]) -> Iterator[Finding]:
    """Files that several ranks write."""
    for path in dict.fromkeys(path for result in results for path in result.written):
        places = [result.written[path] for result in results if path in result.written]
        if len(places) > 1:
            name = path.replace("\\", "/").rpartition("/")[2]
            yield found("written_by_every_rank", places[0], (name,), writers=len(places))
