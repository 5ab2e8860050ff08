"""The runs behind ``precision_parity``: the loop in low precision, in float64, and in float64 with the rounding that
low precision is expected to do (docs/how-it-decides.md#expected-rounding-error).

All begin with the same weights and the same draws, and end with the first optimizer step. What is compared is the
gradient that arrived until then, as one vector.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.precision_parity.autocast import around_all
from pytest_trainloop.checks.numerics.precision_parity.expected_error import Rounded, unit_roundoff
from pytest_trainloop.checks.numerics.precision_parity.first_gradient import (
    distance,
    finite,
    first_gradient,
    first_item,
)
from pytest_trainloop.checks.numerics.precision_parity.fitting_scale import HALVINGS, LEAST_SCALE, fitting_scale
from pytest_trainloop.checks.numerics.precision_parity.replay import LOW, Recording, Replaying, Tape
from pytest_trainloop.checks.numerics.precision_parity.same_batches import SameBatches
from pytest_trainloop.errors import CannotDecide, Unreliable, UsageError, UserCodeError
from pytest_trainloop.runs.run import READ_AHEAD_BUDGETS
from pytest_trainloop.runs.same_start import SameValues
from pytest_trainloop.runs.scalers import scalers_built_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.checks.numerics.precision_parity.op_log import Sample
    from pytest_trainloop.gradients.vectors import Gradient
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan

    Contexts = Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]]

PASSES, FAILS = 2.0, 4.0
"""Ratios of measured to explained error up to which a loop is right, and from which it is not: right loops reach 1.8,
wrong ones begin at 10 (docs/how-it-decides.md#expected-rounding-error)."""

NOISE = (None, 1, 2)
"""Seeds of the runs that show what is explained: the first rounds to nearest."""

VALUES = ("bf16", "fp16")
"""What the knob is set to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """One way of running in low precision against float64. ``measured`` and ``explained`` are errors of the whole
    gradient relative to its length, ``ratio`` the one over the other; ``finite`` says that the low one is finite."""

    dtype: torch.dtype
    measured: float
    explained: float
    finite: bool

    @property
    def ratio(self) -> float:
        return self.measured / self.explained


class Way:
    """One way of running a loop in low precision, and its runs: each ends with the first optimizer step.

    ``imposed``: the loop itself has no low precision, and an autocast is put around it.
    """

    def __init__(
        self, name: str, plan: RunPlan, reference: RunPlan, run: Callable[[RunPlan], Record], *, imposed: bool = False
    ) -> None:
        self.name, self.imposed = name, imposed
        self._plan, self._reference, self._run = plan, reference, run
        self._start, self._batches = SameValues(), SameBatches()
        self._scale: float | None = None
        self._picked_otherwise = 0
        self.tape, self.record = self._recorded(HALVINGS)
        if self.record.skipped and not self.record.steps:
            self._plan = replace(plan, count=READ_AHEAD_BUDGETS[-1], read_ahead=None)
            self.tape, self.record = self._recorded(HALVINGS)
        scale = fitting_scale(self.record)
        while self.record.skipped and scale >= LEAST_SCALE:
            self._scale, scale = scale, scale / 2
            self.tape, self.record = self._recorded(1)

    def _recorded(self, skips: int) -> tuple[Tape, Record]:
        tape = Tape()
        self._start, self._batches = SameValues(), SameBatches()

        def enough(record: Record) -> bool:
            tape.closed = tape.closed or _stepped(record) or record.skipped >= skips
            return tape.closed

        plan = replace(self._plan, prepare=self._start, before_item=self._batches.keep, enough=enough)
        return tape, self._run(replace(plan, around=lambda: self._inside(Recording(tape))))

    @contextlib.contextmanager
    def _inside(self, *modes: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._scale is not None:
                stack.enter_context(scalers_built_with(init_scale=self._scale))
            for mode in modes:
                stack.enter_context(mode)
            yield

    @property
    def low(self) -> torch.dtype | None:
        """The least precise dtype of what was computed; None where nothing was in low precision."""
        return next((dtype for dtype in LOW if dtype in self.tape.low), None)

    def again(self, contexts: Contexts = lambda watch: ()) -> Record:
        """The run in low precision once more, from the same start, inside these contexts."""
        outer = self._plan.contexts
        plan = replace(self._plan, prepare=self._start, contexts=lambda w: (*outer(w), *contexts(w)), enough=_asked)
        return self._run(replace(plan, around=self._inside))

    @functools.cached_property
    def reference(self) -> Record:
        """The run in float64, with the draws of the low one. Raises ``CannotDecide`` where there is none."""
        record, replaying = self._double(False, lambda watch: ())
        self._picked_otherwise = replaying.picked_otherwise
        return record

    def reference_inside(self, contexts: Contexts) -> Record:
        """The same once more, inside these contexts."""
        return self._double(False, contexts)[0]

    def reference_with_picks(self) -> Record:
        """The same with the low run's choices."""
        return self._double(True, lambda watch: ())[0]

    def rounded(self, noise: int | None, *, picks: bool = False, contexts: Contexts = lambda watch: ()) -> Record:
        """The same with products rounded as in low precision, or with errors of that size."""
        assert self.low is not None
        return self._double(picks, contexts, Rounded(self.low, self.tape.products, noise=noise))[0]

    def _double(
        self, picks: bool, contexts: Contexts, *inner: contextlib.AbstractContextManager[Any]
    ) -> tuple[Record, Replaying]:
        replaying, outer = Replaying(self.tape, picks=picks), self._reference.contexts
        plan = replace(
            self._reference,
            double=True,
            prepare=self._start,
            before_item=self._batches.put,
            contexts=lambda watch: (*outer(watch), *contexts(watch)),
            enough=_stepped,
            around=lambda: self._inside(replaying, *inner),
        )
        try:
            record = self._run(plan)
        except UserCodeError as broken:
            raise CannotDecide(f"{broken.error.stage} raises {broken.error.summary} in float64") from broken
        if record.raised is not None:
            raise CannotDecide(f"the loop raises {record.raised.summary} in float64")
        if not record.double:
            raise CannotDecide(f"the loop cannot be run wholly in float64: {record.lower[0]}")
        if replaying.apart:
            raise CannotDecide(f"in float64 the loop draws otherwise: {replaying.apart}")
        return record, replaying

    def parity(self) -> Parity | None:
        """How far the gradient is from float64; None where that is no more than two roundings of it. Raises
        ``CannotDecide`` where no gradient can be compared, ``Unreliable`` where a second run gives another one."""
        assert self.low is not None
        if self.record.raised is not None:
            raise CannotDecide(f"{self.name} the loop raises {self.record.raised.summary}")
        unit = unit_roundoff(self.low)
        reference = self.reference
        got = first_gradient(self.record, reference)
        expected = first_gradient(reference)
        if not expected or not got:
            raise CannotDecide("no gradient arrives before the first step")
        if not finite(expected):
            raise CannotDecide("the gradient is not finite in float64 either (see finite)")
        if first_item(self.record) != first_item(reference):
            raise CannotDecide("in low precision the loop leaves out steps that it makes in float64")
        measured = distance(expected, got)
        if measured <= PASSES * unit:
            return None
        if not finite(got):
            self._require_the_same_again(got, unit, reference)
            return Parity(dtype=self.low, measured=math.inf, explained=unit, finite=False)
        found = self._explained(measured, expected, picks=False)
        if found.ratio > PASSES and self._picked_otherwise:
            expected = first_gradient(self.reference_with_picks())
            other = self._explained(distance(expected, got), expected, picks=True)
            found = min(found, other, key=lambda p: p.ratio)
        if found.ratio > PASSES:
            self._require_the_same_again(got, unit, reference)
        return found

    def _require_the_same_again(self, got: Gradient, unit: float, reference: Record) -> None:
        again = first_gradient(self.again(), reference)
        if finite(got) != finite(again) or (finite(got) and distance(got, again) > unit):
            kind = CannotDecide if self.imposed else Unreliable
            raise kind("two runs in low precision under one seed give different gradients (see determinism)")

    def _explained(self, measured: float, expected: Gradient, *, picks: bool) -> Parity:
        assert self.low is not None
        explained, enough = unit_roundoff(self.low), FAILS if self.imposed else PASSES
        for noise in NOISE:
            if measured > enough * explained:
                explained = max(explained, distance(expected, first_gradient(self.rounded(noise, picks=picks))))
        return Parity(dtype=self.low, measured=measured, explained=explained, finite=True)


def name_of(parity: Parity, sample: Sample | None) -> str:
    """The dtype of the tensor at fault, or the low one of the loop, in words."""
    dtype = sample.dtype if sample is not None and sample.dtype in LOW else parity.dtype
    return str(dtype).removeprefix("torch.")


def limits(name: str) -> tuple[float, float]:
    """The largest and the smallest positive number of a dtype, subnormal ones counted."""
    info = torch.finfo(getattr(torch, name))
    return info.max, info.smallest_normal * info.eps


def products_in_float32(record: Record) -> str:
    """What float32 products are made in on a CUDA device, in words; empty elsewhere."""
    if not any(p.device.startswith("cuda") for p in record.parameters):
        return ""
    return "float32 products in " + ("float32" if torch.get_float32_matmul_precision() == "highest" else "TF32")


def ways(evidence: Evidence, knob: str | None, default: Any, idle: list[str]) -> Iterator[Way]:
    """The loop's own ways of low precision: as it is, and with its knob; one under autocast only where it has none.
    ``idle`` is told of those that turn out to be none, and why."""
    seen, plan, run = evidence.run(), evidence.plan(), evidence.rerun
    asis = Way("as it is", plan, plan, run)
    if asis.low:
        yield asis
    if knob is not None:
        yield from _by_knob(plan, run, knob, [value for value in VALUES if value != default], idle)
    elif not asis.low and asis.record.raised is None:
        device = next((p.device for p in seen.parameters), "cpu").partition(":")[0]
        imposed = Way(f"under autocast({device!r}, torch.bfloat16)", around_all(plan, device), plan, run, imposed=True)
        if imposed.low:
            yield imposed
        else:
            idle.append(f"nothing of this loop is computed in low precision, {imposed.name} neither")


def _by_knob(
    plan: RunPlan, run: Callable[[RunPlan], Record], knob: str, values: list[str], idle: list[str]
) -> Iterator[Way]:
    for value in values:
        name, changed = f"with {knob}={value!r}", replace(plan, knobs={**plan.knobs, knob: value})
        try:
            way = Way(name, changed, changed, run)
        except UserCodeError as broken:
            idle.append(f"{name} {broken}")
            continue
        except UsageError as refused:
            idle.append(f"{name} {refused}")
            continue
        if way.low:
            yield way
        elif way.record.raised is not None:
            idle.append(f"{name} the loop raises {way.record.raised.summary}")
        else:
            idle.append(f"{name} nothing is computed in low precision: hand the knob on to the loop's autocast")


def _stepped(record: Record) -> bool:
    return record.rounds >= 1


def _asked(record: Record) -> bool:
    """Whether a step was made, or kept back."""
    return _stepped(record) or record.skipped >= 1
