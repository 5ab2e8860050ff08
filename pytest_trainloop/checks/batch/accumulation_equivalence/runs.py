"""Runs of the loop over cuts of its batches, all from one start, each made once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.errors import CannotDecide, UserCodeError
from pytest_trainloop.finding import UserError
from pytest_trainloop.gradients.tolerances import ROUNDING
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.run import RunPlan, canonical
from pytest_trainloop.runs.same_start import SameStart, from_same_start

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping, Sequence

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


class Runs:
    """Runs in float64 with nothing drawn; in the loop's own precision where the very first one raises in float64."""

    def __init__(self, plan_of: Callable[[Mapping[str, Any]], RunPlan], run_plan: Callable[[RunPlan], Record]) -> None:
        self._plan_of = plan_of
        self._run_plan = run_plan
        self._start = SameStart()
        self._float64 = True
        self._records: dict[object, Record] = {}
        self._calls = "fit"
        """What the runs call of the project's."""

    @classmethod
    def of(cls, evidence: Evidence) -> Runs:
        return cls(lambda knobs: evidence.plan(**knobs), evidence.rerun)

    @classmethod
    def of_loss(cls, evidence: Evidence) -> Runs:
        """Of a plain loop over the declared loss, which has no knob."""
        plan = replace(evidence.plan(), fit=_plain_fit)
        made = cls(lambda _knobs: plan, evidence.rerun)
        made._calls = "TrainLoop.loss"
        return made

    def made(
        self,
        key: tuple[object, ...],
        accumulate: int,
        items: Callable[[], Sequence[Any]],
        *,
        fit_seed: int | None = None,
        may_raise: bool = False,
        around: Callable[[Watch], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> Record:
        """The run over these items with the knob at ``accumulate``, known by its key. Raises ``CannotDecide`` where
        ``fit`` raises on them, unless it may, and ``UserCodeError`` where the declared loss does on a whole batch: no
        other check calls it. ``around`` is entered around ``fit``."""
        if key not in self._records:
            plan = from_same_start(self._plan_of({"accumulate": accumulate}), self._start, lambda _loop: items())
            if around is not None:
                plan = replace(plan, contexts=lambda watch: (NoRandomness(), around(watch)))
            record = self._run_plan(replace(plan, fit_seed=fit_seed, double=self._float64, may_raise=True))
            if record.raised is not None and self._float64 and not self._records:
                self._float64, self._start = False, SameStart()
                return self.made(key, accumulate, items, fit_seed=fit_seed, may_raise=may_raise)
            if record.raised is not None and self._calls != "fit" and not self._records:
                raised = record.raised
                error = UserError(stage=self._calls, summary=raised.summary, traceback=raised.traceback)
                raise UserCodeError(error, one_check=True)
            if record.raised is not None and not may_raise:
                part = "part of the batch" if accumulate > 1 else "the batch"
                raise CannotDecide(
                    f"{self._calls} raised {record.raised.summary} on {part}; give batch_dim= or split_batch= if its "
                    "rows lie along another axis"
                )
            self._records[key] = record
        return self._records[key]


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
