"""The loop on rows with padding, against the loop on the same rows with less of it.

Both runs are made in float64, from the same weights, without dropout and with running statistics. What their first
steps consume must agree but for rounding (``gradients.tolerances.ROUNDING``): no real position was changed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop import nested
from pytest_trainloop.checks.batch.padding_invariance.comparison import BOUNDS, Comparison
from pytest_trainloop.checks.batch.padding_invariance.counterfactuals import (
    BATCH_STATISTICS,
    PATHS,
    BlockedPaths,
    PaddingFlow,
    PathCall,
)
from pytest_trainloop.checks.batch.padding_invariance.meetings import Meeting, TargetMeetings
from pytest_trainloop.checks.batch.padding_invariance.slices import BatchSlice, cut, shorter_rows, slices
from pytest_trainloop.checks.batch.padding_invariance.smaller import composed, slice_of, stretches
from pytest_trainloop.compositions.search import smallest
from pytest_trainloop.errors import CannotDecide, Unreliable
from pytest_trainloop.gradients.compare import Agreement, agreement, by_tensor, first_step_difference, optimizers
from pytest_trainloop.gradients.tolerances import RESEEDED
from pytest_trainloop.gradients.vectors import Gradient, consumed, vectors
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.outside_draws import told
from pytest_trainloop.runs.same_start import SameStart, from_same_start
from pytest_trainloop.runs.shared_draws import first_unlike

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.batches.padding import PaddingMask
    from pytest_trainloop.compositions.composition import Composition
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan
    from pytest_trainloop.tracing.mode import WatchingMode

NONE: frozenset[str] = frozenset()
"""No path is blocked."""

STATISTICS = frozenset({BATCH_STATISTICS})
"""No path is blocked, and batch norms take the statistics of the batch."""


class PaddingRuns:
    """The runs behind ``padding_invariance``, each made once.

    ``declared``: the project's ``padding=`` is about this padding. ``configured``: the model's configuration is.
    ``lengths``: those of the batches that were looked
    at, or none where the project gives a single one. ``pad_ids``: those that models take for padding.
    """

    def __init__(
        self,
        batch: Any,
        padded: PaddingMask,
        window: int,
        evidence: Evidence,
        *,
        declared: bool,
        configured: bool,
        lengths: frozenset[int],
        others: Sequence[PaddingMask] = (),
        pad_ids: tuple[int, ...] = (),
    ) -> None:
        self.pad_ids = pad_ids
        self._batch = batch
        self._padded = padded
        self._evidence = evidence
        self._others = tuple(others)
        self._beside = tuple(g for g in others if g.grid == padded.grid)
        self.instead: PaddingRuns | None = None
        """All groups of this width as one, for a loop that takes them only so."""
        self._window = window
        self._plan, self._run_plan = evidence.plan(), evidence.rerun
        self._outside_draw = functools.partial(told, evidence)
        self._start = SameStart()
        self._runs: dict[object, tuple[Record, PaddingFlow]] = {}
        self._meetings: dict[BatchSlice, list[Meeting]] = {}
        self._count: int | None = None
        self._precision = "float64"
        self._runs_through = False
        self.found: Comparison | None = None
        self.declared, self._configured = declared, configured
        self.varying = len(lengths) > 1
        self._several = bool(lengths)

    @property
    def name(self) -> str:
        """A tensor of the group that is padded so, where there are several groups."""
        return self._padded.name

    @property
    def padded(self) -> PaddingMask:
        return self._padded

    @property
    def beside(self) -> tuple[PaddingMask, ...]:
        """Groups of the same width."""
        return self._beside

    def with_values(self, change: Callable[[Any, PaddingMask], Any]) -> dict[int, Gradient]:
        """The gradients of the whole batch, changed without its shape; none where the loop cannot be run so."""
        mode = NoRandomness()
        plan = replace(self._plan_over(change(self._batch, self._padded)), contexts=lambda _watch: (mode,))
        found = self._consumed(self._run_plan(plan))
        return {} if isinstance(found, str) else found

    def watched(self, mode: WatchingMode, before_item: Callable[[int, Any], None]) -> None:
        """Run the loop on the whole batch under a mode that looks at its calls, and at the batch before."""
        self._run_plan(replace(self._plan_over(self._batch), contexts=mode.contexts, before_item=before_item))

    @property
    def bound(self) -> float:
        """Within which equal gradients may differ by rounding."""
        return BOUNDS[self._precision]

    @property
    def reason(self) -> str:
        """What proves the padding."""
        return self._padded.reason

    @property
    def sure(self) -> bool:
        """Whether the project itself marks this as padding; a mask next to features may be of observations."""
        by_batch = self._padded.source == "lengths" or (self._padded.source == "mask" and self._padded.of_ids)
        return self.declared or self.varying or self._configured or by_batch

    @property
    def by_lengths(self) -> bool:
        return self._padded.source == "lengths" and not self.declared

    @property
    def of_ids(self) -> bool:
        """Whether what is padded are ids."""
        return self._padded.of_ids

    @property
    def batch(self) -> Any:
        """The batch that is sliced."""
        return self._batch

    def of_one_length(self, calls: list[PathCall]) -> bool:
        """Whether no batch can be of another length: several are given, all of one, and a table of positions has as
        many entries, or one more for padding. Positions counted from the left edge are then counted from the end too.
        """
        total = self._padded.grid.length
        fits = any(call.entries in (total, total + 1) for call in calls)
        return fits and self._several and not self.varying

    def for_longer_rows(self, calls: list[PathCall]) -> bool:
        """Whether tables of positions go on past these rows, so that the last position is not always the same one; not
        where several batches are given, all of one length."""
        return not self._several and all(call.entries > self._padded.grid.length + 1 for call in calls)

    @property
    def left(self) -> bool:
        return self._padded.side == "left"

    def first_difference(self) -> Comparison | None:
        """As ``_first_difference``, which is kept for whoever asks for ``tensors_apart``."""
        self.found = self._first_difference()
        return self.found

    def tensors_apart(self) -> dict[str, Agreement]:
        """Of the difference that was found, the gradients without padding and with it at each parameter."""
        if self.found is None:
            return {}
        blocked = STATISTICS if self.found.statistics else NONE
        fewer, more = (self._gradients(each, blocked) for each in (self.found.trimmed, self.found.full))
        if isinstance(fewer, str) or isinstance(more, str):
            return {}
        return {name: told for o in fewer if o in more for name, told in by_tensor(fewer[o], more[o]).items()}

    def _first_difference(self) -> Comparison | None:
        """The first slice whose gradient changes with its padding. Raises ``CannotDecide`` where none can be compared.

        The first padded position may be the end of a text, which the model predicts: what no longer changes once it is
        kept, and takes no other path, is no difference.
        """
        compared, refused, rounded = 0, "", 0.0
        for chosen in [*slices(self._padded, self._others), *shorter_rows(self._padded)]:
            if chosen.uneven and (compared or refused):
                continue
            found = self._compared(chosen)
            if isinstance(found, str):
                refused = found or refused
                continue
            compared += 1
            if not found.equal and found.within_float32 and not self._is_mixed_in(found):
                rounded = found.agreement.difference
            elif not found.equal and (not self._ends_a_text(found) or self._takes_a_path(found)):
                return found
            if self.declared and self.flow(found).normed is not None:
                other = self.compare(chosen, blocked=STATISTICS)
                if other is not None and not other.within_float32:
                    return other
        if rounded:
            raise CannotDecide(
                f"the gradient changes with padding by {rounded:.1e} only, as a table or a constant in float32 makes "
                "it: make these with torch, in the precision of the model, to have padding judged"
            )
        if not compared:
            raise CannotDecide(refused or "the gradient of rows with padding is zero: nothing is compared")
        return None

    def compare(self, full: BatchSlice, *, keep: int = 0, blocked: frozenset[str] = NONE) -> Comparison | None:
        """The slice with its padding and with ``keep`` positions of it, these paths blocked in both; None where the
        loop cannot be run so, or no gradient comes."""
        found = self._compared(full, keep=keep, blocked=blocked)
        return None if isinstance(found, str) else found

    def _compared(self, full: BatchSlice, *, keep: int = 0, blocked: frozenset[str] = NONE) -> Comparison | str:
        """The comparison, or why there is none; "" where no gradient comes."""
        trimmed = full.trimmed(keep)
        more, fewer = self._gradients(full, blocked), self._gradients(trimmed, blocked)
        if isinstance(more, str) or isinstance(fewer, str):
            if not self._runs_through and self._otherwise(full):
                return self._compared(full, keep=keep, blocked=blocked)
            return fewer if isinstance(fewer, str) else str(more)
        self._runs_through = True
        if not any(bool(g.isfinite().all()) for each in (fewer, more) for o in each.values() for g in o.values()):
            return "the gradient of rows that are all padded, or cut to their length, is not finite"
        found = [
            (o, agreement(*vectors([fewer[o], more[o]])))
            for o in fewer
            if o in more and any(bool(g.any()) for g in (*fewer[o].values(), *more[o].values()))
        ]
        if not found:
            return ""
        optimizer, worst = max(found, key=lambda pair: pair[1].difference)
        losses = self._loss(full, blocked), self._loss(trimmed, blocked)
        return Comparison(
            full, trimmed, worst, losses, len(fewer[optimizer]), self._precision, BATCH_STATISTICS in blocked
        )

    def _otherwise(self, chosen: BatchSlice) -> bool:
        """Whether there is another way to run a loop that raises: with groups of other tensors as wide as they are,
        with as many rows as in the batch, and then in float32, since a kernel of its own may take no other dtype."""
        rows = nested.rows(self._batch, self._padded.grid.batch_dim)
        if self._others:
            self._others = ()
        elif self._count is None and len(chosen.rows) < rows:
            self._count = rows
        elif self._precision == "float64":
            self._precision = "float32"
        else:
            return False
        self._runs.clear()
        self._start = SameStart()
        return True

    def _ends_a_text(self, found: Comparison) -> bool:
        """Whether one padded position makes the difference, and more of them none."""
        kept = self.compare(found.full, keep=1) if found.full.padded > 1 else None
        return kept is not None and kept.equal

    def _is_mixed_in(self, found: Comparison) -> bool:
        """Whether padding takes part by attention or pooling: exact, however small, as in a net at its start."""
        mixing = ({"attention"}, {"pooling"}, {"attention", "pooling"})
        return any(self.explained_by(found, frozenset(paths)) for paths in mixing)

    def _takes_a_path(self, found: Comparison) -> bool:
        return self.flow(found).inverted is not None or any(self.explained_by(found, frozenset({p})) for p in PATHS)

    def explained_by(self, found: Comparison, blocked: frozenset[str]) -> bool:
        """Whether both gradients agree with these paths blocked: without padding, or with one position of it, where
        that alone does not make them agree."""
        for keep in (0,) if self._ends_a_text(found) or found.full.padded < 2 else (0, 1):
            other = self.compare(found.full, keep=keep, blocked=blocked)
            if other is not None and other.equal and not math.isnan(other.losses[0]):
                return True
        return False

    def flow(self, found: Comparison, blocked: frozenset[str] = NONE) -> PaddingFlow:
        """How padding takes part in the run with padding."""
        return self._made(found.full, blocked)[1]

    def require_comparable(self, found: Comparison) -> None:
        """Raises ``CannotDecide`` or ``Unreliable`` where two runs differ by their random numbers as well."""
        drawn = [self._made(chosen, NONE)[1].drawn for chosen in (found.full, found.trimmed)]
        sizes = [] if self.left else [chosen.stop - chosen.start for chosen in (found.full, found.trimmed)]
        other = first_unlike(drawn[0], drawn[1], sizes)
        if other:
            raise CannotDecide(
                f"the loop draws random numbers by the length of the batch ({other}): no two are comparable"
            )
        for fit_seed in (None, RESEEDED):
            first, again = self._made(found.full, NONE)[0], self._run(found.full, NONE, fit_seed)[0]
            if all(first_step_difference(first, again, o) <= BOUNDS[self._precision] for o in optimizers(first)):
                continue
            if fit_seed is None:
                raise Unreliable("two identical runs of the loop differ: see determinism, and seed what draws there")
            raise CannotDecide(
                f"the loop draws random numbers from python's or numpy's generators{self._outside_draw()}: draw with "
                "torch"
            )

    def without_outputs(self, found: Comparison) -> Comparison | None:
        """The comparison without the gradient of padded outputs, if what is left of the difference is a factor: the
        share of real positions, or none."""
        for keep in range(min(2, found.full.padded)):
            other = self.compare(found.full, keep=keep, blocked=frozenset({"outputs"}))
            if other is not None and (other.equal or other.factor):
                return other
        return None

    def meetings(self, found: Comparison) -> list[Meeting]:
        """Where outputs at padded positions meet targets in the loss and get a gradient from them, or are reduced."""
        if found.full in self._meetings:
            return self._meetings[found.full]
        mode = TargetMeetings(found.full.span, self._count or len(found.full.rows), self._padded)
        plan = replace(self._plan_for(found.full), contexts=mode.contexts, before_item=mode.before_item)
        self._meetings[found.full] = [] if self._run_plan(plan).raised else mode.found
        return self._meetings[found.full]

    def agrees_with(self, found: Comparison, change: Callable[[Any, PaddingMask, BatchSlice], Any]) -> bool:
        """Whether the gradient with padding, changed without its shape, is that without padding."""
        given = cut(self._batch, self._padded, found.full, count=self._count, others=self._others)
        mode = NoRandomness()
        plan = replace(self._plan_over(change(given, self._padded, found.full)), contexts=lambda _watch: (mode,))
        more, fewer = self._consumed(self._run_plan(plan)), self._gradients(found.trimmed, NONE)
        if isinstance(more, str) or isinstance(fewer, str) or not more.keys() & fewer.keys():
            return False
        return all(agreement(*vectors([fewer[o], more[o]])).difference <= self.bound for o in fewer if o in more)

    def path_calls(self, found: Comparison) -> list[PathCall]:
        """Calls of any path that padding takes part in."""
        return self.flow(found, frozenset(PATHS)).blocked

    def backward(self, found: Comparison) -> str:
        """The line where the loss is backpropagated."""
        record = self._made(found.full, NONE)[0]
        return next((str(b.place) for b in record.backwards()), "")

    def _loss(self, chosen: BatchSlice, blocked: frozenset[str]) -> float:
        """The first value that backward is called on."""
        record = self._made(chosen, blocked)[0]
        return next((root.value for b in record.backwards() for root in b.roots), math.nan)

    def smallest(self, found: Comparison, holds: Callable[[Comparison], bool]) -> Comparison | None:
        """The same difference, by the same cause, on one row and as few of its positions as the search finds; None
        where it is not there."""

        def shown(chosen: BatchSlice) -> Comparison | None:
            other = self.compare(chosen, blocked=STATISTICS if found.statistics else NONE)
            return other if other is not None and not other.equal and holds(other) else None

        one = replace(found.full, rows=found.full.rows[:1])
        if not (found.full.uneven or self._padded.joint):
            smaller = smallest(
                stretches(found.full, self.left, self._cut),
                lambda composition: shown(slice_of(composition, found.full)) is not None,
                evidence=self._evidence,
            )
            one = one if smaller is None else slice_of(smaller, found.full)
        return shown(one)

    def composition(self, chosen: BatchSlice) -> Composition:
        """The slice in the words of all checks that compose batches."""
        return composed(chosen, self._cut)

    def _cut(self, batch: Any, chosen: BatchSlice) -> Any:
        """All rows of a batch, cut to the positions of a slice."""
        every = replace(chosen, rows=tuple(range(self._padded.grid.rows)), uneven=True)
        return cut(batch, self._padded, every, others=self._others)

    def _gradients(self, chosen: BatchSlice, blocked: frozenset[str]) -> dict[int, Gradient] | str:
        """What the first step of each optimizer consumes, or why there is nothing to compare."""
        return self._consumed(self._made(chosen, blocked)[0])

    def _consumed(self, record: Record) -> dict[int, Gradient] | str:
        if record.raised is not None:
            return f"fit raised {record.raised.summary} on rows that are all padded, or cut to their length"
        low = [p.name for p in record.parameters if p.dtype in ("float16", "bfloat16")]
        if (self._precision == "float64" and not record.double) or low:
            return f"the loop computes in a low precision all the same ({', '.join((*record.lower, *low)[:1])})"
        found = {o: g for o in optimizers(record) if (g := consumed(record, o, 0))}
        return found or "the loop makes no optimizer step on these rows"

    def _made(self, chosen: BatchSlice, blocked: frozenset[str]) -> tuple[Record, PaddingFlow]:
        key = (chosen, blocked)
        if key not in self._runs:
            self._runs[key] = self._run(chosen, blocked)
        return self._runs[key]

    def _run(
        self, chosen: BatchSlice, blocked: frozenset[str], fit_seed: int | None = None
    ) -> tuple[Record, PaddingFlow]:
        mode = BlockedPaths(chosen.span, blocked)
        plan = replace(self._plan_for(chosen), contexts=mode.contexts, fit_seed=fit_seed)
        return self._run_plan(plan), mode.flow

    def _plan_for(self, chosen: BatchSlice) -> RunPlan:
        return self._plan_over(cut(self._batch, self._padded, chosen, count=self._count, others=self._others))

    def _plan_over(self, batch: Any) -> RunPlan:
        plan = from_same_start(self._plan, self._start, lambda _loop: [batch] * self._window)
        return replace(plan, double=self._precision == "float64", enough=lambda r: r.rounds >= 1, may_raise=True)
