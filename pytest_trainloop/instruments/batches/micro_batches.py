"""The rows of the example batches, cut into micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core import places
from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.whose import reraise_ours, reraise_raised
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches import totals as counts
from pytest_trainloop.instruments.batches.row_axis import relation
from pytest_trainloop.instruments.batches.valid_targets import ValidTargets, valid_targets
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.user_traceback import user_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.recording.record import Record


_ANY_ROWS = ValidTargets(order=tuple(range(12)), counts=())
"""Those of batches of which no rows are taken."""


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Copies of the first batches, the order in which their rows are taken, and what all rows share."""

    batches: list[Any]
    axis: int
    split_batch: Callable[[Any, int], Iterable[Any]] | None
    """The project's own way to split a batch."""
    valid: ValidTargets
    shared: dict[Path, float]
    """Numbers and tensors without rows, by their path in the batch."""
    totals: Mapping[Path, Sequence[int]]
    """The summands by row, of those numbers that are totals over rows."""
    declared: bool = False
    """Whether the project says along which axis rows lie."""
    recount: bool = False
    """Whether totals are recomputed for a part of the rows."""
    whole: bool = False
    """Whether no rows are taken: the project's own function splits each batch as it is."""

    @classmethod
    def of(
        cls, loop: TrainLoop, seen: Record, count: int, *, example: bool = False, axis: int | None = None
    ) -> MicroBatches:
        """Take ``count`` batches of a fresh loop; ``seen`` is a run of it. With ``example`` the declared batch, whose
        rows no shuffling changes, comes before those of a loader; ``axis`` is that of the rows where none is declared.
        Raises ``CannotDecide`` where they have no rows to split."""
        declared = isinstance(loop.batch_dim, int)
        axis = loop.batch_dim if isinstance(loop.batch_dim, int) else axis or 0
        batches = _copies(loop, count, example)
        rows = min(nested.rows(b, axis) for b in batches)
        if not declared and loop.split_batch is None and (related := next(filter(None, map(relation, batches)), "")):
            raise CannotDecide(
                f"{related} relates the {rows} entries along axis {axis} of the batch to each other, as an adjacency "
                f"matrix does: a part of them is no batch{'' if example else '; give split_batch= if it can be split'}",
                needs="" if example else "split_batch=",
            )
        if rows < 2 and loop.split_batch is not None:
            return cls(batches, axis, loop.split_batch, _ANY_ROWS, {}, {}, whole=True)
        if rows < 2 and (why := nested.without_tensors(batches[0])):
            raise CannotDecide(why, needs="a batch of tensors")
        if rows < 2:
            raise CannotDecide(
                f"the batch ({nested.describe(batches[0])}) has {rows} rows along axis {axis}: micro-batches take at "
                "least 2; give a larger one, or batch_dim= or split_batch=",
                needs="a larger batch",
            )
        valid = valid_targets(batches[0], rows, axis, loop.padding, seen)
        shared = {} if loop.split_batch else counts.shared_by_rows(batches[0], rows)
        totals = counts.totals(shared, rows, valid.counts)
        return cls(batches, axis, loop.split_batch, valid, shared, totals, declared)

    @classmethod
    def uncut(cls, loop: TrainLoop, count: int) -> MicroBatches:
        """Batches of a loop that only counts them: each may be any rows."""
        return cls(_copies(loop, count, False), 0, lambda batch, k: [batch] * k, _ANY_ROWS, {}, {}, whole=True)

    def of_whole_batches(self) -> MicroBatches:
        """The same with batches that only the project's own function cuts."""
        return replace(self, whole=True, valid=_ANY_ROWS, shared={}, totals={})

    def recounting(self) -> MicroBatches:
        """The same, with totals recomputed for each part of the rows."""
        return replace(self, recount=True)

    @property
    def unknown(self) -> dict[Path, float]:
        """What all rows share and cannot be recomputed for a part of them."""
        return {path: n for path, n in self.shared.items() if path not in self.totals}

    def sizes(self) -> list[int]:
        """The numbers of micro-batches that the rows allow, of 2, 3 and 4; of whole batches those into which the
        project's own function splits them."""
        sizes = [k for k in (2, 3, 4) if k <= len(self.valid.order)]
        return [k for k in sizes if all(self._is_split(batch, k) for batch in self.batches)] if self.whole else sizes

    def rows(self, k: int) -> int:
        """How many rows are split into k parts: the same for every k where there are 12."""
        count = len(self.valid.order)
        return count // 12 * 12 or count // k * k

    def split(self, batch: Any, rows: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        """These rows of one of the batches in micro-batches of these sizes; the project's own function cuts them into
        as many as it likes to. Raises ``CannotDecide`` as ``taken`` does."""
        if self.split_batch is not None:
            return self._split_by_project(self.split_batch, batch, rows, len(sizes))
        ends = [0, *itertools.accumulate(sizes)]
        return [self.taken(batch, rows[a:b]) for a, b in itertools.pairwise(ends)]

    def taken(self, batch: Any, rows: Sequence[int]) -> Any:
        """These rows of one of the batches. Raises ``CannotDecide`` where they cannot be taken."""
        if self.whole or tuple(rows) == tuple(range(nested.rows(batch, self.axis))):
            return nested.copy(batch)
        try:
            taken = nested.take(batch, rows, self.axis)
        except (RuntimeError, NotImplementedError, TypeError, IndexError) as error:
            reraise_raised(error)
            raise CannotDecide(
                f"rows cannot be taken from {nested.describe(batch)} ({type(error).__name__}): give split_batch=",
                needs="split_batch=",
            ) from error
        return counts.recounted(taken, len(rows), rows, self.totals) if self.recount else taken

    def which(self, rows: Sequence[int]) -> str:
        """These rows of a batch in words, "the first 36 of 40 rows of the batch"."""
        count = nested.rows(self.batches[0], self.axis)
        if self.whole or tuple(rows) == tuple(range(count)):
            return "a copy of the batch"
        if tuple(rows) == tuple(range(len(rows))):
            return f"the first {len(rows)} of {count} rows of the batch"
        if len(rows) == count:
            return f"the {count} rows of the batch in another order"
        return f"{len(rows)} of {count} rows of the batch"

    def what_to_give(self) -> str:
        """What the project can declare where it refuses rows that were taken."""
        if self.split_batch is not None:
            return "batch_dim=" if not self.declared else ""
        return "split_batch=" if self.declared else "batch_dim= or split_batch="

    def _split_by_project(
        self, split_batch: Callable[[Any, int], Iterable[Any]], batch: Any, rows: Sequence[int], k: int
    ) -> list[Any]:
        if self.whole and len(rows) > len(self.valid.order):
            return [nested.copy(batch) for _ in range(k)]  # rows again and again: a window of whole batches
        try:
            return _parts(split_batch, self.taken(batch, rows), k)
        except (UserCodeError, UsageError) as refusal:
            if not self.whole:
                _parts(split_batch, nested.copy(batch), k)
                raise CannotDecide(f"{refusal} on {self.which(rows)}, and not on the whole batch") from refusal
            raise

    def _is_split(self, batch: Any, k: int) -> bool:
        """Whether the project's own function splits this batch into as many parts. Raises as it does where it makes no
        two of it either."""
        try:
            self.split(batch, (), [1] * k)
        except (UserCodeError, UsageError):
            if k == 2:
                raise
            return False
        return True


def _copies(loop: TrainLoop, count: int, example: bool) -> list[Any]:
    given = [loop.batch] * count if example and loop.batch is not None else first_batches(loop, count)
    return [nested.copy(b) for b in given]


def _parts(split_batch: Callable[[Any, int], Iterable[Any]], batch: Any, k: int) -> list[Any]:
    """What the project's own function makes of a batch. Raises ``UsageError`` where that is not k batches, and
    ``UserCodeError`` where it raises."""
    try:
        parts = split_batch(batch, k)
        given = list(parts) if isinstance(parts, Iterable) else None
    except Exception as error:  # of the project's split_batch
        reraise_ours(error)
        raise UserCodeError(user_error(error, "TrainLoop.split_batch"), one_check=True) from error
    tensors = [part for part in given or () if isinstance(part, torch.Tensor)]
    if given is not None and len(given) == k and (isinstance(batch, torch.Tensor) or not tensors):
        return given
    gave = nested.describe(parts) if given is None else f"{len(given)} part{'' if len(given) == 1 else 's'}"
    if tensors and not isinstance(batch, torch.Tensor):
        gave += f" (a tensor of shape {tuple(tensors[0].shape)} among them)"
    raise UsageError(
        f"TrainLoop.split_batch(batch, {k}) gave {gave}; a list of {k} batches is needed, each of the kind of the "
        f"batch: {nested.describe(batch)}",
        place=places.of_function(split_batch),
    )
