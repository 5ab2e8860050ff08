"""The loop over k micro-batches a window, against the loop itself over the same rows in one batch.

See docs/how-it-decides.md#accumulation-as-weights.

Two windows are run. In float64 both ways must give the same gradients, but for rounding: the rows' gradients are summed
in another order. Where they do not, the gradient of each micro-batch alone is taken, and both are written as weighted
sums of these: the weights are the diagnosis.

Bound: 1e3 * eps of the precision seen. Two orders of one sum of n terms differ by at most about n * eps of the
largest partial sum (Higham, Accuracy and Stability of Numerical Algorithms, 4.2); n stays below 1e3 for what is summed
over rows and positions of an example batch. Where terms cancel, what reversing the rows makes of it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.batches import totals
from pytest_trainloop.batches.micro_batches import MicroBatches
from pytest_trainloop.checks.batch.accumulation_equivalence.weights import Weighing
from pytest_trainloop.errors import CannotDecide, Unreliable
from pytest_trainloop.gradients.compare import (
    Agreement,
    agreement,
    cuts_by_itself,
    first_apart,
    first_backward,
    library_around,
    micro_batches,
    moving_steps,
    optimizers,
    passes,
    rates,
    step_count,
    step_place,
    updates_apart,
)
from pytest_trainloop.gradients.tolerances import RESEEDED, ROUNDING
from pytest_trainloop.gradients.vectors import Combination, Gradient, combination, consumed, vectors
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.runs.run import RunPlan, canonical
from pytest_trainloop.runs.same_start import SameStart, varied

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

WINDOWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Windows of ``accumulate`` micro-batches against one batch of the same ``rows``.

    ``chunks``: the loop cuts each batch up by itself. ``steps`` are those of ``optimizer``, beside what the one-batch
    run makes; ``first_window`` counts the micro-batches before its first, ``backwards`` those of them that had their
    backward pass; ``windows`` are the gradients consumed; ``updates`` is the difference of the weights at the end, over
    how far they moved; ``library`` is the framework whose code calls backward.
    """

    accumulate: int
    rows: int
    chunks: bool
    optimizer: int
    steps: int
    steps_expected: int
    first_window: int
    backwards: int
    windows: tuple[Agreement, ...]
    updates: float
    rates_differ: bool
    bound: float
    parameters: int
    precision: str
    place: str
    library: str
    step_place: str

    @property
    def equal(self) -> bool:
        """Whether every step came when it should and consumed what it should."""
        return self.steps == self.steps_expected and all(w.difference <= self.bound for w in self.windows)


class Accumulation:
    """The runs behind ``accumulation_equivalence``, each made once."""

    def __init__(
        self,
        batches: MicroBatches,
        plan_of: Callable[[Mapping[str, Any]], RunPlan],
        run_plan: Callable[[RunPlan], Record],
    ) -> None:
        self.cut = batches
        self._plan_of = plan_of
        self._run_plan = run_plan
        self._start = SameStart()
        self._double = True
        self._records: dict[object, Record] = {}

    @classmethod
    def of(cls, evidence: Evidence) -> Accumulation:
        """Over as many windows of the first batches as an accumulating run has."""
        seen, loop = evidence.run(), evidence.fresh_loop()
        with preserved():
            batches = MicroBatches.of(loop, seen, WINDOWS)
        return cls(batches, lambda knobs: evidence.plan(**knobs), evidence.rerun)

    def over(self, rows: Sequence[int], known: Split) -> Accumulation:
        """The same comparison over other rows, from the same start, in the precision of what is known."""
        beside = self.cut.beside if self.cut.recount else {}
        cut = replace(self.cut, valid=replace(self.cut.valid, order=tuple(rows)), beside=beside)
        other = Accumulation(cut, self._plan_of, self._run_plan)
        other._start, other._double = self._start, self._double
        other._records = {("known", known.rows): self._one(known.rows)}
        return other

    def sizes(self) -> list[int]:
        """The numbers of micro-batches that the rows allow, of 2, 3 and 4."""
        return self.cut.sizes()

    def split(self, k: int, *, rows: int | None = None) -> Split:
        """One comparison; raises ``CannotDecide`` where the loop cannot be run so, or where it divides by a number in
        the batch that cannot be counted anew for a part of it."""
        count = rows or self.cut.rows(k)
        found = self._split(k, count)
        if (
            found.equal
            or self.cut.recount
            or not self.cut.beside
            or not self._weighs(self.cut.beside, count, found.optimizer)
        ):
            return found
        self.cut.recount = True
        self._records = {key: record for key, record in self._records.items() if key == ("one", count)}
        found = self._split(k, count)
        unknown = self.cut.unknown
        if not found.equal and unknown and self._weighs(unknown, count, found.optimizer):
            places = ", ".join(".".join(map(str, path)) for path in unknown)
            raise CannotDecide(
                f"the batch holds {places} beside its rows: the gradient depends on it, and what it should be for a "
                "part of the rows is not known; give split_batch="
            )
        return found

    def _weighs(self, among: Mapping[totals.Path, float], count: int, optimizer: int) -> bool:
        """Whether the gradient changes with these numbers of the batch."""
        double = self._made(
            ("doubled", count, tuple(among)),
            1,
            lambda: [totals.doubled(b, count, among) for b in self.cut.whole(count)],
            may_raise=True,
        )
        if double.raised is not None:
            return True
        return first_apart(self._one(count), double, optimizer) > self._bound()

    def _split(self, k: int, count: int) -> Split:
        one, many = self._one(count), self._made(("micro", k, count), k, lambda: self.cut.split(k, count))
        chunks = False
        if many.steps > one.steps:
            whole = self._made(("chunks", k, count), k, lambda: self.cut.whole(count))
            chunks = cuts_by_itself(one, whole, k)
            many = whole if chunks else many
        self._require_steps(one, many, k)
        judged = [o for o in optimizers(one) if not self._steps_with_each(one, many, o, k, count)]
        optimizer = max(judged, key=lambda o: self._worst(one, many, o))
        alike = many.rounds == one.rounds or moving_steps(many) == moving_steps(one)
        backward = first_backward(many, optimizer)
        return Split(
            accumulate=k,
            rows=count,
            chunks=chunks,
            optimizer=optimizer,
            steps=step_count(many, optimizer),
            steps_expected=step_count(one, optimizer),
            first_window=micro_batches(one, many, optimizer),
            backwards=passes(many, optimizer)[1] // max(1, passes(one, optimizer)[1]),
            windows=tuple(self._agreements(one, many, optimizer)),
            updates=updates_apart(one, many) if alike else float("inf"),
            rates_differ=rates(one, optimizer, WINDOWS) != rates(many, optimizer, WINDOWS),
            bound=self._bound(),
            parameters=len(consumed(one, optimizer, 0) or ()),
            precision="float64" if one.double and many.double else self._lowest(),
            place=str(backward.place) if backward else "",
            library=library_around(backward),
            step_place=step_place(many, optimizer),
        )

    def _steps_with_each(self, one: Record, many: Record, optimizer: int, k: int, count: int) -> bool:
        """Whether an optimizer is to step with every micro-batch, beside another that waits for the window's end: it
        consumes the first one's own gradient, undivided."""
        others = [o for o in optimizers(one) if o != optimizer and step_count(many, o) == step_count(one, o)]
        if not others or step_count(many, optimizer) < k * step_count(one, optimizer):
            return False
        return first_apart(self._parts(k, count)[0], many, optimizer) <= self._bound()

    def weigh(self, split: Split) -> Weighing:
        """The weights of the first window. Raises ``CannotDecide`` where examples interact, or where the loop draws
        random numbers that torch knows nothing of."""
        one_batch = self.one_batch(split)
        self._require_repeatable(split.accumulate, split.rows, split.optimizer)
        if one_batch.residual > self._separable():
            raise CannotDecide(
                "examples interact: the gradient of the whole batch is no weighted sum of those of its parts "
                f"({one_batch.residual:.1e} of it lies outside), so that accumulation is not meant to be equal"
            )
        accumulated = self._weighted(self._many(split), split)
        return Weighing(one_batch, accumulated, self.cut.valid.weigh(one_batch.weights))

    def one_batch(self, split: Split) -> Combination:
        """The gradient of the one batch as a weighted sum of its micro-batches'. Raises ``CannotDecide`` where these
        cannot be told apart."""
        return self._weighted(self._one(split.rows), split)

    def _weighted(self, record: Record, split: Split) -> Combination:
        """The first gradient consumed in a run, as such a sum."""
        whole, *basis = vectors([consumed(record, split.optimizer, 0) or {}, *self._own_gradients(split)])
        found = combination(whole, basis)
        if found is None:
            raise CannotDecide(
                f"the gradients of {split.accumulate} micro-batches are too alike to be told apart, or one of them is "
                "zero; give a batch with rows that differ"
            )
        return found

    def weights_of_loss(self) -> tuple[float, ...]:
        """How two halves of the rows weigh in the gradient of the declared loss on all of them."""
        self._plan_of = _on_loss(self._plan_of)
        count = self.cut.rows(2)
        one = self._one(count)
        optimizer = optimizers(one)[0]
        whole, *parts = vectors(
            [consumed(one, optimizer, 0) or {}, *[consumed(r, optimizer, 0) or {} for r in self._parts(2, count)]]
        )
        found = combination(whole, parts)
        if found is None or found.residual > self._separable():
            raise CannotDecide("the declared loss is no weighted sum over rows: accumulation is not meant to be equal")
        return found.weights

    def carried(self, split: Split) -> tuple[tuple[float, ...], float]:
        """What the second window holds too much, as weights of the first window's micro-batches, and what is left; of
        the parameters where it does."""
        o = split.optimizer
        one, many = consumed(self._one(split.rows), o, 1) or {}, consumed(self._many(split), o, 1) or {}
        apart = {
            name
            for name in many
            if agreement(*vectors([{name: one[name]} if name in one else {}, {name: many[name]}])).difference
            > split.bound
        }
        parts = self._own_gradients(split)
        expected, got, *basis = vectors([{n: v for n, v in g.items() if n in apart} for g in (one, many, *parts)])
        found = combination(got - expected, basis)
        return (found.weights, found.residual) if found else ((), 1.0)

    def grows_with_windows(self, split: Split) -> bool:
        """Whether what windows of 4 give too much is three times what windows of 2 give, over the same rows, and about
        as much in the second window as in the first: a part of the loss that is counted once for each micro-batch, and
        none that grows from one micro-batch to the next."""
        count = len(self.cut.valid.order) // 4 * 4
        if not count:
            return False
        one = self._one(count)
        excess: dict[tuple[int, int], torch.Tensor] = {}
        for k in (2, 4):
            many = self._many(self.split(k, rows=count))
            for nth in range(WINDOWS):
                pair = [consumed(record, split.optimizer, nth) or {} for record in (one, many)]
                whole, got = vectors(pair)
                excess[k, nth] = got - whole
        sizes = {key: float(torch.linalg.vector_norm(v)) for key, v in excess.items()}
        steady = all(0.5 < sizes[k, 1] / max(sizes[k, 0], 1e-300) < 2.0 for k in (2, 4))
        return steady and float(torch.linalg.vector_norm(excess[4, 0] - 3 * excess[2, 0])) <= 1e-6 * sizes[4, 0]

    def by_a_constant(self, split: Split) -> bool:
        """Whether windows of as many whole batches, one and the same, give the one batch's gradient: the loop divides
        by a number of rows from its settings, which parts of a batch do not have."""
        k, count = split.accumulate, split.rows
        copies = self._made(
            ("copies", k, count), k, lambda: [batch for batch in self.cut.whole(count) for _ in range(k)]
        )
        return first_apart(self._one(count), copies, split.optimizer) <= split.bound

    def reordered(self, split: Split) -> float:
        """The difference that reversing the rows of the one batch makes: rounding, where rows do not interact."""
        backwards = self._made(("reversed", split.rows), 1, lambda: self.cut.reversed(split.rows))
        return first_apart(self._one(split.rows), backwards, split.optimizer)

    def _parts(self, k: int, count: int) -> list[Record]:
        """Runs on one micro-batch each."""
        return [
            self._made(("part", k, count, i), 1, lambda i=i: self.cut.split(k, count)[i : i + 1])  # type: ignore[misc]
            for i in range(k)
        ]

    def _own_gradients(self, split: Split) -> list[Gradient]:
        return [consumed(r, split.optimizer, 0) or {} for r in self._parts(split.accumulate, split.rows)]

    def _require_repeatable(self, k: int, count: int, optimizer: int) -> None:
        """Draws of the loop's own (noise, a shuffle, stochastic depth) make two runs differ by more than rounding."""
        runs: tuple[tuple[tuple[object, ...], int, Callable[[], list[Any]]], ...] = (
            (("one", count), 1, lambda: self.cut.whole(count)),
            (("micro", k, count), k, lambda: self.cut.split(k, count)),
        )
        for fit_seed, refused in (
            (None, Unreliable("two identical runs of the loop differ: see determinism, and seed what draws there")),
            (
                RESEEDED,
                CannotDecide(
                    "the loop draws random numbers from python's or numpy's generators: with another seed for fit the "
                    "gradient differs; draw them with torch to have windows compared"
                ),
            ),
        ):
            for key, knob, items in runs:
                again = self._made((*key, "again", fit_seed), knob, items, fit_seed=fit_seed)
                if first_apart(self._records[key], again, optimizer) > self._bound():
                    raise refused

    def _one(self, count: int) -> Record:
        return self._made(("one", count), 1, lambda: self.cut.whole(count))

    def _many(self, split: Split) -> Record:
        return self._records[("chunks" if split.chunks else "micro", split.accumulate, split.rows)]

    def _made(
        self,
        key: tuple[object, ...],
        knob: int,
        items: Callable[[], Sequence[Any]],
        fit_seed: int | None = None,
        *,
        may_raise: bool = False,
    ) -> Record:
        if key not in self._records:
            plan = varied(self._plan_of({"accumulate": knob}), self._start, lambda _loop: items())
            plan = replace(plan, fit_seed=fit_seed, double=self._double)
            record = self._run_plan(plan)
            if record.raised is not None and self._double and not self._records:
                self._double, self._start = False, SameStart()
                return self._made(key, knob, items, fit_seed)
            if record.raised is not None and not may_raise:
                raise CannotDecide(
                    f"fit raised {record.raised.summary} on {'part of ' if knob > 1 else ''}the batch; give "
                    "batch_dim= or "
                    "split_batch= if rows are told apart in another way"
                )
            self._records[key] = record
        return self._records[key]

    def _require_steps(self, one: Record, many: Record, k: int) -> None:
        made, expected = many.steps, one.steps
        if not any(step_count(one, o) >= WINDOWS for o in optimizers(one)):
            raise CannotDecide(
                f"with accumulate=1 the loop made {expected} steps over {WINDOWS} batches, where {WINDOWS} are due"
            )
        if made < expected:
            raise CannotDecide(
                f"with accumulate={k} the loop made {made} steps over {WINDOWS * k} micro-batches, where {expected} "
                "are due: it counts its windows in another way, or collects more batches before it steps"
            )

    def _agreements(self, one: Record, many: Record, optimizer: int) -> list[Agreement]:
        pairs = [(consumed(one, optimizer, n), consumed(many, optimizer, n)) for n in range(WINDOWS)]
        return [agreement(*vectors([a, b])) for a, b in pairs if a is not None and b is not None]

    def _worst(self, one: Record, many: Record, optimizer: int) -> float:
        """How far the windows differ; infinite where the optimizer stepped another number of times."""
        if step_count(one, optimizer) != step_count(many, optimizer):
            return float("inf")
        return max((a.difference for a in self._agreements(one, many, optimizer)), default=0.0)

    def _epsilon(self) -> float:
        return float(torch.finfo(getattr(torch, self._lowest())).eps)

    def _bound(self) -> float:
        return ROUNDING * self._epsilon()

    def _lowest(self) -> str:
        """The lowest precision that any of the runs computed in."""
        if all(r.double for r in self._records.values()):
            return "float64"
        said = " ".join(word for r in self._records.values() for word in (*r.lower, *(p.dtype for p in r.parameters)))
        return next((d for d in ("bfloat16", "float16") if d in said.replace("bfloat16", "bfloat16 ")), "float32")

    def _separable(self) -> float:
        return max(1e-9, 1e4 * self._epsilon())


def _on_loss(plan_of: Callable[[Mapping[str, Any]], RunPlan]) -> Callable[[Mapping[str, Any]], RunPlan]:
    """The same plans for a plain loop over the declared loss."""

    def plain(loop: TrainLoop) -> Callable[[Any], None]:
        loop.optimizer = None  # one that needs a closure would stand in the way
        return canonical(loop)

    return lambda _knobs: replace(plan_of({}), fit=plain)
