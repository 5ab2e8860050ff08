"""Whether rows at an end of the batch are left out: whatever stands in them, the loop does the same, bit for bit.

The last row is replaced by another one, and the first: losses, gradients and weights then change, unless nothing uses
it. What is found is looked at again with the loop's own random numbers, at other weights and over several batches, and
is followed call by call: where a row is lost by its values (a mask, a clamp, a hardest example) another batch may use
it, and nothing is said.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop import nested
from pytest_trainloop.batches.row_axis import rows_known
from pytest_trainloop.checks.batch.every_row_teaches.ends import Ends, ends_of
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.compositions.search import smallest
from pytest_trainloop.compositions.step_gradients import StepGradients
from pytest_trainloop.errors import CannotDecide, Refused
from pytest_trainloop.gradients.dependence import stirred
from pytest_trainloop.recording.events import Backward, Step
from pytest_trainloop.runs.batch_stream import first_batch
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.tracing.call_log import Calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

LONG = 6
"""Optimizer steps of the runs with the loop's own random numbers: what is only gathered at first is used by then."""

MOST_STEPS = 48
"""The loop's own steps that the search for the smallest batch may take."""

SEEDS = (1, 2)
"""Seeds of these runs."""

Sizes = Literal["constant", "some", "share", "remainder"]
"""How the rows left out depend on the number of rows: all beyond a constant number; so many of any number; more of
more; those that are too many for parts of one size."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """``rows`` of ``count`` make no difference."""

    rows: tuple[int, ...]
    count: int
    sizes: Sizes
    ends: Ends
    smallest: Composition
    """The smallest batch in which a row is left out."""
    by_statistics: bool = False
    """Whether they make a difference by way of a batch norm's statistics."""
    others: bool = False
    """Whether rows between used ones are left out as well."""
    steps: int = LONG

    @property
    def proven(self) -> bool:
        """Whether no loop can mean it."""
        if self.sizes == "remainder" or self.others or self.by_statistics:
            return False
        return self.sizes != "share" or self.ends.behind_model


def left_out(evidence: Evidence, seen: Calls) -> LeftOut | None:
    """The rows at an end of the batch that nothing uses; ``seen`` keeps the calls of one of the steps that are made.

    Raises ``CannotDecide`` where these may be positions, and where there is one row; ``Refused`` where the loop takes
    no rows in another order.
    """
    loop = evidence.fresh_loop()
    batch = first_batch(loop)
    if nested.rows(batch, loop.batch_dim if isinstance(loop.batch_dim, int) else 0) == 1:
        raise CannotDecide("the batch has one row: give a larger one to see whether each row teaches", needs="batch=")
    made = evidence.shared(StepGradients.of)
    rows = _Rows(made, range(made.rows), seen)
    unused = rows.unused() if rows.base is not None else ()
    if not unused and rows.refused:
        raise Refused(f"{rows.refused} on {made.cut.which(rows.refused_rows)}, and not on the loop's own batches")
    if not unused or len(unused) >= made.rows:
        return None
    runs = _OwnRuns(evidence, unused)
    if not all(runs.same(seed) for seed in SEEDS):
        return None
    by_statistics = not runs.same(SEEDS[0], batch_statistics=True)
    ends = runs.ends()
    if ends is None:
        return None
    if not (isinstance(evidence.fresh_loop().batch_dim, int) or rows_known(made.batch, made.axis)):
        raise CannotDecide(
            f"entries {_listed(unused)} along axis {made.axis} of the batch are never used, and whether these are rows "
            "or positions is not known: give batch_dim=0 if they are rows, batch_dim=1 if the second axis holds them",
            needs="batch_dim=",
        )
    others = ends.skips and rows.same([2 if unused[0] == 0 else made.rows - 3])
    return LeftOut(
        unused, made.rows, _sizes(made, unused), ends, _smallest(evidence, made, unused), by_statistics, others
    )


def _watched(calls: Calls | None, watch: Watch) -> Iterable[AbstractContextManager[Any]]:
    """Without dropout and with running statistics; all else is drawn as the loop draws it."""
    return (NoRandomness(keeps=lambda _name: True), *(() if calls is None else calls.contexts(watch)))


def _listed(rows: Sequence[int]) -> str:
    return str(rows[0]) if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"


class _Rows:
    """One step over chosen rows of the batch, and over the same with some of them replaced."""

    def __init__(self, made: StepGradients, chosen: Sequence[int], seen: Calls | None = None) -> None:
        self._made, self._chosen, self._seen = made, tuple(chosen), seen
        self.refused, self.refused_rows = "", self._chosen
        """What the loop raised first, on which rows."""
        self.base = self._print(self._chosen)

    def unused(self) -> tuple[int, ...]:
        """The places at one end that no other row makes a difference at."""
        n = len(self._chosen)
        last = _most(lambda k: self.same(range(n - k, n)), n)
        if last:
            return tuple(range(n - last, n))
        return tuple(range(_most(lambda k: self.same(range(k)), n)))

    def same(self, places: Sequence[int]) -> bool:
        """Whether the run is the same with the row at any of three other places in these."""
        others = [p for p in range(len(self._chosen)) if p not in places]
        if self.base is None or not others:
            return False
        donors = dict.fromkeys((others[0], others[-1], others[len(others) // 2]))
        return all(self._print(self.replaced(places, donor)) == self.base for donor in donors)

    def replaced(self, places: Sequence[int], donor: int) -> tuple[int, ...]:
        return tuple(self._chosen[donor if p in places else p] for p in range(len(self._chosen)))

    def _print(self, rows: tuple[int, ...]) -> object:
        watched = self._seen is not None and rows != self._chosen and not self._seen.calls
        made = self._made.at(Composition(rows), contexts=(self._seen.contexts,) if watched and self._seen else ())
        roots = [root.value for backward in made.record.backwards() for root in backward.roots]
        refused = made.refused or ("the loss is NaN" if any(map(math.isnan, roots)) else "")
        if refused and not self.refused:
            self.refused, self.refused_rows = refused, rows
        return None if made.refused or not made.record.ended else fingerprint(made.record)


def fingerprint(record: Record) -> object:
    """What was backpropagated, what each step read, and the weights at the end: equal for runs that are the same."""
    roots = tuple(root.value for b in record.of(Backward) for root in b.roots)
    reads = tuple(
        (i, sample.raw)
        for step in record.of(Step)
        for read in step.reads
        for i, sample in read.grads.items()
        if sample is not None
    )
    return roots, reads, tuple((i, sample.raw) for i, sample in sorted(record.end.items()))


def _most(holds: Callable[[int], bool], below: int) -> int:
    """The largest number below ``below`` for which something holds that holds for all smaller ones as well."""
    low, high = 0, 1
    while high < below and holds(high):
        low, high = high, 2 * high
    high = min(high, below)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _sizes(made: StepGradients, unused: Sequence[int]) -> Sizes:
    """What a batch of the used rows alone shows, and one of twice as many rows."""
    n = made.rows
    used = [row for row in range(n) if row not in unused]
    again = _Rows(made, used).unused()
    if again:
        return "some" if len(again) == len(unused) else "share"
    twice = _Rows(made, [*range(n), *range(n)])
    beyond = range(len(used), 2 * n) if unused[-1] == n - 1 else range(2 * n - len(used))
    return "constant" if twice.same(beyond) else "remainder"


def _smallest(evidence: Evidence, made: StepGradients, unused: Sequence[int]) -> Composition:
    """The fewest rows of which one at the same end is left out."""
    at_end = unused[-1] == made.rows - 1

    def shows(composition: Composition) -> bool:
        count = len(composition.rows)
        return _Rows(made, composition.rows).same([count - 1 if at_end else 0])

    def composed(count: int) -> Composition:
        return Composition(tuple(range(count)))

    from hypothesis import strategies as st

    few = st.integers(2, made.rows).map(composed)
    return smallest(few, shows, evidence=evidence, most=MOST_STEPS) or composed(made.rows)


class _OwnRuns:
    """Runs with the loop's own random numbers, at other weights."""

    def __init__(self, evidence: Evidence, unused: Sequence[int]) -> None:
        self._evidence, self._unused = evidence, unused
        self._made = evidence.shared(StepGradients.of)

    def same(self, seed: int, *, batch_statistics: bool = False) -> bool:
        """Whether the loop does the same whatever stands in the rows; without dropout, and with running statistics,
        unless those of the batch are to count."""
        plan = replace(
            self._evidence.plan(),
            fit_seed=self._evidence.plan().seed + seed,
            prepare=stirred(0.3 * seed),
            contexts=(lambda _watch: ()) if batch_statistics else functools.partial(_watched, None),
            enough=lambda record: record.rounds >= LONG,
            may_raise=True,
        )
        one, other = (self._evidence.rerun(replace(plan, stream=s)) for s in self._streams())
        return one.raised is None and bool(one.steps) and fingerprint(one) == fingerprint(other)

    def ends(self) -> Ends | None:
        """Where the rows end, by the calls of both runs; None where they end by their values."""
        seen: list[Calls] = []
        for stream in self._streams():
            calls = Calls()
            seen.append(calls)
            self._evidence.rerun(
                stream=stream,
                prepare=stirred(0.3),
                contexts=functools.partial(_watched, calls),
                before_item=calls.take,
                enough=lambda record: record.rounds >= 1,
                may_raise=True,
            )
        return ends_of(*seen)

    def _streams(self) -> list[Callable[[Any], Any]]:
        n = self._made.rows
        used = [row for row in range(n) if row not in self._unused]
        other = [used[row % len(used)] if row in self._unused else row for row in range(n)]
        taken = [nested.take(self._made.batch, rows, self._made.axis) for rows in (range(n), other)]
        return [functools.partial(_repeated, batch) for batch in taken]


def _repeated(batch: Any, _loop: TrainLoop) -> Iterator[Any]:
    return itertools.repeat(batch)
