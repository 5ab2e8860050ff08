"""Runs of the loop over batches that an unlucky epoch brings: one row, the loader's last, rows in which nothing counts.

Batches are composed of the project's own example by taking rows and cutting time: no value is made up. Each is given
to a fresh loop, again and again, for two steps.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.micro_batches import MicroBatches
from pytest_trainloop.batches.valid_targets import rows_without
from pytest_trainloop.checks.batch.edge_batches.last_batch import Ending, ending, last_batch
from pytest_trainloop.checks.batch.edge_batches.length_one import lengths_of, shortest
from pytest_trainloop.checks.batch.edge_batches.squeezes import Squeezes
from pytest_trainloop.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.recording.record import Record
from pytest_trainloop.records.finiteness import became_nonfinite
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.tracing.nonfinite import NonFiniteOrigins

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable

    from pytest_trainloop.checks.batch.edge_batches.embedding_range import Beyond
    from pytest_trainloop.checks.batch.edge_batches.length_one import Short
    from pytest_trainloop.checks.batch.edge_batches.squeeze_proof import Lost
    from pytest_trainloop.loop import Padding, TrainLoop
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan
    from pytest_trainloop.tracing.nonfinite import NonFiniteOrigin

Compose = Callable[["TrainLoop"], Any]
"""Makes a batch for a fresh loop."""

STEPS = 2
"""Optimizer steps of a run: the second is made with what the first has left."""


LOOKED_AT = 3
"""Batches that are compared in length."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run over such a batch went. ``words`` say what the batch is; ``raised`` is what ended it, ``by_hand``
    whether the loop raised that itself; ``lost`` are weights that were finite before, ``nan`` tells of losses that are
    not, and were backpropagated."""

    words: str
    record: Record
    raised: str = ""
    where: str = ""
    by_hand: bool = False
    lost: tuple[str, ...] = ()
    nan: bool = False
    origin: NonFiniteOrigin | None = None

    @property
    def fine(self) -> bool:
        return not self.raised and not self.lost


class Edges:
    """What the runs say.

    ``count`` rows has the example, ``without`` are those in which nothing counts, by how many entries they have;
    ``lengths`` are those of its rows, where it tells, and ``full`` what they are padded to; ``cuts``: other batches are
    padded to other lengths. ``ending`` is the loader's.
    """

    def __init__(
        self,
        rows: MicroBatches,
        seen: Record,
        plan: RunPlan,
        run_plan: Callable[[RunPlan], Record],
        windows: RunPlan | None = None,
    ) -> None:
        self._rows = rows
        self._plan = plan
        self._windows = windows
        self._run_plan = run_plan
        self._squeezes = Squeezes()
        self._one: Outcome | None = None
        self.seen = seen
        self.batch = rows.batches[0]
        self.count = nested.rows(self.batch, rows.axis)
        self.ending = Ending()
        self.without: dict[int, int] = {}
        self.padding: Padding | None = None
        self.lengths: tuple[int, ...] = ()
        self.full = 0
        self.cuts = False

    @classmethod
    def of(cls, evidence: Evidence) -> Edges:
        """Raises ``CannotDecide`` where no batch can be composed."""
        seen, loop = evidence.run(), evidence.fresh_loop()
        windows = evidence.plan(accumulate=2) if "accumulate" in evidence.knobs else None
        with preserved():
            return cls._of(loop, seen, evidence.plan(), evidence.rerun, windows)

    @classmethod
    def _of(
        cls,
        loop: TrainLoop,
        seen: Record,
        plan: RunPlan,
        run_plan: Callable[[RunPlan], Record],
        windows: RunPlan | None,
    ) -> Edges:
        """``seen`` is the loop's run by this plan over its own batches; by ``windows`` it accumulates over two."""
        if seen.raised is not None or became_nonfinite(seen):
            raise CannotDecide("the loop does not run through on its own batches: see the checks before this one")
        if not seen.steps:
            raise CannotDecide("the loop makes no optimizer step on its own batches")
        if loop.split_batch is not None or not isinstance(loop.batch_dim, (int, type(None))):
            raise CannotDecide(
                "rows are told apart by split_batch=: give batch_dim= to have single rows taken from the batch"
            )
        given = loop.batches
        if loop.batch is not None:
            loop.batches = None  # the example, which no shuffling changes
        rows = MicroBatches.of(loop, seen, 1).recounting()
        if isinstance(rows.batches[0], list) and not any(isinstance(item, torch.Tensor) for item in rows.batches[0]):
            raise CannotDecide("the batch is a list of items, and rows are taken along an axis of tensors only")
        loop.batches = given
        made = cls(rows, seen, plan, run_plan, windows)
        made.ending = Ending(drops=True) if _takes_all_data(seen) else ending(given)
        made.padding = loop.padding
        made.lengths, made.full = lengths_of(made.batch, loop)
        if 1 in made.lengths and given is not None:
            widths = [lengths_of(b, loop)[1] for b in first_batches(loop, LOOKED_AT)]
            made.cuts = len({made.full, *widths} - {0}) > 1
        made.without = rows_without(made.batch, made.count, rows.axis, loop.padding, seen)
        return made

    @property
    def plain(self) -> list[int]:
        """The rows in which something counts, the fullest first; all of them where each lacks something."""
        order = self._rows.valid.order[::-1] if self._rows.valid.counts else self._rows.valid.order
        return [row for row in order if row not in self.without] or list(order)

    def taken(self, rows: list[int]) -> Compose:
        """A batch of these rows of the first one."""
        return lambda _loop: self._rows.taken(self.batch, rows)

    def one_row(self) -> Outcome:
        """A row in which something counts, alone."""
        if self._one is None:
            self._one = self.outcome("1 row", self.taken(self.plain[:1]), self._squeezes.contexts)
        return self._one

    def row_lost(self) -> Lost | None:
        """A ``squeeze`` that takes the row axis out, and what becomes of that, if it matters."""
        from pytest_trainloop.checks.batch.edge_batches.squeeze_proof import proven

        self.one_row()
        if not any(squeeze.removed for squeeze in self._squeezes.calls.values()) or len(self.plain) < 2:
            return None
        whole = Squeezes()
        self.outcome("whole", self.taken(list(range(self.count))), whole.contexts)
        lost = self._squeezes.lost(whole.calls, self.count)
        return proven(self, lost, whole.calls) if lost else None

    def leftover(self) -> Outcome | None:
        """The loader's last batch, where it has fewer rows than the others."""
        end = self.ending
        if end.drops or end.last is None or not end.rows < min(end.of, self.count):
            return None
        words = "1 row" if end.rows == 1 else f"{end.rows} rows"
        if end.shuffles:
            return self.among_full(words, self.taken(self.plain[: end.rows])) if len(self.plain) >= end.rows else None
        return self.among_full(words, lambda loop: last_batch(loop.batches, end))

    @property
    def may_be_empty(self) -> bool:
        """Whether nothing may count in a whole batch: any row may be left over, or every fourth is so in a loop that
        splits its batches."""
        split = self._windows is not None and 4 * len(self.without) >= self.count
        return bool(self.without) and (self.ending.leaves_any or split)

    def nothing_counts(self) -> Outcome | None:
        """A row in which nothing counts, alone; in a loop that accumulates, the second of two in its window."""
        if not self.without or not self.one_row().fine:
            return None
        row, entries = next(iter(self.without.items()))
        counting = f"0 of its {entries} entries count" if entries > 1 else "it has no label"
        if self._windows is None or self.ending.leaves_any:
            return self.among_full(f"row {row} alone: {counting}", self.taken([row]))
        words = f"row {row} as one of two micro-batches: {counting}"
        return self.among_full(words, self.taken([row]), self._windows)

    def short(self) -> Short | None:
        """A row of length one, alone and cut to its length."""
        return shortest(self) if self.one_row().fine else None

    def padded(self) -> Beyond | None:
        """A row that ends in the declared padding, where the batch has none."""
        from pytest_trainloop.checks.batch.edge_batches.embedding_range import beyond_table

        return beyond_table(self)

    def among_full(self, words: str, compose: Compose, plan: RunPlan | None = None) -> Outcome:
        """Full batches and this one by turns: what a loop sets up from its first batch, or sums over a window, is as in
        an epoch. Where values are not finite, with the first operation that made one."""
        found = self.outcome(words, compose, full=True, plan=plan)
        if not found.lost and not found.nan:
            return found
        origins = NonFiniteOrigins()
        self.outcome(words, compose, origins.contexts, full=True, plan=plan)
        origin = origins.first
        return replace(found, origin=origin, where=str(origin.place) if origin else "")

    def outcome(
        self,
        words: str,
        compose: Compose,
        contexts: Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]] = lambda watch: (),
        *,
        full: bool = False,
        plan: RunPlan | None = None,
        **changes: Any,
    ) -> Outcome:
        """The loop over this batch, given again and again; after each ``full`` one."""

        def stream(loop: TrainLoop) -> Any:
            return itertools.cycle([*([self.batch] if full else []), compose(loop)])

        steps = 2 * STEPS if full else STEPS
        made = replace(plan or self._plan, stream=stream, contexts=contexts, enough=lambda r: r.rounds >= steps)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of shapes and of deviations of one value, which are looked at here
                record = self._run_plan(replace(made, **changes))
        except UserCodeError as error:
            return Outcome(words, Record(), error.error.summary)
        except UsageError as error:
            return Outcome(words, Record(), str(error))
        if record.raised is None:
            nan = any(not math.isfinite(root.value) for b in record.backwards() for root in b.roots)
            return Outcome(words, record, lost=tuple(p.name for p in became_nonfinite(record)), nan=nan)
        place = record.raised.place
        return Outcome(words, record, record.raised.summary, str(place), place.code.startswith(("raise", "assert ")))


def _takes_all_data(record: Record) -> bool:
    """Whether an optimizer works on one and the same function at every step, which is the whole data set's."""
    return any(optimizer.kind == "LBFGS" for optimizer in record.optimizers)
