"""Runs of the loop over batches that an epoch may end with: one row, the loader's last, rows in which nothing counts.

Batches are composed of the project's own example by taking rows and cutting time: no value is made up. Each is given
to a fresh loop, again and again, for two steps.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.padding import Proof, padding_ids, read_paddings
from pytest_trainloop.batches.valid_targets import rows_without
from pytest_trainloop.checks.batch.edge_batches.last_batch import Ending, ending, last_batch
from pytest_trainloop.checks.batch.edge_batches.squeezes import Squeezes
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.compositions.step_gradients import StepGradients
from pytest_trainloop.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.recording.record import Record
from pytest_trainloop.records.finiteness import became_nonfinite
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.tracing.nonfinite import NonFiniteOrigins

if TYPE_CHECKING:
    from pytest_trainloop.compositions.step_runs import Contexts
    from pytest_trainloop.finding import SmallestBatch
    from pytest_trainloop.loop import Padding, TrainLoop
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan
    from pytest_trainloop.tracing.nonfinite import NonFiniteOrigin

Compose = Callable[["TrainLoop"], Any]
"""Makes a batch for a fresh loop, where it is none of rows of the example."""

STEPS = 2
"""Optimizer steps of a run: the second is made with what the first has left."""

COMPARED = 3
"""Batches whose widths are compared."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run over a batch went."""

    words: str
    """What the batch is."""
    record: Record
    composition: Composition | None = None
    """The same as data, where it is composed of rows of the example."""
    raised: str = ""
    """The exception that ended the run."""
    where: str = ""
    raised_by_loop: bool = False
    """Whether the project's own code raised it, by ``raise`` or ``assert``."""
    nonfinite: tuple[str, ...] = ()
    """Weights that were finite before the run."""
    nonfinite_loss: bool = False
    """Whether backward was called on a loss that is not finite."""
    origin: NonFiniteOrigin | None = None
    """The first operation whose result is not finite."""
    squeezes: Squeezes = field(default_factory=Squeezes)

    @property
    def told(self) -> SmallestBatch | None:
        return None if self.composition is None else self.composition.told()

    @property
    def ok(self) -> bool:
        return not self.raised and not self.nonfinite


@dataclass(slots=True)
class Edges:
    """The example batch, what is known of other batches, and the runs over what is composed of it."""

    gradients: StepGradients
    plan: RunPlan
    windows: RunPlan | None
    """The plan of a run that accumulates over two micro-batches."""
    run_plan: Callable[[RunPlan], Record]
    ending: Ending
    padding: Padding | None
    lengths: tuple[int, ...]
    """The length of each row, where the batch shows it."""
    padded_to: int
    widths_differ: bool
    """Whether other batches are padded to other lengths."""
    nothing_counts_in: dict[int, int]
    """Rows in which nothing counts, each with the number of its entries."""
    _one_row: Outcome | None = None

    @classmethod
    def of(cls, evidence: Evidence) -> Edges:
        """Raises ``CannotDecide`` where no batch can be composed."""
        seen, loop = evidence.run(), evidence.fresh_loop()
        windows = evidence.plan(accumulate=2) if "accumulate" in evidence.knobs else None
        if seen.raised is not None or became_nonfinite(seen):
            raise CannotDecide("the loop does not run through on its own batches: see the checks before this one")
        if not seen.steps:
            raise CannotDecide("the loop makes no optimizer step on its own batches")
        if loop.split_batch is not None or not isinstance(loop.batch_dim, (int, type(None))):
            raise CannotDecide(
                "split_batch= splits the batch: give batch_dim= to have single rows taken from it", needs="batch_dim="
            )
        gradients, plan = evidence.shared(StepGradients.of), evidence.plan()
        batch, cut = gradients.batch, gradients.cut
        if isinstance(batch, list) and not any(isinstance(item, torch.Tensor) for item in batch):
            raise CannotDecide("the batch is a list of items, and rows are taken along an axis of tensors only")
        with preserved():
            given = loop.batches
            lengths, padded_to = lengths_of(batch, loop)
            widths = {padded_to}
            if 1 in lengths and given is not None:
                widths.update(lengths_of(b, loop)[1] for b in first_batches(loop, COMPARED))
            return cls(
                gradients=gradients,
                plan=plan,
                windows=windows,
                run_plan=evidence.rerun,
                ending=Ending(drops=True) if _takes_all_data(seen) else ending(given),
                padding=loop.padding,
                lengths=lengths,
                padded_to=padded_to,
                widths_differ=len(widths - {0}) > 1,
                nothing_counts_in=rows_without(batch, nested.rows(batch, cut.axis), cut.axis, loop.padding, seen),
            )

    @property
    def batch(self) -> Any:
        """The example."""
        return self.gradients.batch

    @property
    def count(self) -> int:
        """The rows of the example."""
        return self.gradients.rows

    @property
    def first(self) -> Composition:
        """A row in which something counts, alone."""
        return Composition((self.counting[0],))

    @property
    def counting(self) -> list[int]:
        """The rows in which something counts, the fullest first; all of them where each lacks something."""
        valid = self.gradients.cut.valid
        order = valid.order[::-1] if valid.counts else valid.order
        return [row for row in order if row not in self.nothing_counts_in] or list(order)

    @property
    def one_row(self) -> Outcome:
        """The run over ``first``."""
        if self._one_row is None:
            squeezes = Squeezes()
            outcome = self.outcome("1 row", self.first, squeezes.contexts)
            self._one_row = replace(outcome, squeezes=squeezes)
        return self._one_row

    def leftover(self) -> Outcome | None:
        """The loader's last batch, where it has fewer rows than the others."""
        end = self.ending
        if end.drops or end.last is None or not end.rows < min(end.batch_size, self.count):
            return None
        words = "1 row" if end.rows == 1 else f"{end.rows} rows"
        if end.shuffles:
            rows = tuple(self.counting[: end.rows])
            return self.among_full(words, Composition(rows)) if len(rows) == end.rows else None
        return self.among_full(words, lambda loop: last_batch(loop.batches, end))

    @property
    def may_be_empty(self) -> bool:
        """Whether nothing may count in a whole batch: any row may be left over, or nothing counts in a quarter of the
        rows and the loop splits its batches."""
        split = self.windows is not None and 4 * len(self.nothing_counts_in) >= self.count
        return bool(self.nothing_counts_in) and (self.ending.leaves_any or split)

    def nothing_counts(self) -> Outcome | None:
        """A row in which nothing counts, alone; in a loop that accumulates, the second of two in its window."""
        if not self.nothing_counts_in or not self.one_row.ok:
            return None
        row, entries = next(iter(self.nothing_counts_in.items()))
        counting = f"0 of its {entries} entries count" if entries > 1 else "it has no label"
        if self.windows is None or self.ending.leaves_any:
            return self.among_full(f"row {row} alone: {counting}", Composition((row,)))
        words = f"row {row} as one of two micro-batches: {counting}"
        return self.among_full(words, Composition((row,)), self.windows)

    def among_full(self, words: str, made_of: Composition | Compose, plan: RunPlan | None = None) -> Outcome:
        """Full batches and this one in turn: what a loop sets up from its first batch, or sums over a window, is as in
        an epoch. Where values are not finite, the run is made again to find the first operation that made one."""
        found = self.outcome(words, made_of, full=True, plan=plan)
        if not found.nonfinite and not found.nonfinite_loss:
            return found
        origins = NonFiniteOrigins()
        self.outcome(words, made_of, origins.contexts, full=True, plan=plan)
        origin = origins.first
        return replace(found, origin=origin, where=str(origin.place) if origin else "")

    def outcome(
        self,
        words: str,
        made_of: Composition | Compose,
        contexts: Contexts = lambda watch: (),
        *,
        full: bool = False,
        plan: RunPlan | None = None,
        **changes: Any,
    ) -> Outcome:
        """The loop over this batch, again and again; with ``full``, over a full batch before each."""
        composition = made_of if isinstance(made_of, Composition) else None

        def stream(loop: TrainLoop) -> Any:
            made = self.gradients.composed(made_of) if isinstance(made_of, Composition) else [made_of(loop)]
            return itertools.cycle([*([self.batch] if full else []), *made])

        steps = 2 * STEPS if full else STEPS
        made = replace(
            plan or self.plan, stream=stream, contexts=contexts, enough=lambda r: r.rounds >= steps, may_raise=True
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the shapes and deviations of single values
                record = self.run_plan(replace(made, **changes))
        except UserCodeError as error:
            return Outcome(words, Record(), composition, error.error.summary)
        except UsageError as error:
            return Outcome(words, Record(), composition, str(error))
        if record.raised is None:
            nonfinite_loss = any(not math.isfinite(root.value) for b in record.backwards() for root in b.roots)
            nonfinite = tuple(p.name for p in became_nonfinite(record))
            return Outcome(words, record, composition, nonfinite=nonfinite, nonfinite_loss=nonfinite_loss)
        place = record.raised.place
        return Outcome(
            words, record, composition, record.raised.summary, str(place), place.code.startswith(("raise", "assert "))
        )


def _takes_all_data(record: Record) -> bool:
    """Whether an optimizer works on one and the same function at every step, which is the whole data set's."""
    return any(optimizer.kind == "LBFGS" for optimizer in record.optimizers)


def lengths_of(batch: Any, loop: TrainLoop) -> tuple[tuple[int, ...], int]:
    """The length of each row, where padding at the ends of rows is proven, and what rows are padded to; else nothing
    and 0."""
    if loop.batch_dim not in (None, 0):
        return (), 0
    read = read_paddings(
        batch,
        at_least=Proof.EMPTY,  # rows are cut there, and all tensors with them
        declared=loop.padding,
        pad_ids=padding_ids(loop.modules.values()),
    )
    return next(((found.lengths, found.grid.length) for found in read if found.side == "right"), ((), 0))
