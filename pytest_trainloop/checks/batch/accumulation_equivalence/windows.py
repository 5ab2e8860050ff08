"""Windows of k micro-batches, and one batch of the same rows: the runs of both.

See docs/how-it-decides.md#accumulation-as-weights. Two windows are run. In float64 both ways must give the same
gradients, but for rounding: the gradients of the rows are summed in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.batch.accumulation_equivalence.causes import REPAIRS_IN, found
from pytest_trainloop.core.errors import CannotDecide, Refused, Unreliable
from pytest_trainloop.core.wording import direction
from pytest_trainloop.instruments.batches import totals
from pytest_trainloop.instruments.batches.micro_batches import MicroBatches
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.instruments.batches.row_axis import other_axis
from pytest_trainloop.instruments.compositions.composition import SHOWN, Composition
from pytest_trainloop.instruments.compositions.search import in_parts, smallest
from pytest_trainloop.instruments.compositions.step_gradients import StepGradients
from pytest_trainloop.instruments.compositions.step_runs import StepRuns, bound, precision
from pytest_trainloop.instruments.gradients import compare
from pytest_trainloop.instruments.gradients.tolerances import RESEEDED
from pytest_trainloop.instruments.gradients.vectors import Combination, combination, consumed, steps_of, vectors
from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.instruments.tracing.statements import call_in_function_of
from pytest_trainloop.recording.events import Backward, Step
from pytest_trainloop.runs.process_state import preserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.instruments.gradients.compare import Agreement
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

WINDOWS = 2

WINDOW = 4
"""Micro-batches a window where the end of the data, or a warm-up of the batch size, is looked at."""

CLOSE = 1e-6
"""How near a factor must come to a whole one: weights are good to 1e-8, and one token in a million changes 1e-6."""

ENOUGH = 3
"""Steps that two runs must have in common to show that the knob is not used: equal weights after several of them need
equal steps."""


@dataclass(frozen=True, slots=True)
class Doubled:
    """A batch in which these numbers are doubled."""

    rows: int
    paths: tuple[Path, ...]

    def __str__(self) -> str:
        return f"{', '.join('.'.join(map(str, path)) for path in self.paths)} doubled"

    def apply(self, batch: Any) -> Any:
        return totals.doubled(batch, self.rows, self.paths)


@dataclass(frozen=True)
class Split:
    """The run over windows of micro-batches, ``many``, and the run over one batch of the same rows for each window."""

    by: Accumulation
    composition: Composition
    """The micro-batches of one window."""
    loop_splits: bool
    """Whether the loop splits each whole batch by itself."""
    one: Record
    many: Record
    optimizer: int
    """The optimizer whose gradients differ most."""
    windows: tuple[Agreement, ...]
    """The gradients of the one batch and of the micro-batches that its steps read."""

    @property
    def accumulate(self) -> int:
        return len(self.composition.parts)

    @property
    def items(self) -> Composition:
        """What the run over micro-batches is given: whole batches, where the loop splits these by itself."""
        return self.composition.whole() if self.loop_splits else self.composition

    @cached_property
    def bound(self) -> float:
        """By how much the gradients may differ from rounding."""
        return bound(self.one, self.many)

    @cached_property
    def steps(self) -> tuple[int, int]:
        """The optimizer's steps over whole batches and over micro-batches."""
        return compare.step_count(self.one, self.optimizer), compare.step_count(self.many, self.optimizer)

    @cached_property
    def first_window(self) -> int:
        """Micro-batches before its first step."""
        return compare.micro_batches(self.one, self.many, self.optimizer)

    @property
    def equal(self) -> bool:
        """Whether every step came when it should and read what it should."""
        return self.steps[0] == self.steps[1] and all(w.difference <= self.bound for w in self.windows)

    @property
    def steps_too_early(self) -> bool:
        return self.steps[1] > self.steps[0] or self.first_window < self.accumulate

    @property
    def from_the_first_window(self) -> bool:
        return self.steps_too_early or self.windows[0].difference > self.bound

    @cached_property
    def updates(self) -> float:
        """The difference of the weights at the end, over how far they moved."""
        one, many = self.one, self.many
        comparable = many.rounds == one.rounds or compare.moving_steps(many) == compare.moving_steps(one)
        return compare.update_difference(one, many) if comparable else float("inf")

    @property
    def lr_differs(self) -> bool:
        one, many = (compare.learning_rates(r, self.optimizer, len(self.windows)) for r in (self.one, self.many))
        return one != many

    @cached_property
    def backward(self) -> Backward | None:
        """The first backward pass that brings the optimizer gradients."""
        return compare.first_backward(self.many, self.optimizer)

    @cached_property
    def step(self) -> Step | None:
        return next(iter(steps_of(self.many, self.optimizer)), None)

    def tensor_differences(self) -> dict[str, Agreement]:
        """The first gradient that differs, of one batch and accumulated, at each parameter."""
        nth = next((n for n, window in enumerate(self.windows) if window.difference > self.bound), 0)
        return compare.by_tensor(*(consumed(record, self.optimizer, nth) or {} for record in (self.one, self.many)))

    def facts(self) -> dict[str, Any]:
        """What templates may name of every comparison."""
        window = next((w for w in self.windows if w.difference > self.bound), self.windows[0])
        return {
            "k": self.accumulate,
            "ratio": window.ratio,
            "direction": direction(window.cosine),
            "parameters": len(consumed(self.one, self.optimizer, 0) or ()),
            "precision": precision(self.one, self.many),
            "updates": self.updates,
            "got": "",
            "full": "",
        }

    def found(
        self, cause: str, variant: str = "", names: tuple[str, ...] = (), at: Any = None, **facts: Any
    ) -> Finding:
        """A finding at the first backward pass, or at the step for what lies there, if ``at`` is not given."""
        at_step = cause in ("stepped_inside_window", "carried_over")
        names = names or (("optimizer.step()",) if at_step else ("loss.backward()",))
        at = at or (self.step if at_step else self.backward)
        made = found(cause, at, names, variant, **{**self.facts(), **facts})
        return replace(made, repair=made.repair or REPAIRS_IN.get((compare.library_around(self.backward), cause), ""))


class Accumulation:
    """The comparisons over one cut of the batches. It holds no state besides the runs that were made."""

    def __init__(self, gradients: StepGradients) -> None:
        self.gradients = gradients
        self.cut = gradients.cut
        self.shown: Split | None = None
        """What was reported."""

    @classmethod
    def of(cls, evidence: Evidence) -> Accumulation:
        """Over as many windows of the first batches as an accumulating run has."""
        return cls(StepGradients(_cut(evidence), evidence.shared(StepRuns.of), 1, splits=True))

    @classmethod
    def along_other_axis(cls, evidence: Evidence) -> Accumulation | None:
        """The same with the batch cut along its second axis; None where it is known that rows lie along the first."""
        axis = other_axis(evidence.fresh_loop(), evidence.shared(cls.of).cut.batches[0])
        return None if axis is None else evidence.shared(cls.of).cut_as(_cut(evidence, axis))

    @classmethod
    def of_loss(cls, evidence: Evidence) -> Accumulation:
        """The same, for a plain loop over the declared loss."""
        return cls(StepGradients(_cut(evidence), StepRuns.of_loss(evidence), 1, splits=False))

    def cut_as(self, cut: MicroBatches) -> Accumulation:
        return Accumulation(self.gradients.cut_as(cut))

    def at_each_size(self) -> list[Split]:
        """The comparison at each number of micro-batches that the rows allow.

        Where micro-batches differ from one batch, and the gradient depends on a number that the batch holds besides its
        rows, the comparison is made again, and so are those after it, with that number recomputed for each part.
        Raises ``CannotDecide`` where the loop cannot be run so, or where a number cannot be recomputed.
        """
        try:
            return self._at_each_size()
        except CannotDecide:
            if self.cut.split_batch is None or self.cut.whole:
                raise
        return self.cut_as(self.cut.of_whole_batches())._at_each_size()

    def _at_each_size(self) -> list[Split]:
        made, splits, refused = self, list[Split](), None
        for k in self.cut.sizes():
            try:
                split = made.split(k)
            except Refused as reason:
                refused = refused or reason  # other numbers may do: the rows must be divided evenly
                continue
            if not split.equal and made is self and self._depends_on(self.cut.shared, split):
                made = self.cut_as(self.cut.recounting())
                split = made.split(k)
                unknown = made.cut.unknown
                if not split.equal and made._depends_on(unknown, split):
                    raise CannotDecide(
                        f"the batch holds {', '.join('.'.join(map(str, path)) for path in unknown)} besides its rows: "
                        "the gradient depends on it, and what it should be for a part of the rows is not known; give "
                        "split_batch=",
                        needs="split_batch=",
                    )
            splits.append(split)
        if refused is not None and not splits:
            raise refused
        return splits

    def _depends_on(self, numbers: Mapping[Path, float], split: Split) -> bool:
        """Whether the gradient changes with these numbers of the batch."""
        if not numbers:
            return False
        change = Doubled(len(self.cut.valid.order), tuple(numbers))
        double = self.run(Composition(split.composition.rows, change=change), may_raise=True)
        difference = compare.first_step_difference(split.one, double, split.optimizer)
        return double.raised is not None or difference > bound(split.one, double)

    def split(self, k: int) -> Split:
        """One comparison, over as many rows as there are. Raises ``CannotDecide`` where the loop cannot be run so."""
        return self.compared(Composition.evenly(self.cut.valid.order[: self.cut.rows(k)], k))

    def compared(self, composition: Composition) -> Split:
        """The comparison of windows of these micro-batches. Raises ``CannotDecide`` as ``split`` does."""
        k, due = len(composition.parts), len(self.cut.batches)
        one, many = self.run(composition.whole()), self.run(composition)
        loop_splits = False
        if many.steps > one.steps:
            whole = self.run(composition.whole(), knob=k)
            loop_splits = compare.cuts_by_itself(one, whole, k)
            many = whole if loop_splits else many
        stepping = compare.optimizers(one)
        if not any(compare.step_count(one, o) >= due for o in stepping):
            raise CannotDecide(
                f"with accumulate=1 the loop made {one.steps} steps over {due} batches, where {due} are due"
            )
        if many.steps < one.steps:
            raise CannotDecide(
                f"with accumulate={k} the loop made {many.steps} steps over {due * k} micro-batches, where {one.steps} "
                "are due: it counts its windows in another way, or collects more batches before it steps"
            )
        judged = [o for o in stepping if not self._steps_with_each(one, many, o, composition)]
        return self.between(one, many, composition, judged, loop_splits)

    def between(
        self, one: Record, many: Record, composition: Composition, judged: Sequence[int] = (), loop_splits: bool = False
    ) -> Split:
        """The comparison of two runs, by the one of these optimizers, or of all, whose gradients differ most."""
        windows = {o: agreements(one, many, o, len(self.cut.batches)) for o in judged or compare.optimizers(one)}

        def largest_difference(optimizer: int) -> float:
            same = compare.step_count(one, optimizer) == compare.step_count(many, optimizer)
            return max((a.difference for a in windows[optimizer]), default=0.0) if same else float("inf")

        worst = max(windows, key=largest_difference)
        return Split(self, composition, loop_splits, one, many, worst, tuple(windows[worst]))

    def _steps_with_each(self, one: Record, many: Record, optimizer: int, composition: Composition) -> bool:
        """Whether an optimizer should step with every micro-batch, next to another that waits for the window's
        end: it reads the first micro-batch's own gradient, undivided."""
        steps = {o: (compare.step_count(one, o), compare.step_count(many, o)) for o in compare.optimizers(one)}
        waits = any(due == made for o, (due, made) in steps.items() if o != optimizer)
        if not waits or steps[optimizer][1] < len(composition.parts) * steps[optimizer][0]:
            return False
        first = self.parts(composition)[0]
        return compare.first_step_difference(first, many, optimizer) <= bound(first, many)

    def weighted(self, record: Record, optimizer: int, composition: Composition) -> Combination:
        """The first gradient that a run reads, as a weighted sum of the micro-batches' own. Raises ``CannotDecide``
        where these are linearly dependent."""
        whole, *basis = vectors([consumed(r, optimizer, 0) or {} for r in (record, *self.parts(composition))])
        made = combination(whole, basis)
        if made is None:
            raise CannotDecide(
                f"the gradients of {len(composition.parts)} micro-batches are linearly dependent, or one of them is "
                "zero or not finite; give a batch with rows that differ",
                needs="a batch with rows that differ",
            )
        return made

    def counts(self, one_batch: Combination, composition: Composition) -> list[int] | None:
        """The valid targets of each micro-batch, where they weigh so in one batch."""
        return self.cut.valid.explaining(one_batch.weights, [part.rows for part in composition.split()])

    def require_repeatable(self, split: Split) -> None:
        """Draws of the loop's own (noise, a shuffle, stochastic depth) make two runs differ by more than rounding."""
        for fit_seed in (None, RESEEDED):
            for items, k, first in (
                (split.composition.whole(), 1, split.one),
                (split.items, split.accumulate, split.many),
            ):
                again = self.run(items, knob=k, fit_seed=fit_seed, again=True)
                if compare.first_step_difference(first, again, split.optimizer) <= bound(first, again):
                    continue
                if fit_seed is None:
                    raise Unreliable(
                        "two identical runs of the loop differ: see determinism, and seed what draws there"
                    )
                raise CannotDecide(
                    f"the loop draws random numbers from python's or numpy's generators{self.gradients.outside_draw()}"
                    ": with another seed for fit the gradient differs; draw them with torch to have windows compared"
                )

    def parts(self, composition: Composition) -> list[Record]:
        """Runs on one micro-batch each."""
        made = [part.record for part in self.gradients.parts(composition)]
        for record in made:
            self._require_returned(record, composition)
        return made

    def run(self, composition: Composition, *, may_raise: bool = False, **how: Any) -> Record:
        """The run over windows composed so. Raises ``CannotDecide`` where ``fit`` raises on them, unless it may."""
        record = self.gradients.windows(composition, **how)
        if not may_raise:
            self._require_returned(record, composition)
        return record

    def _require_returned(self, record: Record, composition: Composition) -> None:
        if record.raised is None:
            return
        given, k = self.cut.which(composition.rows), len(composition.parts)
        if k > 1:
            knob = f" with accumulate={k}" if self.gradients.splits else ""
            given = f"{given.removeprefix('a copy of ')} in {k} parts{knob}"
        give = self.cut.what_to_give()
        raise Refused(
            f"{self.gradients.calls} raised {record.raised.summary} on {given}, and not on the loop's own batches"
            f"{f'; give {give} if these are no batches for it' if give else ''}",
            needs=give.partition(" ")[0],
        )


def _cut(evidence: Evidence, axis: int | None = None) -> MicroBatches:
    seen, loop, own = evidence.run(), evidence.fresh_loop(), evidence.shared(makes_own_data)
    with preserved():
        return MicroBatches.uncut(loop, WINDOWS) if own else MicroBatches.of(loop, seen, WINDOWS, axis=axis)


def agreements(one: Record, many: Record, optimizer: int, windows: int) -> list[Agreement]:
    """How far the gradients agree that the optimizer's first steps read."""
    pairs = [(consumed(one, optimizer, n), consumed(many, optimizer, n)) for n in range(windows)]
    return [compare.agreement(*vectors([a, b])) for a, b in pairs if a is not None and b is not None]


def stepped_too_early(evidence: Evidence, split: Split) -> Finding:
    """A step before all micro-batches of its window had their backward pass."""
    knob = evidence.knobs["accumulate"]
    if _knob_unused(split):
        return split.found("stepped_inside_window", "knob unused", (knob,), knob=knob)
    # windows that grow step by step up to the knob are a warm-up of the batch size
    sizes = compare.window_sizes(evidence.run(accumulate=WINDOW))[:-1]  # the last may be what is left of the data
    if sizes == sorted(sizes) and len(set(sizes)) > 2:
        raise CannotDecide(
            f"windows grow during training ({', '.join(map(str, sizes))} backward passes a step): no two runs are "
            "comparable"
        )
    due, steps = split.steps
    facts: dict[str, Any] = {"steps": steps if steps > due else 0, "due": due, "done": max(1, split.first_window)}
    if compare.library_around(split.backward) == "accelerate" != compare.library_around(split.step):
        lines = evidence.shared(MadeAt.of)
        change = lines.prepare() or lines.optimizer()
        return split.found("stepped_inside_window", "not prepared", change=change, **facts)
    return split.found("stepped_inside_window", **facts)


def _knob_unused(split: Split) -> bool:
    """Whether with the knob at 1 the loop backpropagates and steps the same over the micro-batches, bit for bit."""
    courses = []
    for record in (split.many, split.by.run(split.items, knob=1, may_raise=True)):
        events = sorted([*record.of(Backward), *record.of(Step)], key=lambda event: event.at)
        courses.append([[r.value for r in e.roots] if isinstance(e, Backward) else None for e in events])
    return courses[0] == courses[1] and courses[0].count(None) >= ENOUGH


def last_window(evidence: Evidence) -> Iterator[Finding]:
    """A window that is open when the data end."""
    try:
        record = evidence.run(accumulate=WINDOW)
    except Refused:
        return  # so many micro-batches are none that the loop takes
    if left := Ledger(record).left_open():
        facts: dict[str, Any] = {"left": len(left), "items": record.items, "window": WINDOW}
        step = next(iter(record.innermost_steps()), None)
        facts["change"] = "" if step is None else call_in_function_of(step.site, left[0].backward.site)
        yield found("last_window_lost", left[0].backward, ("optimizer.step()",), level="advice", **facts)


def shrunk(
    evidence: Evidence, split: Split, finding: Finding, also: Callable[[Split], bool] = lambda smaller: True
) -> Finding:
    """The finding with the smallest composition of rows that shows it, for which ``also`` holds."""
    shown, by, k, cut = split, split.by, split.accumulate, split.by.cut
    size = len(split.composition.rows) // k
    if not cut.whole and size > 1:
        if split.from_the_first_window:
            by = by.cut_as(replace(cut, batches=cut.batches[:1]))
        rows, counts = split.composition.rows, cut.valid.counts
        if finding.cause == "mean_of_means":
            # those with the fewest and the most valid targets in turn; they come in this order
            rows = tuple(dict.fromkeys(row for pair in zip(rows, reversed(rows), strict=True) for row in pair))
        elif counts:  # those with a number of valid targets that most have, then all others
            often = [counts[0][row] for row in rows]
            rows = tuple(sorted(rows, key=lambda row: (-often.count(counts[0][row]), counts[0][row])))

        def shows(composition: Composition) -> bool:
            smaller = by.compared(composition)
            return _same_fault(smaller, split) and also(smaller)

        least = smallest(in_parts(rows, k, most=size - 1), shows, evidence=evidence)
        shown = split if least is None else by.compared(least)
    return replace(finding, smallest=_described(shown), composition=shown.composition.as_data())


def _same_fault(smaller: Split, known: Split) -> bool:
    """Whether the same optimizer goes wrong in the same way: a step too early, or the first window, by the same factor
    where it is one, or only a later window."""
    if smaller.optimizer != known.optimizer or smaller.equal or smaller.updates <= smaller.bound:
        return False
    if smaller.steps_too_early != known.steps_too_early or smaller.from_the_first_window != known.from_the_first_window:
        return False
    if known.steps_too_early or not known.from_the_first_window:
        return True
    a, b = smaller.windows[0], known.windows[0]
    if b.cosine <= 1 - CLOSE:
        return a.difference > 1e3 * smaller.bound
    return a.cosine > 1 - CLOSE and abs(a.ratio - b.ratio) <= CLOSE * b.ratio


def _described(split: Split) -> str:
    """Its micro-batches in words: ``2 micro-batches: row 3, and row 1, with 7 and 2 valid targets``."""
    composition, k, made = split.composition, split.accumulate, split.by
    if made.cut.whole:
        return f"the batch in {k} parts, as split_batch makes them"
    if split.loop_splits or made.cut.split_batch or len(composition.rows) > SHOWN:
        return f"{len(composition.rows)} rows as {list(composition.parts)}"
    try:
        weighted = made.weighted(split.one, split.optimizer, composition) if made.cut.valid.counts else None
        counts = made.counts(weighted, composition) if weighted else None
    except (CannotDecide, Unreliable):
        counts = None
    if counts is None or len(set(counts)) < 2:
        return str(composition)
    return f"{composition}, with {(' and ' if k == 2 else ', ').join(map(str, counts))} valid targets"
