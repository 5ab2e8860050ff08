"""The gradient that the loop's first step reads on a composition of rows."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.micro_batches import MicroBatches
from pytest_trainloop.instruments.batches.own_data import require_given_data
from pytest_trainloop.instruments.batches.row_axis import other_axis
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.compositions.step_runs import StepRuns, Variation, bound
from pytest_trainloop.instruments.gradients.compare import agreement, optimizers
from pytest_trainloop.instruments.gradients.vectors import (
    Combination,
    Gradient,
    combination,
    consumed,
    steps_of,
    vectors,
)
from pytest_trainloop.recording.events import Step
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.runs.row_draws import DrawAxes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from pytest_trainloop.instruments.compositions.step_runs import Contexts
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True)
class StepGradient:
    """What the first step of each optimizer reads in one run."""

    record: Record

    @cached_property
    def gradients(self) -> Mapping[int, Gradient]:
        """By optimizer, as the gradient was before any clipping; empty where ``refused``."""
        if self.record.raised is not None:
            return {}
        return {o: g for o in optimizers(self.record) if (g := consumed(self.record, o, 0)) is not None}

    @cached_property
    def value(self) -> float:
        """The sum of what was backpropagated before the first step; NaN where nothing was."""
        first = min((s.reads[0].at for s in self.record.of(Step) if s.reads), default=math.inf)
        values = [root.value for b in self.record.backwards() if b.at < first for root in b.roots]
        return sum(values) if values else math.nan

    @property
    def finite(self) -> bool:
        """Whether there is a gradient, and all of it is finite."""
        tensors = [values for g in self.gradients.values() for values in g.values()]
        return not self.refused and all(bool(values.isfinite().all()) for values in tensors)

    @property
    def refused(self) -> str:
        """Why there is no gradient; empty where there is one."""
        if self.record.raised is not None:
            return f"fit raised {self.record.raised.summary}"
        return "" if self.gradients else "the loop makes no optimizer step"


class StepGradients:
    """The step gradients of one loop, to be asked for by ``evidence.shared(StepGradients.of)``.

    Each is made once for equal compositions, in float64, from the same weights, without dropout, with running
    statistics, and with random numbers that are the same for a row in every composition: its own, or with a knob
    ``accumulate`` the same as all others', since what splits a batch inside ``fit`` does not say which rows a part has.
    Attributes: ``batch``, the example batch, with ``rows`` rows along ``axis``; ``window``, how many batches the loop
    takes before it steps.
    """

    def __init__(self, cut: MicroBatches, runs: StepRuns, window: int, *, splits: bool) -> None:
        self._cut, self._runs, self._splits = cut, runs, splits
        self._batches = object()
        """Tells the runs on these batches from those on others."""
        self.window = window

    @classmethod
    def of(cls, evidence: Evidence) -> StepGradients:
        """Raises ``CannotDecide`` where no rows can be taken from the batch, or no step reads a gradient of them."""
        seen, loop = evidence.run(), evidence.fresh_loop()
        if not seen.rounds:
            raise CannotDecide("the loop makes no optimizer step, so that no gradient is used")
        require_given_data(evidence, "none of other rows can be composed")
        with preserved():
            cut = MicroBatches.of(loop, seen, 1, example=True).recounting()
        if loop.split_batch is not None:
            raise CannotDecide(
                "split_batch= splits the batch: give batch_dim= to have single rows taken from it", needs="batch_dim="
            )
        return cls(cut, evidence.shared(StepRuns.of), _window(evidence), splits="accumulate" in evidence.knobs)

    def along_other_axis(self, evidence: Evidence) -> StepGradients | None:
        """The same with rows along the second axis; None where it is known that they lie along the first."""
        loop = evidence.fresh_loop()
        axis = other_axis(loop, self.batch)
        if axis is None:
            return None
        with preserved():
            return self.cut_as(MicroBatches.of(loop, evidence.run(), 1, example=True, axis=axis).recounting())

    @property
    def batch(self) -> Any:
        return self._cut.batches[0]

    @property
    def rows(self) -> int:
        return nested.rows(self.batch, self.axis)

    @property
    def axis(self) -> int:
        return self._cut.axis

    @property
    def cut(self) -> MicroBatches:
        """The batch with what is known of its rows: valid targets, totals."""
        return self._cut

    @property
    def splits(self) -> bool:
        """Whether micro-batches can be given: the loop has a knob ``accumulate``."""
        return self._splits

    @property
    def calls(self) -> str:
        """What the runs call of the project's."""
        return self._runs.calls

    def outside_draw(self) -> str:
        """The line that draws from python's or numpy's generator, in parentheses; empty where none is known."""
        return self._runs.outside_draw()

    def over(self, batch: Any) -> StepGradients:
        """The same of another batch of the loop's, from the same start."""
        return self.cut_as(replace(self._cut, batches=[batch]))

    def cut_as(self, cut: MicroBatches) -> StepGradients:
        """The same of other batches, or of these cut in another way, from the same start."""
        return StepGradients(cut, self._runs, self.window, splits=self._splits)

    def composed(self, composition: Composition, nth: int = 0) -> list[Any]:
        """The batch that is composed of the nth one, or its micro-batches, each a fresh copy. Raises ``CannotDecide``
        where rows cannot be taken."""
        batch = self._cut.batches[nth]
        if composition.change is not None:
            batch = composition.change.apply(nested.copy(batch))
        if composition.parts:
            return self._cut.split(batch, composition.rows, composition.parts)
        return [self._cut.taken(batch, composition.rows)]

    def at(self, composition: Composition, *, contexts: Sequence[Contexts] = ()) -> StepGradient:
        """The gradient on a composition, made once for equal ones with equal ``contexts``, which are entered around
        ``fit``, each a hashable function of the run's ``Watch``. Look at ``refused`` first.

        Raises ``CannotDecide`` where rows cannot be taken, or micro-batches are asked of a loop without the knob, whose
        windows have another number of them.
        """
        if composition.parts and not self._splits and len(composition.parts) != self.window:
            raise CannotDecide("the function has no knob accumulate: give it accumulate=1", needs="accumulate=1")
        if composition.parts and not self._splits and self._runs.axes is None:
            self.at(composition.whole())  # which finds the kinds of the axes of random draws
        repeated = 1 if composition.parts else self.window

        def first_step(rows: tuple[tuple[int, ...], ...] = ()) -> StepGradient:
            knob = len(composition.parts) or 1
            return self._first_step(composition, lambda: self.composed(composition) * repeated, knob, contexts, rows)

        if self._splits:
            made = first_step()
            return first_step() if self._learns(composition, made.record) else made
        if self._runs.axes is None and not composition.parts:
            first = first_step()
            if first.refused:
                return first
            self._runs.know(self._axes(composition, first))
        keyed = self._runs.axes is not None and self._runs.axes.axes
        return first_step(tuple(part.rows for part in composition.split()) * repeated if keyed else ())

    def _learns(self, composition: Composition, record: Record) -> bool:
        """Whether this run, the first of a loop with the knob, has to be made again: it drew what may have an axis of
        rows behind its first, and the axes are known now."""
        if self._runs.axes is not None or record.raised is not None:
            return False
        if not self._runs.log(record).may_have_rows_behind(len(composition.rows)):
            self._runs.know(DrawAxes())
            return False
        whole = composition.whole()
        made = self._first_step(whole, lambda: self.composed(whole) * self.window)
        self._runs.know(DrawAxes() if made.refused else self._axes(whole, made))
        return bool(self._runs.axes and self._runs.axes.axes)

    def _axes(self, composition: Composition, made: StepGradient) -> DrawAxes:
        """The kinds of the axes of random draws, from this run and one over another number of rows, which is made
        only where anything is drawn."""
        rows, drawn = composition.rows, self._runs.log(made.record)
        other = rows[: len(rows) // 2] or (*rows, (rows[0] + 1) % max(1, self.rows))
        if not drawn.shapes or len(set(other)) < len(other):
            return DrawAxes()
        changed = replace(composition, rows=other)
        again = self._first_step(changed, lambda: self.composed(changed) * self.window)
        logs = {len(rows): drawn, len(other): self._runs.log(again.record)}
        few, many = sorted(logs)
        return DrawAxes() if again.refused else DrawAxes.between(logs[many], logs[few], many, few)

    def drawn_otherwise(self) -> tuple[str, ...]:
        """Random draws of which it is not known what belongs to which row, each with its line: a reason why what should
        add up does not. Where no run was compared for it, two are made."""
        axes = self._runs.axes
        if axes is None or (self._splits and not axes.axes):
            whole = Composition(tuple(range(max(1, self.rows))))
            axes = self._axes(whole, self._first_step(whole, lambda: self.composed(whole) * self.window))
        return axes.unknown

    def parts(self, composition: Composition) -> list[StepGradient]:
        """The gradient of each micro-batch alone."""
        if self._cut.split_batch is None:
            return [self.at(part) for part in composition.split()]
        return [
            self._first_step((composition, i), lambda i=i: self.composed(composition)[i : i + 1] * self.window)  # type: ignore[misc]
            for i in range(len(composition.parts))
        ]

    def _first_step(
        self,
        key: Hashable,
        items: Callable[[], list[Any]],
        knob: int = 1,
        contexts: Sequence[Contexts] = (),
        rows: tuple[tuple[int, ...], ...] = (),
    ) -> StepGradient:
        varied = Variation(knobs=self._knobs(knob), contexts=tuple(contexts), until_first_step=True, rows=rows)
        return StepGradient(self._runs.made((self._batches, key), items, varied))

    def windows(self, composition: Composition, *, knob: int | None = None, **varied: Any) -> Record:
        """The run to the end over a window of each batch, composed so, with the knob ``accumulate`` at the number of
        micro-batches or at ``knob``; the fields of ``Variation`` change more. One in which ``fit`` raised is returned
        as well."""
        knobs = self._knobs(len(composition.parts) or 1 if knob is None else knob)
        repeated = 1 if composition.parts else self.window

        def run() -> Record:
            return self._runs.made(
                (self._batches, composition),
                lambda: [i for n in range(len(self._cut.batches)) for i in self.composed(composition, n) * repeated],
                Variation(knobs=knobs, **varied),
            )

        record = run()
        return run() if self._splits and self._learns(composition, record) else record

    def _knobs(self, accumulate: int) -> tuple[tuple[str, int], ...]:
        return (("accumulate", accumulate),) if self._splits else ()

    def differ(self, a: StepGradient, b: StepGradient) -> float:
        """The relative difference of two gradients, of the optimizer for which it is largest; infinite where one of
        them is refused, or an optimizer reads one on one side only."""
        if not a.gradients or a.gradients.keys() != b.gradients.keys():
            return math.inf
        return max(agreement(*vectors([a.gradients[o], b.gradients[o]])).difference for o in a.gradients)

    def bound(self, *made: StepGradient) -> float:
        """How far gradients that are equal may differ by rounding."""
        return bound(*(m.record for m in made))


def combined(whole: StepGradient, parts: Sequence[StepGradient], optimizer: int) -> Combination | None:
    """A gradient as a weighted sum of others; None where these are dependent, or the optimizer reads none of one."""
    made = [m.gradients.get(optimizer) for m in (whole, *parts)]
    if any(gradient is None for gradient in made):
        return None
    first, *others = vectors([gradient or {} for gradient in made])
    return combination(first, others)


def _window(evidence: Evidence) -> int:
    """Batches before a step, with the knob ``accumulate`` at 1 where there is one."""
    seen = evidence.run()
    name = evidence.knobs.get("accumulate")
    default = inspect.signature(evidence.make).parameters[name].default if name else 1
    taken = _taken_at_steps(seen)
    regular = len(taken) > 1 and taken[0] == taken[1] - taken[0]
    batches = taken[0] if regular else seen.items / seen.rounds  # the last window may be short
    return max(1, round(batches / (default if isinstance(default, int) else 1)))


def _taken_at_steps(record: Record) -> list[int]:
    """How many batches the loop had taken before each step of the first optimizer."""
    stepping = optimizers(record)
    if not stepping:
        return []
    backwards = record.backwards()
    ends = [step.reads[0].at for step in steps_of(record, stepping[0])]
    return [max((b.item for b in backwards if b.at < end), default=0) for end in ends]
