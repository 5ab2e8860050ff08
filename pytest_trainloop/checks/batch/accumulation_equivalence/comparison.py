"""The loop over k micro-batches a window, against the loop itself over the same rows in one batch.

See docs/how-it-decides.md#accumulation-as-weights.

Two windows are run. In float64 both ways must give the same gradients, but for rounding: the rows' gradients are summed
in another order. Where they do not, the gradient of each micro-batch alone is taken, and both are written as weighted
sums of these: the weights are the diagnosis.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.batches.micro_batches import MicroBatches, UncutBatches
from pytest_trainloop.batches.own_data import makes_own_data
from pytest_trainloop.batches.row_axis import other_axis
from pytest_trainloop.checks.batch.accumulation_equivalence.left_out import LeftOut
from pytest_trainloop.checks.batch.accumulation_equivalence.split import Doubled, Split
from pytest_trainloop.checks.batch.accumulation_equivalence.weights import CLOSE, Weighing
from pytest_trainloop.checks.batch.accumulation_equivalence.windows import (
    WINDOWS,
    agreements,
    require_steps,
    worst,
)
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.compositions.step_gradients import StepGradients
from pytest_trainloop.compositions.step_runs import StepRuns, bound, precision, separable
from pytest_trainloop.errors import CannotDecide, Refused, Unreliable
from pytest_trainloop.gradients.compare import (
    agreement,
    by_tensor,
    cuts_by_itself,
    first_backward,
    first_step_difference,
    learning_rates,
    library_around,
    library_of_step,
    micro_batches,
    moving_steps,
    optimizers,
    passes,
    step_count,
    step_place,
    updates_apart,
)
from pytest_trainloop.gradients.tolerances import RESEEDED
from pytest_trainloop.gradients.vectors import Combination, Gradient, combination, consumed, vectors
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from pytest_trainloop.checks.batch.accumulation_equivalence.left_out import Kind
    from pytest_trainloop.gradients.compare import Agreement
    from pytest_trainloop.nested import Path
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


class Accumulation:
    """The comparisons over one cut of the batches. It holds no state besides the runs that were made."""

    def __init__(self, gradients: StepGradients) -> None:
        self._gradients = gradients
        self.cut = gradients.cut
        self.told: tuple[Accumulation, Split] | None = None
        """The comparison that was reported, and the runs that it is of."""

    @classmethod
    def of(cls, evidence: Evidence) -> Accumulation:
        """Over as many windows of the first batches as an accumulating run has."""
        return cls(StepGradients(_cut(evidence), evidence.shared(StepRuns.of), 1, splits=True))

    @classmethod
    def along_other_axis(cls, evidence: Evidence) -> Accumulation | None:
        """The same with the batch cut along its second axis; None where it is known that rows lie along the first."""
        axis = other_axis(evidence.fresh_loop(), evidence.shared(cls.of).cut.batches[0])
        if axis is None:
            return None
        return cls(StepGradients(_cut(evidence, axis), evidence.shared(StepRuns.of), 1, splits=True))

    @classmethod
    def of_loss(cls, evidence: Evidence) -> Accumulation:
        """The same, for a plain loop over the declared loss."""
        return cls(StepGradients(_cut(evidence), StepRuns.of_loss(evidence), 1, splits=False))

    def of_one_window(self) -> Accumulation:
        """The same over the first batch alone."""
        return Accumulation(self._gradients.cut_as(replace(self.cut, batches=self.cut.batches[:1])))

    @property
    def rows(self) -> int:
        """The rows of the loop's own batch."""
        return len(self.cut.valid.order)

    def sizes(self) -> list[int]:
        """The numbers of micro-batches that the rows allow, of 2, 3 and 4."""
        return self.cut.sizes()

    def compare(self) -> tuple[Accumulation, list[Split]]:
        """The comparison at each size, and the runs that later questions about them are to be asked of.

        Where micro-batches differ from one batch, and the gradient depends on a number that the batch holds besides its
        rows, the comparison is made again, and so are those after it, with that number recomputed for each part.
        Raises ``CannotDecide`` where the loop cannot be run so, or where a number cannot be recomputed.
        """
        try:
            return self._compare()
        except CannotDecide:
            if self.cut.split_batch is None or self.cut.whole:
                raise
        return Accumulation(self._gradients.cut_as(self.cut.of_whole_batches()))._compare()

    def _compare(self) -> tuple[Accumulation, list[Split]]:
        made, splits, refused = self, list[Split](), None
        for k in self.sizes():
            try:
                split = made.split(k)
            except Refused as reason:
                refused = refused or reason  # other numbers may do: the rows must be divided evenly
                continue
            if not split.equal and made is self and self._depends_on(self.cut.shared, split):
                made = Accumulation(self._gradients.cut_as(self.cut.recounting()))
                split = made.split(k)
                unknown = made.cut.unknown
                if not split.equal and made._depends_on(unknown, split):
                    places = ", ".join(".".join(map(str, path)) for path in unknown)
                    raise CannotDecide(
                        f"the batch holds {places} besides its rows: the gradient depends on it, and what it should be "
                        "for a part of the rows is not known; give split_batch=",
                        needs="split_batch=",
                    )
            splits.append(split)
        if refused is not None and not splits:
            raise refused
        return made, splits

    def split(self, k: int) -> Split:
        """One comparison, over as many rows as there are. Raises ``CannotDecide`` where the loop cannot be run so."""
        return self.compared(Composition.evenly(self.cut.valid.order[: self.cut.rows(k)], k))

    def compared(self, composition: Composition) -> Split:
        """The comparison of windows of these micro-batches. Raises ``CannotDecide`` as ``split`` does."""
        k, due = len(composition.parts), len(self.cut.batches)
        one, many = self._run(composition.whole()), self._run(composition)
        loop_splits = False
        if many.steps > one.steps:
            whole = self._run(composition.whole(), knob=k)
            loop_splits = cuts_by_itself(one, whole, k)
            many = whole if loop_splits else many
        require_steps(one, many, k, due)
        judged = [o for o in optimizers(one) if not self._steps_with_each(one, many, o, composition)]
        optimizer = max(judged, key=lambda o: worst(one, many, o, due))
        comparable = many.rounds == one.rounds or moving_steps(many) == moving_steps(one)
        backward = first_backward(many, optimizer)
        return Split(
            composition=composition,
            loop_splits=loop_splits,
            optimizer=optimizer,
            steps=step_count(many, optimizer),
            steps_expected=step_count(one, optimizer),
            first_window=micro_batches(one, many, optimizer),
            backwards=passes(many, optimizer)[1] // max(1, passes(one, optimizer)[1]),
            windows=tuple(agreements(one, many, optimizer, due)),
            updates=updates_apart(one, many) if comparable else float("inf"),
            lr_differs=learning_rates(one, optimizer, due) != learning_rates(many, optimizer, due),
            bound=bound(one, many),
            parameters=len(consumed(one, optimizer, 0) or ()),
            precision=precision(one, many),
            place=str(backward.place) if backward else "",
            library=library_around(backward),
            step_place=step_place(many, optimizer),
            step_library=library_of_step(many, optimizer),
        )

    def tensors_apart(self, split: Split) -> dict[str, Agreement]:
        """The first gradient that differs, of one batch and accumulated, at each parameter."""
        nth = next((n for n, window in enumerate(split.windows) if window.difference > split.bound), 0)
        one, many = (consumed(record, split.optimizer, nth) or {} for record in (self.one(split), self.many(split)))
        return by_tensor(one, many)

    def weigh(self, split: Split) -> Weighing:
        """The weights of the first window. Raises ``CannotDecide`` where examples interact, or where the loop draws
        random numbers from generators that torch does not seed."""
        one_batch = self.one_batch(split)
        self._require_repeatable(split)
        if one_batch.residual > separable(split.bound):
            raise CannotDecide(
                "examples interact: the gradient of the whole batch is no weighted sum of those of its parts "
                f"({one_batch.residual:.1e} of it lies outside), so that accumulation need not be equal"
                f"{self._drawn_otherwise()}"
            )
        accumulated = self._weighted(self.many(split), split)
        return Weighing(one_batch, accumulated, self._counts(one_batch, split) is not None)

    def _drawn_otherwise(self) -> str:
        """What the loop draws that no row has of its own, to follow a reason."""
        drawn = [] if self.cut.split_batch is not None else self._gradients.drawn_otherwise()
        return f"; the loop draws {some(drawn, most=2)}, where it is not known which row has what" if drawn else ""

    def one_batch(self, split: Split) -> Combination:
        """The gradient of the one batch as a weighted sum of its micro-batches'. Raises ``CannotDecide`` where these
        are linearly dependent."""
        return self._weighted(self.one(split), split)

    def counts(self, split: Split) -> list[int] | None:
        """The valid targets of each micro-batch, where they weigh so in one batch. Raises ``CannotDecide`` as
        ``one_batch`` does."""
        return self._counts(self.one_batch(split), split)

    def _counts(self, one_batch: Combination, split: Split) -> list[int] | None:
        return self.cut.valid.explaining(one_batch.weights, [part.rows for part in split.composition.split()])

    def weights_of_halves(self) -> tuple[float, ...]:
        """How two halves of the rows weigh in the gradient of all of them."""
        halves_of = Composition.evenly(self.cut.valid.order[: self.cut.rows(2)], 2)
        one, parts = self._run(halves_of.whole()), self._parts(halves_of)
        optimizer = optimizers(one)[0]
        whole, *halves = vectors([consumed(record, optimizer, 0) or {} for record in (one, *parts)])
        if not all(bool(v.isfinite().all()) for v in (whole, *halves)):
            raise CannotDecide(f"the gradient of the declared loss is not finite on {self.cut.which(halves_of.rows)}")
        found = combination(whole, halves)
        if found is None or found.residual > separable(bound(one, *parts)):
            raise CannotDecide(
                f"along axis {self.cut.axis} the declared loss is no weighted sum over rows: accumulation need not be "
                f"equal{'' if self.cut.declared else ', unless rows lie along another axis (batch_dim=)'}"
            )
        return found.weights

    def excess_of_second_window(self, split: Split) -> Combination | None:
        """What the second window holds too much, as a weighted sum of the first window's micro-batches; of the
        parameters where it does."""
        o = split.optimizer
        one, many = consumed(self.one(split), o, 1) or {}, consumed(self.many(split), o, 1) or {}
        differing = {
            name
            for name in many
            if agreement(*vectors([{name: one[name]} if name in one else {}, {name: many[name]}])).difference
            > split.bound
        }
        gradients = (one, many, *self._own_gradients(split))
        expected, got, *basis = vectors([{n: v for n, v in g.items() if n in differing} for g in gradients])
        return combination(got - expected, basis)

    def grows_with_windows(self, split: Split) -> bool:
        """Whether a part of the loss is counted once for each micro-batch.

        Over the same rows, what windows of 4 give too much is then three times what windows of 2 give. It is about as
        much in the second window as in the first; what grows from one micro-batch to the next is something else.
        """
        rows = self.cut.valid.order[: len(self.cut.valid.order) // 4 * 4]
        if not rows:
            return False
        one = self._run(Composition(rows))
        excess: dict[tuple[int, int], torch.Tensor] = {}
        for k in (2, 4):
            many = self.many(self.compared(Composition.evenly(rows, k)))
            for nth in range(WINDOWS):
                pair = [consumed(record, split.optimizer, nth) or {} for record in (one, many)]
                whole, got = vectors(pair)
                excess[k, nth] = got - whole
        sizes = {key: float(torch.linalg.vector_norm(v)) for key, v in excess.items()}
        steady = all(0.5 < sizes[k, 1] / max(sizes[k, 0], 1e-300) < 2.0 for k in (2, 4))
        return steady and float(torch.linalg.vector_norm(excess[4, 0] - 3 * excess[2, 0])) <= 1e-6 * sizes[4, 0]

    def one(self, split: Split) -> Record:
        """The run over whole batches."""
        return self._run(split.composition.whole())

    def many(self, split: Split) -> Record:
        """The run over micro-batches."""
        return self._run(self._items(split), knob=split.accumulate)

    def agrees_without(self, split: Split, kind: Kind) -> LeftOut | None:
        """Whether windows and one batch give the same gradients and the same weights once changes of this kind are left
        out; what was left out over the micro-batches then, and None where they still differ."""
        left: list[LeftOut] = []

        def around(record: Record) -> Callable[[Watch], tuple[AbstractContextManager[Any]]]:
            number = passes(record, split.optimizer)[1]

            def enter(watch: Watch) -> tuple[AbstractContextManager[Any]]:
                left.append(LeftOut(watch, kind, split.optimizer, number))
                return (left[-1].on(),)

            return enter

        one, many = self.one(split), self.many(split)
        around_one, around_many = around(one), around(many)
        if kind in ("rates", "hooks"):
            one = self._run(split.composition.whole(), contexts=(around_one,), may_raise=True)
        many = self._run(self._items(split), knob=split.accumulate, contexts=(around_many,), may_raise=True)
        last = left[-1]
        left.clear()  # the run is known by its contexts, and each of these holds the loop's objects
        if one.raised or many.raised or many.rounds != one.rounds or not last.any:
            return None
        found = agreements(one, many, split.optimizer, WINDOWS)
        equal = bool(found) and all(a.difference <= split.bound for a in found)
        return last if equal and updates_apart(one, many) <= CLOSE else None

    def divides_by_a_constant(self, split: Split) -> bool:
        """Whether a window of k copies of the whole batch gives the one batch's gradient: the loop then divides by a
        number of rows from its settings, which parts of a batch do not have."""
        rows, k = split.composition.rows, split.accumulate
        copies = self._run(Composition(rows * k, (len(rows),) * k))
        return first_step_difference(self.one(split), copies, split.optimizer) <= split.bound

    def difference_when_reversed(self, split: Split) -> float:
        """The difference that reversing the rows of the one batch makes: rounding, where rows do not interact."""
        backwards = self._run(Composition(split.composition.rows[::-1]))
        return first_step_difference(self.one(split), backwards, split.optimizer)

    def _depends_on(self, numbers: Mapping[Path, float], split: Split) -> bool:
        """Whether the gradient changes with these numbers of the batch."""
        if not numbers:
            return False
        one, rows = self.one(split), split.composition.rows
        change = Doubled(len(self.cut.valid.order), tuple(numbers))
        double = self._run(Composition(rows, change=change), may_raise=True)
        return double.raised is not None or first_step_difference(one, double, split.optimizer) > bound(one, double)

    def _steps_with_each(self, one: Record, many: Record, optimizer: int, composition: Composition) -> bool:
        """Whether an optimizer is meant to step with every micro-batch, next to another that waits for the window's
        end: it consumes the first micro-batch's own gradient, undivided."""
        others = [o for o in optimizers(one) if o != optimizer and step_count(many, o) == step_count(one, o)]
        if not others or step_count(many, optimizer) < len(composition.parts) * step_count(one, optimizer):
            return False
        first = self._parts(composition)[0]
        return first_step_difference(first, many, optimizer) <= bound(first, many)

    def _weighted(self, record: Record, split: Split) -> Combination:
        """The first gradient consumed in a run, as a weighted sum of the micro-batches' own."""
        whole, *basis = vectors([consumed(record, split.optimizer, 0) or {}, *self._own_gradients(split)])
        found = combination(whole, basis)
        if found is None:
            raise CannotDecide(
                f"the gradients of {split.accumulate} micro-batches are linearly dependent, or one of them is zero; "
                "give a batch with rows that differ",
                needs="a batch with rows that differ",
            )
        return found

    def _own_gradients(self, split: Split) -> list[Gradient]:
        return [consumed(r, split.optimizer, 0) or {} for r in self._parts(split.composition)]

    def _require_repeatable(self, split: Split) -> None:
        """Draws of the loop's own (noise, a shuffle, stochastic depth) make two runs differ by more than rounding."""
        for fit_seed in (None, RESEEDED):
            for items, k in ((split.composition.whole(), 1), (self._items(split), split.accumulate)):
                first = self._run(items, knob=k)
                again = self._run(items, knob=k, fit_seed=fit_seed, again=True)
                if first_step_difference(first, again, split.optimizer) <= bound(first, again):
                    continue
                if fit_seed is None:
                    raise Unreliable(
                        "two identical runs of the loop differ: see determinism, and seed what draws there"
                    )
                raise CannotDecide(
                    f"the loop draws random numbers from python's or numpy's generators{self._gradients.outside_draw()}"
                    ": with another seed for fit the gradient differs; draw them with torch to have windows compared"
                )

    def _items(self, split: Split) -> Composition:
        """What the run over micro-batches is given: whole batches, where the loop splits these by itself."""
        return split.composition.whole() if split.loop_splits else split.composition

    def _parts(self, composition: Composition) -> list[Record]:
        """Runs on one micro-batch each."""
        made = [part.record for part in self._gradients.parts(composition)]
        for record in made:
            self._require_returned(record, composition)
        return made

    def _run(self, composition: Composition, *, may_raise: bool = False, **how: Any) -> Record:
        """The run over windows composed so. Raises ``CannotDecide`` where ``fit`` raises on them, unless it may."""
        record = self._gradients.windows(composition, **how)
        if not may_raise:
            self._require_returned(record, composition)
        return record

    def _require_returned(self, record: Record, composition: Composition) -> None:
        if record.raised is None:
            return
        given, k = self.cut.which(composition.rows), len(composition.parts)
        if k > 1:
            knob = f" with accumulate={k}" if self._gradients.splits else ""
            given = f"{given.removeprefix('a copy of ')} in {k} parts{knob}"
        give = self.cut.what_to_give()
        raise Refused(
            f"{self._gradients.calls} raised {record.raised.summary} on {given}, and not on the loop's own batches"
            f"{f'; give {give} if these are no batches for it' if give else ''}",
            needs=give.partition(" ")[0],
        )


def _cut(evidence: Evidence, axis: int | None = None) -> MicroBatches:
    seen, loop = evidence.run(), evidence.fresh_loop()
    kind = UncutBatches if evidence.shared(makes_own_data) else MicroBatches
    with preserved():
        return kind.of(loop, seen, WINDOWS, axis=axis)
