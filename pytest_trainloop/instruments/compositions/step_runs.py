"""Runs of the loop over chosen batches, all from one start, each made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide, UserCodeError
from pytest_trainloop.core.finding import UserError
from pytest_trainloop.instruments.gradients.tolerances import ROUNDING
from pytest_trainloop.runs.outside_draws import rng_line
from pytest_trainloop.runs.row_draws import DrawLog, RowDraws
from pytest_trainloop.runs.run import RunPlan, canonical
from pytest_trainloop.runs.same_start import SameStart, from_same_start

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.row_draws import DrawAxes

Contexts = Callable[["Watch"], "Iterable[AbstractContextManager[Any]]"]
"""Gives what is entered around ``fit``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """How a run is made, besides its batches. Equal ones make equal runs."""

    knobs: tuple[tuple[str, Any], ...] = ()
    contexts: tuple[Contexts, ...] = ()
    until_first_step: bool = False
    """Whether the run ends with the first step."""
    fit_seed: int | None = None
    again: Hashable = None
    """Tells a repetition from the run that it repeats."""
    rows: tuple[tuple[int, ...], ...] = ()
    """The numbers of the rows of each item, where what is drawn for each is to be its own; else all draw the same."""


class StepRuns:
    """Runs in float64 with nothing drawn; in the loop's own precision where the first ones raise in float64 only."""

    def __init__(self, plan_of: Callable[[Mapping[str, Any]], RunPlan], run_plan: Callable[[RunPlan], Record]) -> None:
        self._plan_of = plan_of
        self._run_plan = run_plan
        self._start: Callable[[Watch], None] = SameStart()
        self._double = True
        self._goes_through = False
        """Whether a run has gone through in this precision."""
        self._records: dict[Hashable, Record] = {}
        self.calls = "fit"
        """What the runs call of the project's."""
        self.outside_draw: Callable[[], str] = str
        """Gives the line that draws from python's or numpy's generator, in parentheses; empty where none is known."""
        self.axes: DrawAxes | None = None
        """The kinds of the axes of each draw, once they are known."""
        self._log = DrawLog()
        self._logs: dict[int, DrawLog] = {}
        """By the identity of the record."""

    @classmethod
    def of(cls, evidence: Evidence) -> StepRuns:
        """Those of the project's loop. To be asked for by ``evidence.shared``."""
        made = cls(lambda knobs: evidence.plan(**knobs), evidence.rerun)
        made.outside_draw = functools.partial(rng_line, evidence)
        return made

    @classmethod
    def of_loss(cls, evidence: Evidence) -> StepRuns:
        """Those of a plain loop over the declared loss, which has no knob.

        Raises ``CannotDecide`` where the loop raises by itself: another check tells of that (nothing is trainable).
        """
        if (raised := evidence.run().raised) is not None:
            raise CannotDecide(f"the loop raises by itself: {raised.summary}")
        plan = replace(evidence.plan(), fit=_plain_fit)
        made = cls(lambda _knobs: plan, evidence.rerun)
        made.calls = "TrainLoop.loss"
        return made

    @property
    def start(self) -> Mapping[str, torch.Tensor]:
        """The weights and buffers that every run begins with, by name; nothing before the first."""
        return self._start.tensors if isinstance(self._start, SameStart) else {}

    def elsewhere(self, plan_of: Callable[[Mapping[str, Any]], RunPlan], prepare: Callable[[Watch], None]) -> StepRuns:
        """Runs in the same precision with the same random numbers by other plans, each from what ``prepare`` gives."""
        other = StepRuns(plan_of, self._run_plan)
        other._start, other._double, other._goes_through, other.axes = prepare, self._double, True, self.axes
        return other

    def made(self, key: Hashable, items: Callable[[], Sequence[Any]], varied: Variation) -> Record:
        """The run over these items, known by its key; one in which ``fit`` raised is returned as well.

        Raises ``UserCodeError`` where a declared loss raises on the loop's own batches too: no other check calls it.
        """
        if (key, varied) not in self._records:
            record = self._run(items, varied)
            if record.raised is not None and self._double and not self._goes_through:
                record = self._in_own_precision(items, varied) or record
            if record.raised is not None and self.calls != "fit" and not self._goes_through:
                self._require_a_loss_of_whole_batches(dict(varied.knobs))
            self._goes_through = self._goes_through or record.raised is None
            self._records[key, varied], self._logs[id(record)] = record, self._log
        return self._records[key, varied]

    def _require_a_loss_of_whole_batches(self, knobs: Mapping[str, Any]) -> None:
        """Raise ``UserCodeError`` where the declared loss raises on batches that nothing has altered."""
        raised = self._run_plan(replace(self._plan_of(knobs), enough=_stepped, may_raise=True)).raised
        if raised is not None:
            error = UserError(stage=self.calls, summary=raised.summary, traceback=raised.traceback)
            raise UserCodeError(error, one_check=True)

    def know(self, axes: DrawAxes) -> None:
        """Have what is drawn from now on keep to these axes: runs that drew otherwise are forgotten."""
        self.axes = axes
        if axes.axes:
            self._records.clear()

    def log(self, record: Record) -> DrawLog:
        """What one of these runs drew."""
        return self._logs.get(id(record), DrawLog())

    def _in_own_precision(self, items: Callable[[], Sequence[Any]], varied: Variation) -> Record | None:
        """The run in the loop's own precision, if it goes through: all others are then made so too. A kernel of its
        own may take no other dtype."""
        kept, self._start, self._double = self._start, SameStart(), False
        record = self._run(items, varied)
        if record.raised is not None:
            self._start, self._double = kept, True
            return None
        self._records.clear()
        return record

    def _run(self, items: Callable[[], Sequence[Any]], varied: Variation) -> Record:
        plan = from_same_start(self._plan_of(dict(varied.knobs)), self._start, lambda _loop: items())
        draws = RowDraws(varied.rows, self.axes)
        self._log = draws.log
        return self._run_plan(
            replace(
                plan,
                before_item=draws.next_item,
                contexts=lambda watch: (draws, *(c for made in varied.contexts for c in made(watch))),
                enough=_stepped if varied.until_first_step else plan.enough,
                fit_seed=varied.fit_seed,
                double=self._double,
                may_raise=True,
            )
        )


def _stepped(record: Record) -> bool:
    return record.rounds >= 1


def _plain_fit(loop: TrainLoop) -> Callable[[Any], None]:
    loop.optimizer = None  # one that needs a closure cannot take plain steps
    return canonical(loop)


def precision(*records: Record) -> str:
    """The lowest precision that any of these runs computed in."""
    if all(record.double for record in records):
        return "float64"
    dtypes = " ".join(word for r in records for word in (*r.lower, *(p.dtype for p in r.parameters)))
    return next((d for d in ("bfloat16", "float16") if d in dtypes.replace("bfloat16", "bfloat16 ")), "float32")


def bound(*records: Record) -> float:
    """How far two orders of summation may differ in these runs' precision.

    1e3 * eps: two orders of one sum of n terms differ by at most about n * eps of the largest partial sum (Higham,
    Accuracy and Stability of Numerical Algorithms, 4.2); n stays below 1e3 for what is summed over the rows and
    positions of an example batch. Where terms cancel, what reversing the rows makes of the sum is measured.
    """
    return ROUNDING * float(torch.finfo(getattr(torch, precision(*records))).eps)


def separable(tolerance: float) -> float:
    """The share of a gradient that may lie outside the span of its parts, given what summation may differ by."""
    return max(1e-9, 10 * tolerance)
