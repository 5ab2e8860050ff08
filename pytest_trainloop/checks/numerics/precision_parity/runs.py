"""The runs behind ``precision_parity``: the loop in low precision, in float64, and in float64 with the rounding that
low precision is expected to do (docs/how-it-decides.md#expected-rounding-error).

All begin with the same weights and the same draws, take the same batches, and end with the first optimizer step.
Compared is the gradient that arrived until then, as one vector.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.checks.numerics.precision_parity.modes import (
    LOW,
    Choices,
    NoAutocastInBackward,
    RecordChoices,
    ReplayChoices,
    Rounded,
    unit_roundoff,
)
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply, Unreliable, UsageError, UserCodeError
from pytest_trainloop.core.whose import present
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.instruments.gradients.vectors import consumed, values, vectors
from pytest_trainloop.recording.events import Backward, GradWrite, ScalerCall, Step
from pytest_trainloop.runs.run import READ_AHEAD_BUDGETS
from pytest_trainloop.runs.same_start import SameValues
from pytest_trainloop.runs.scalers import scalers_built_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.instruments.gradients.vectors import Gradient
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

MOST_BATCHES = 32
"""Batches that are kept: a first step needs fewer."""

HALVINGS = 26
"""Steps that a scaler may skip before it has found its scale: 2^16 has come to 2^-10 by then."""

LEAST_SCALE = 2.0**-10
"""The last scale that is tried. One at which a later step fitted may be too large for the first."""


def plain(_watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
    """No contexts."""
    return ()


def first_gradient(record: Record, reference: Record | None = None) -> Gradient:
    """The gradient that arrived at each parameter before any of them moved and that was not zeroed, without a scaler's
    factor; where none arrived and user code assigned gradients, those that the first step read.

    With a reference a pass counts as scaled where its root is larger than there by a factor nearer the scale than 1: a
    loop may leave the scaler out for one of its losses.
    Of a large tensor the sampled entries represent all: they are weighted by the root of the number of entries
    that each represents, so that the length is that of the whole gradient.
    """
    until, found = _first_change(record), dict[str, torch.Tensor]()
    others = itertools.chain([] if reference is None else reference.backwards(), itertools.repeat(None))
    for event in record.events:
        if event.at >= until:
            break
        if isinstance(event, GradWrite) and event.how in ("none", "zero"):
            if found and any(m.since < event.at < m.at for m in record.moves):
                break  # an update outside of optimizers read them before it zeroed them
            for index in event.parameters:
                found.pop(record.name(index), None)
        if isinstance(event, Backward) and event.kind == "backward":
            factor, other = scale_at(record, event), next(others)
            # one of two losses goes past the scaler (odd: a_model_past_the_scaler)
            factor = factor if other is None or _carries(factor, event, other) else 1.0
            for index, arrivals in event.arrivals.items():
                p = record.parameters[index]
                for gradient in (a.incoming for a in arrivals if a.incoming.raw and not a.incoming.sparse):
                    size = math.prod(p.shape) * getattr(torch, p.dtype).itemsize
                    weight = math.sqrt(max(1.0, size / len(gradient.raw))) / factor
                    entries = values(gradient, p.dtype) * weight
                    found[p.name] = found[p.name] + entries if p.name in found else entries
    step = next((s for s in record.of(Step) if not s.nested and s.reads), None)
    return found or (consumed(record, step.optimizer, 0) if step else None) or {}


def _carries(factor: float, backward: Backward, other: Backward) -> bool:
    """Whether a pass carries the scaler's factor, by the same pass without a scaler."""
    for root, unscaled in zip(backward.roots, other.roots, strict=False):
        larger = abs(root.value / unscaled.value) if unscaled.value else math.nan
        if 0.0 < larger < math.inf:
            return abs(math.log(larger / factor)) <= abs(math.log(larger))
    return True


def _first_change(record: Record) -> float:
    """The moment of the first step, made or skipped by a scaler, or of the backward pass that finds weights moved by
    anything but an optimizer."""
    stepped = [float(s.reads[0].at) for s in record.of(Step) if not s.nested and s.reads]
    asked = [float(c.at) for c in record.of(ScalerCall) if c.what == "step"]
    return min((*stepped, *asked, *(m.at - 1.0 for m in record.moves)), default=math.inf)


def first_item(record: Record) -> int:
    """How many batches the loop had taken when it made the last gradient before any parameter moved."""
    until = _first_change(record)
    return max((b.item for b in record.backwards() if b.at < until), default=0)


def scale_at(record: Record, backward: Backward) -> float:
    """The factor of the scaler that scaled last before this pass; 1 without one."""
    scaled = [c for c in record.of(ScalerCall) if c.what == "scale" and c.enabled and c.at < backward.at]
    return scaled[-1].factor if scaled and 0.0 < scaled[-1].factor < math.inf else 1.0


def distance(reference: Gradient, other: Gradient) -> float:
    """The length of the difference over that of the reference; infinite where the other is not finite."""
    a, b = vectors([reference, other])
    length, distance = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b - a))
    if not math.isfinite(length):
        return math.nan
    if not math.isfinite(distance):
        return math.inf
    return distance / length if length else (0.0 if distance == 0.0 else math.inf)


def distances(reference: Gradient, other: Gradient) -> dict[str, float]:
    """The same for each parameter of both."""
    names = [n for n, entries in reference.items() if n in other and len(other[n]) == len(entries)]
    return {name: distance({name: reference[name]}, {name: other[name]}) for name in names}


def finite(gradient: Gradient) -> bool:
    return all(bool(entries.isfinite().all()) for entries in gradient.values())


class SameBatches:
    """The batches of one run, repeated in another: they are the loop's data, however they were rounded. ``keep`` and
    ``put`` are for ``RunPlan.before_item``, in this order."""

    def __init__(self) -> None:
        self._kept: dict[int, list[torch.Tensor]] = {}

    def keep(self, number: int, item: Any) -> None:
        if number < MOST_BATCHES:
            self._kept[number] = [t.detach().clone() for t in nested.tensors(item) if t.layout is torch.strided]

    def put(self, number: int, item: Any) -> None:
        """Overwrite the tensors of a batch by those of the same batch in the first run, where shapes agree."""
        dense = (t for t in nested.tensors(item) if t.layout is torch.strided)
        for tensor, kept in zip(dense, self._kept.get(number, []), strict=False):
            if tensor.shape == kept.shape and tensor.is_floating_point() == kept.is_floating_point():
                with torch.no_grad():
                    write(tensor, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """One gradient in low precision compared with that in float64."""

    dtype: torch.dtype
    measured: float
    """Error of the whole gradient, relative to its length."""
    explained: float
    """What rounding explains of it."""
    finite: bool = True
    """Whether the gradient in low precision is."""

    @property
    def ratio(self) -> float:
        return self.measured / self.explained


class LowPrecisionRuns:
    """The runs of a loop in low precision, and their counterparts in float64.

    ``name`` says how it comes to compute in low precision: as it is, by its knob, or under an autocast that is
    ``imposed`` since it has no low precision of its own; ``how`` is that as an addition to a sentence. Making one runs
    the loop until its loss scale fits.
    """

    def __init__(
        self, name: str, plan: RunPlan, reference: RunPlan, rerun: Callable[[RunPlan], Record], *, imposed: bool = False
    ) -> None:
        self.name, self.imposed = name, imposed
        self.how = "" if name == "as it is" else f" ({name})"
        self.scale: float | None = None
        """At which the loop's scaler begins, where its own scale is too large."""
        self._plan, self._reference, self._rerun, self._picked_otherwise = plan, reference, rerun, 0
        self._run(HALVINGS)
        if self.record.skipped and not self.record.steps:
            self._plan = replace(plan, count=READ_AHEAD_BUDGETS[-1], read_ahead=None)
            self._run(HALVINGS)
        scale = _fitting_scale(self.record)
        while self.record.skipped and scale >= LEAST_SCALE:
            self.scale, scale = scale, scale / 2
            self._run(1)

    def _run(self, skips: int) -> None:
        """Run the loop in low precision to its first step, or until a scaler has skipped ``skips`` of them."""
        self.choices, self._start, self._batches = Choices(), SameValues(), SameBatches()

        def enough(record: Record) -> bool:
            choices = self.choices
            choices.complete = choices.complete or record.rounds >= 1 or record.skipped >= skips
            return choices.complete

        plan = replace(self._plan, prepare=self._start, before_item=self._batches.keep, enough=enough)
        self.record = self._rerun(
            replace(plan, around=lambda: self._inside(RecordChoices(self.choices)), may_raise=True)
        )

    @contextlib.contextmanager
    def _inside(self, *modes: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.scale is not None:
                stack.enter_context(scalers_built_with(init_scale=self.scale))
            for mode in modes:
                stack.enter_context(mode)
            yield

    @functools.cached_property
    def low(self) -> torch.dtype | None:
        """The least precise dtype of what was computed; None where nothing was in low precision."""
        return next((dtype for dtype in LOW if dtype in self.choices.low), None)

    def refused(self, nothing: str) -> str:
        """Where a model is called under autocast and no product heeds it: that, with the line of the first; else
        empty."""
        line = self.choices.refused if any(f.autocast for f in self.record.root_forwards()) else ""
        return line and (
            f"{nothing}, although the model is called under autocast: the product at {line} is made in float32, in an "
            "inner autocast(enabled=False) or a function that casts its inputs; take that out, or leave autocast out"
        )

    def again(self, contexts: Contexts = plain, rounds: int = 1) -> Record:
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

    def rounded(self, noise: int | None, *, picks: bool = False, contexts: Contexts = plain) -> Record:
        """The same with products rounded as in low precision, or with errors of that size."""
        mode = Rounded(present(self.low, "the low precision"), self.choices.products, noise=noise)
        return self._float64(contexts, mode, picks=picks)[0]

    def _float64(
        self, contexts: Contexts = plain, *inner: contextlib.AbstractContextManager[Any], picks: bool = False
    ) -> tuple[Record, ReplayChoices]:
        replay, outer = ReplayChoices(self.choices, picks=picks), self._reference.contexts
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
        dtype, reference = present(self.low, "the low precision"), self.reference
        gradient, expected = first_gradient(self.record, reference), first_gradient(reference)
        if not expected or not gradient:
            raise CannotDecide("no gradient arrives before the first step")
        if not finite(expected):
            raise CannotDecide("the gradient is not finite in float64 either (see finite)")
        if first_item(self.record) != first_item(reference):
            raise CannotDecide("in low precision the loop leaves out steps that it makes in float64")
        unit, measured = unit_roundoff(dtype), distance(expected, gradient)
        if measured <= PASSES * unit:
            return None
        found = Parity(dtype=dtype, measured=math.inf, explained=unit, finite=False)
        if finite(gradient):
            found = self._explained(dtype, measured, expected, picks=False)
            # scores that lie close together change places: for routers, though no stored loop needs it at its seed
            if found.ratio > PASSES and self._picked_otherwise:
                expected = first_gradient(self._float64(picks=True)[0])
                other = self._explained(dtype, distance(expected, gradient), expected, picks=True)
                found = min(found, other, key=lambda p: p.ratio)
        if found.ratio > PASSES:
            again = first_gradient(self.again(), reference)
            if finite(again) != found.finite or (found.finite and distance(gradient, again) > unit):
                kind = CannotDecide if self.imposed else Unreliable
                raise kind("two runs in low precision under one seed give different gradients (see determinism)")
        return found

    def _explained(self, dtype: torch.dtype, measured: float, expected: Gradient, *, picks: bool) -> Parity:
        explained, enough = unit_roundoff(dtype), FAILS if self.imposed else PASSES
        for noise in NOISE:
            if measured > enough * explained:
                explained = max(explained, distance(expected, first_gradient(self.rounded(noise, picks=picks))))
        return Parity(dtype=dtype, measured=measured, explained=explained)


def _fitting_scale(record: Record) -> float:
    """The loss scale at the first step that was made of the optimizer that attempted one first; the last scale to try
    where none was made."""
    scale, first = 1.0, None
    for call in record.of(ScalerCall):
        if call.what == "scale" and 0.0 < call.factor < math.inf:
            scale = call.factor
        if call.what == "step":
            first = call.optimizer if first is None else first
            if call.stepped and call.optimizer == first:
                return scale
    return LEAST_SCALE


def low_precision_runs(evidence: Evidence) -> Iterator[LowPrecisionRuns | CannotDecide]:
    """Each way in which the loop computes in low precision: as it is, and with its knob; under an autocast only where
    it has neither. For a way that turns out to have no low precision: why."""
    plan, rerun, knob = evidence.plan(), evidence.rerun, evidence.knobs.get("precision")
    as_it_is = LowPrecisionRuns("as it is", plan, plan, rerun)
    if as_it_is.low:
        yield as_it_is
    if knob is not None:
        default = inspect.signature(evidence.make).parameters[knob].default
        for value in (v for v in VALUES if v != default):
            name, changed = f"with {knob}={value!r}", replace(plan, knobs={**plan.knobs, knob: value})
            try:
                runs = LowPrecisionRuns(name, changed, changed, rerun)
            except (UserCodeError, UsageError) as error:
                yield CannotDecide(f"{name} {error}")
                continue
            if runs.low:
                yield runs
            elif runs.record.raised is not None:
                yield CannotDecide(f"{name} the loop raises {runs.record.raised.summary}")
            else:
                nothing = f"{name} nothing is computed in low precision"
                yield CannotDecide(runs.refused(nothing) or f"{nothing}: pass the knob on to the loop's autocast")
    elif not as_it_is.low and as_it_is.record.raised is None:
        device = next((p.device for p in evidence.run().parameters), "cpu").partition(":")[0]
        name, outer = f"under autocast({device!r}, torch.bfloat16)", plan.contexts

        def under_autocast(watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
            yield from outer(watch)
            yield torch.autocast(device, dtype=torch.bfloat16)
            yield NoAutocastInBackward(device)

        imposed = replace(plan, contexts=under_autocast)
        runs = LowPrecisionRuns(name, imposed, plan, rerun, imposed=True)
        nothing = f"nothing of this loop is computed in low precision, {name} neither"
        refused = as_it_is.refused(nothing)
        yield runs if runs.low else CannotDecide(refused) if refused else DoesNotApply(nothing)


class TensorError(NamedTuple):
    """Of one parameter's gradient, relative to its length in float64."""

    measured: float
    """Infinite where an entry is not finite."""
    explained: float
    lost: float
    """The share of entries that are not finite."""


class TensorErrors:
    """The error of the gradient at each parameter in the ``runs`` that ``precision_parity`` reported, if any."""

    def __init__(self, _evidence: Evidence) -> None:
        self.runs: LowPrecisionRuns | None = None

    def read(self) -> dict[str, TensorError]:
        """By parameter. Makes one further run, in float64 with products rounded as in low precision."""
        if self.runs is None or self.runs.low is None:
            return {}
        reference, unit = self.runs.reference, unit_roundoff(self.runs.low)
        expected, got = first_gradient(reference), first_gradient(self.runs.record, reference)
        rounded = distances(expected, first_gradient(self.runs.rounded(None)))
        return {
            name: TensorError(error, max(unit, rounded[name]), 1 - float(got[name].isfinite().double().mean()))
            for name, error in distances(expected, got).items()
            if name in rounded
        }
