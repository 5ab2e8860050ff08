"""What further runs show of autocast: angles that it moves, casts of weights that it keeps, and backward passes inside
of its blocks. Each rule compares runs that differ in one thing."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.checks.numerics.precision_parity.causes import found
from pytest_trainloop.checks.numerics.precision_parity.modes import FreshCasts, NoAutocastInBackward
from pytest_trainloop.checks.numerics.precision_parity.runs import distance, finite, first_gradient, plain
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.checks.numerics.precision_parity.runs import LowPrecisionRuns
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import Backward, Place
    from pytest_trainloop.recording.record import Record

    Again = Callable[..., Record]
    """The run made once more inside given contexts, to a number of steps: one."""

ENTRIES = 4096

MOST_CALLS = 64
"""Calls whose angles are kept."""

HALF_RADIAN = 0.5
"""An error at which two neighbouring positions, one radian of distance at the first frequency, may have the same
angle."""

PERIODS = 64.0
"""Size of an angle, in radians, from which bfloat16 (8 bits) can move it by an eighth of a radian or more."""

ROUNDS = 4
"""Steps in which a cast from before an update may be read."""


class Angles(NamedTuple):
    """The argument of one call of sin or cos that has no history."""

    name: str
    place: Place
    module: str
    values: torch.Tensor


class AngleLog(WatchingMode):
    """Keeps large arguments of sin and cos until the first step, each by the line's nth call of the function."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, Place, int], Angles] = {}
        self._calls: Counter[tuple[str, Place]] = Counter()

    def active(self) -> bool:
        return super().active() and not self.watch.record.begun and len(self.found) < MOST_CALLS

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("sin", "cos", "sin_", "cos_"):
            with self.watch.suspended(), torch.no_grad():
                for given in tensors_in(args[:1]):
                    if given.is_floating_point() and not given.requires_grad and given.numel() and readable(given):
                        flat, place = given.detach().reshape(-1), here()[0]
                        values = flat[:: max(1, flat.numel() // ENTRIES)].double().clone()
                        self._calls[name, place] += 1
                        if float(values.abs().max()) >= PERIODS:
                            key = (name, place, self._calls[name, place])
                            self.found[key] = Angles(name, place, self.watch.module_path(), values)
        return passed_on(func, args, kwargs)


def lost_angles(runs: LowPrecisionRuns) -> Iterator[Finding]:
    """Of the calls of sin and cos that both runs make with large angles, the one with the largest error.

    Products of positions and frequencies are rounded like any product, so the error that rounding explains covers them.
    But these numbers come from no weight and are not scaled by one.
    """
    low, reference = AngleLog(), AngleLog()
    if runs.choices.angles:
        runs.again(low.contexts)
    if not low.found:
        return
    runs.reference_inside(reference.contexts)
    worst, most = None, 0.0
    for key, angles in low.found.items():
        right = reference.found.get(key)
        if right is not None and right.values.shape == angles.values.shape:
            error = (angles.values - right.values).abs()
            if float(error.max()) >= HALF_RADIAN and float(error.max()) > most:
                worst, most = (angles, error, right.values), float(error.max())
    if worst is not None:
        angles, error, values = worst
        facts: dict[str, Any] = {"dtype": str(runs.low).removeprefix("torch."), "how": runs.how, "largest": most}
        facts["what"] = angles.name.rstrip("_") + (f" in {angles.module}" if angles.module else "")
        facts["part"] = float((error >= HALF_RADIAN).double().mean())
        facts["angle"] = float(values[int(error.argmax())])
        facts["level"] = "advice" if runs.imposed else "fault"
        yield found("angles_lost", angles, filter(None, (angles.module, angles.name)), **facts)


def weights_cast_once(made: Sequence[tuple[Record, Again]]) -> Iterator[Finding]:
    """The first backward pass whose loss was computed with weights as they were before an update, in the first run
    that has one: the same run with the casts dropped whenever the weights have changed differs in nothing else, for a
    new cast of the same weight has the same bits."""
    for record, again in made:
        inside = [step for step in record.innermost_steps() if step.blocks]
        under_autocast = any(b.autocast for b in record.backwards()) or any(f.autocast for f in record.root_forwards())
        if not inside and not (under_autocast and record.moved_outside_steps() & set(record.held)):
            continue
        casts = FreshCasts()
        kept, repeated = (again(plain, ROUNDS).backwards() for _ in range(2))
        fresh = again(casts.contexts, ROUNDS).backwards()
        if _first_other(kept, repeated) is not None or len(kept) != len(repeated):
            continue  # two equal runs differ already
        number = _first_other(kept, fresh)
        if number is not None:
            stale, as_they_are = (sum(root.value for root in passes[number].roots) for passes in (kept, fresh))
            yield found(
                "weights_cast_once",
                inside[0] if inside else record.step_line(),
                ("autocast",),
                number=number + 1,
                stale=stale,
                fresh=as_they_are,
                entered=f"; the block is entered at {casts.entered}" if casts.entered else "",
                steps=len(inside),
                change=casts.entered,
            )
            return


def _first_other(one: Sequence[Backward], other: Sequence[Backward]) -> int | None:
    """The first pass whose roots have other values, among those that both runs have."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if [repr(root.value) for root in a.roots] != [repr(root.value) for root in b.roots]:
            return number
    return None


def backward_under_autocast(made: Sequence[tuple[Record, Again]]) -> Iterator[Finding]:
    """Of the first run in which a backward pass is called inside an autocast block: how far its first gradient lies
    from that with the block ended first, in units of its size.

    Where a part of the forward pass is in float32 (a block with ``enabled=False``, a function of the project's own),
    its products in backward are cast by the block around it. Everything else runs in the dtypes that forward chose.
    """
    for record, again in made:
        inside = [b for b in record.backwards() if b.autocast]
        if not inside:
            continue
        block, change = inside[0].autocast, 0.0
        ended = lambda _watch, at=block: (NoAutocastInBackward(at.partition(":")[0]),)  # noqa: E731
        gradient, repeated, outside = (first_gradient(again(contexts)) for contexts in (plain, plain, ended))
        sizes = [{name: len(entries) for name, entries in g.items()} for g in (gradient, repeated, outside)]
        if outside and finite(outside) and sizes[0] == sizes[1] == sizes[2]:
            if not finite(gradient):
                change = math.inf
            elif finite(repeated) and not distance(gradient, repeated):  # two equal runs do not differ
                change = distance(outside, gradient)
        facts = {"inside": len(inside), "passes": len(record.backwards()), "block": block, "change_by": change}
        facts["level"] = "fault" if change else "advice"
        yield found("backward_under_autocast", inside[0], ("autocast",), "" if change else "no change", **facts)
        return
