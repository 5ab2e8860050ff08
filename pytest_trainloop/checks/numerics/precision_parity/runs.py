"""The runs behind ``precision_parity``: the loop in low precision, in float64, and in float64 with the rounding that
low precision is expected to do (docs/how-it-decides.md#expected-rounding-error).

All begin with the same weights and the same draws, and end with the first optimizer step. Compared is the gradient that
arrived until then, as one vector.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.numerics.precision_parity.conditions import (
    HALVINGS,
    LEAST_SCALE,
    SameBatches,
    fitting_scale,
    under_autocast,
)
from pytest_trainloop.checks.numerics.precision_parity.expected_error import Rounded, unit_roundoff
from pytest_trainloop.checks.numerics.precision_parity.first_gradient import (
    distance,
    finite,
    first_gradient,
    first_item,
)
from pytest_trainloop.checks.numerics.precision_parity.replay import LOW, Choices, RecordChoices, ReplayChoices
from pytest_trainloop.errors import CannotDecide, DoesNotApply, Unreliable, UsageError, UserCodeError
from pytest_trainloop.runs.run import READ_AHEAD_BUDGETS
from pytest_trainloop.runs.same_start import SameValues
from pytest_trainloop.runs.scalers import scalers_built_with
from pytest_trainloop.whose import present

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from pytest_trainloop.gradients.vectors import Gradient
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan

    Contexts = Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]]

PASSES, FAILS = 2.0, 4.0
"""Ratios of measured to explained error up to which a loop is right, and from which it is not: right loops reach 1.77,
wrong ones begin at 10 (docs/how-it-decides.md#expected-rounding-error)."""

NOISE = (None, 1, 2)
"""Seeds of the runs that show what rounding explains: None rounds to nearest."""

VALUES = ("bf16", "fp16")
"""Low precisions of the knob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """One gradient in low precision compared with that in float64."""

    dtype: torch.dtype
    measured: float
    """Error of the whole gradient, relative to its length."""
    explained: float
    """What rounding explains of it."""
    finite: bool
    """Whether the gradient in low precision is."""

    @property
    def ratio(self) -> float:
        return self.measured / self.explained


class LowPrecisionRuns:
    """The runs of a loop in low precision, and their counterparts in float64.

    ``name`` says how it comes to compute in low precision: as it is, by its knob, or under an autocast that is
    ``imposed`` since it has no low precision of its own. Making one runs the loop until its loss scale fits.
    """

    def __init__(
        self, name: str, plan: RunPlan, reference: RunPlan, rerun: Callable[[RunPlan], Record], *, imposed: bool = False
    ) -> None:
        self.name, self.imposed = name, imposed
        self._plan, self._reference, self._rerun = plan, reference, rerun
        self._scale: float | None = None
        self._picked_otherwise = 0
        self._run(HALVINGS)
        if self.record.skipped and not self.record.steps:
            self._plan = replace(plan, count=READ_AHEAD_BUDGETS[-1], read_ahead=None)
            self._run(HALVINGS)
        scale = fitting_scale(self.record)
        while self.record.skipped and scale >= LEAST_SCALE:
            self._scale, scale = scale, scale / 2
            self._run(1)

    def _run(self, skips: int) -> None:
        """Run the loop in low precision to its first step, or until a scaler has skipped ``skips`` of them."""
        self._choices, self._start, self._batches = Choices(), SameValues(), SameBatches()

        def enough(record: Record) -> bool:
            choices = self._choices
            choices.complete = choices.complete or record.rounds >= 1 or record.skipped >= skips
            return choices.complete

        plan = replace(self._plan, prepare=self._start, before_item=self._batches.keep, enough=enough)
        self.record = self._rerun(
            replace(plan, around=lambda: self._inside(RecordChoices(self._choices)), may_raise=True)
        )

    @contextlib.contextmanager
    def _inside(self, *modes: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._scale is not None:
                stack.enter_context(scalers_built_with(init_scale=self._scale))
            for mode in modes:
                stack.enter_context(mode)
            yield

    @property
    def rescaled(self) -> bool:
        """Whether the loop's scaler begins at another scale than the loop's own, which was too large."""
        return self._scale is not None

    @property
    def angles(self) -> bool:
        """Whether sin or cos was computed."""
        return self._choices.angles

    @functools.cached_property
    def low(self) -> torch.dtype | None:
        """The least precise dtype of what was computed; None where nothing was in low precision."""
        return next((dtype for dtype in LOW if dtype in self._choices.low), None)

    @property
    def _dtype(self) -> torch.dtype:
        """The same where there is one."""
        return present(self.low, "the low precision")

    def again(self, contexts: Contexts = lambda watch: (), rounds: int = 1) -> Record:
        """The run in low precision once more, from the same start, to so many steps, inside these contexts."""
        outer = self._plan.contexts
        plan = replace(self._plan, prepare=self._start, contexts=lambda w: (*outer(w), *contexts(w)))
        enough = lambda record: record.rounds >= rounds or record.skipped >= rounds  # noqa: E731
        return self._rerun(replace(plan, enough=enough, around=self._inside, may_raise=True))

    @functools.cached_property
    def reference(self) -> Record:
        """The run in float64, with the draws of the low one. Raises ``CannotDecide`` where there is none."""
        record, replay = self._float64()
        self._picked_otherwise = replay.picked_otherwise
        return record

    def reference_inside(self, contexts: Contexts) -> Record:
        """The same once more, inside these contexts."""
        return self._float64(contexts)[0]

    def rounded(self, noise: int | None, *, picks: bool = False, contexts: Contexts = lambda watch: ()) -> Record:
        """The same with products rounded as in low precision, or with errors of that size."""
        mode = Rounded(self._dtype, self._choices.products, noise=noise)
        return self._float64(contexts, mode, picks=picks)[0]

    def _float64(
        self, contexts: Contexts = lambda watch: (), *inner: contextlib.AbstractContextManager[Any], picks: bool = False
    ) -> tuple[Record, ReplayChoices]:
        replay, outer = ReplayChoices(self._choices, picks=picks), self._reference.contexts
        plan = replace(
            self._reference,
            double=True,
            prepare=self._start,
            before_item=self._batches.put,
            contexts=lambda watch: (*outer(watch), *contexts(watch)),
            enough=lambda record: record.rounds >= 1,
            around=lambda: self._inside(replay, *inner),
            may_raise=True,
        )
        try:
            record = self._rerun(plan)
        except UserCodeError as broken:
            raise CannotDecide(f"{broken.error.stage} raises {broken.error.summary} in float64") from broken
        if record.raised is not None:
            raise CannotDecide(f"the loop raises {record.raised.summary} in float64")
        if not record.double:
            raise CannotDecide(f"the loop cannot be run wholly in float64: {record.lower[0]}")
        if replay.mismatch:
            raise CannotDecide(f"in float64 the loop draws otherwise: {replay.mismatch}")
        return record, replay

    def parity(self) -> Parity | None:
        """How far the gradient is from float64; None where that is no more than two roundings of it. Raises
        ``CannotDecide`` where no gradient can be compared, ``Unreliable`` where a second run gives another one."""
        if self.record.raised is not None:
            raise CannotDecide(f"{self.name} the loop raises {self.record.raised.summary}")
        unit, reference = unit_roundoff(self._dtype), self.reference
        gradient, expected = first_gradient(self.record, reference), first_gradient(reference)
        if not expected or not gradient:
            raise CannotDecide("no gradient arrives before the first step")
        if not finite(expected):
            raise CannotDecide("the gradient is not finite in float64 either (see finite)")
        if first_item(self.record) != first_item(reference):
            raise CannotDecide("in low precision the loop leaves out steps that it makes in float64")
        measured = distance(expected, gradient)
        if measured <= PASSES * unit:
            return None
        if not finite(gradient):
            self._require_repeatable(gradient, unit)
            return Parity(dtype=self._dtype, measured=math.inf, explained=unit, finite=False)
        found = self._explained(measured, expected, picks=False)
        if found.ratio > PASSES and self._picked_otherwise:
            expected = first_gradient(self._float64(picks=True)[0])
            other = self._explained(distance(expected, gradient), expected, picks=True)
            found = min(found, other, key=lambda p: p.ratio)
        if found.ratio > PASSES:
            self._require_repeatable(gradient, unit)
        return found

    def _require_repeatable(self, gradient: Gradient, unit: float) -> None:
        again = first_gradient(self.again(), self.reference)
        if finite(gradient) != finite(again) or (finite(gradient) and distance(gradient, again) > unit):
            kind = CannotDecide if self.imposed else Unreliable
            raise kind("two runs in low precision under one seed give different gradients (see determinism)")

    def _explained(self, measured: float, expected: Gradient, *, picks: bool) -> Parity:
        explained, enough = unit_roundoff(self._dtype), FAILS if self.imposed else PASSES
        for noise in NOISE:
            if measured > enough * explained:
                explained = max(explained, distance(expected, first_gradient(self.rounded(noise, picks=picks))))
        return Parity(dtype=self._dtype, measured=measured, explained=explained, finite=True)


def low_precision_runs(evidence: Evidence) -> Iterator[LowPrecisionRuns | CannotDecide]:
    """Each way in which the loop computes in low precision: as it is, and with its knob; under an autocast only where
    it has neither. For a way that turns out to have no low precision: why."""
    record, plan, rerun = evidence.run(), evidence.plan(), evidence.rerun
    as_it_is = LowPrecisionRuns("as it is", plan, plan, rerun)
    if as_it_is.low:
        yield as_it_is
    knob = evidence.knobs.get("precision")
    if knob is not None:
        default = inspect.signature(evidence.make).parameters[knob].default
        yield from (_with_knob(evidence, knob, value) for value in VALUES if value != default)
    elif not as_it_is.low and as_it_is.record.raised is None:
        device = next((p.device for p in record.parameters), "cpu").partition(":")[0]
        name = f"under autocast({device!r}, torch.bfloat16)"
        imposed = LowPrecisionRuns(name, under_autocast(plan, device), plan, rerun, imposed=True)
        none = DoesNotApply(f"nothing of this loop is computed in low precision, {name} neither")
        yield imposed if imposed.low else none


def _with_knob(evidence: Evidence, knob: str, value: str) -> LowPrecisionRuns | CannotDecide:
    name, plan = f"with {knob}={value!r}", evidence.plan()
    changed = replace(plan, knobs={**plan.knobs, knob: value})
    try:
        runs = LowPrecisionRuns(name, changed, changed, evidence.rerun)
    except (UserCodeError, UsageError) as refused:
        return CannotDecide(f"{name} {refused}")
    if runs.low:
        return runs
    if runs.record.raised is not None:
        return CannotDecide(f"{name} the loop raises {runs.record.raised.summary}")
    return CannotDecide(f"{name} nothing is computed in low precision: pass the knob on to the loop's autocast")
