"""The same run at other loss scales: the gradient that a step reads must not depend on the scale.

Seed, weights, batches and precision are the same in every run, and halving a loss scale is exact in floating point as
long as nothing leaves the range. So the gradient is the same bit for bit where all of it was scaled and unscaled by the
same number. Where it is not, three scales s, s/2, s/4 separate the part that grows with the scale (never unscaled) from
the part that falls with it (never scaled): of the differences between neighbours, one is twice the other.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.checks.numerics.grad_scaler.scale_trace import traces
from pytest_trainloop.gradients.vectors import consumed, steps_of, values, vectors
from pytest_trainloop.recording.events import GradWrite
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.runs.scalers import scalers_built_with
from pytest_trainloop.tracing.nonfinite import NonFiniteOrigin, NonFiniteOrigins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.checks.numerics.grad_scaler.enabled_scaler import EnabledScaler
    from pytest_trainloop.gradients.vectors import Gradient
    from pytest_trainloop.recording.events import Step
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

HIGHEST = 2.0**10
"""The first of the three scales, at most: at much higher ones a part that falls with the scale is too small to be seen
next to the rest."""

LOWEST = 2.0**-24
"""A scale at which no gradient up to 1e12 leaves the range of half precision: what is not finite there does not depend
on the scale."""

ROUNDING = 2.0**-7
"""By how much a difference may miss its double: the rounding of bfloat16 (2^-8), twice. Whatever scales with another
power misses it by half or more."""

LEAST = 16
"""Entries that a part must change in. Below the range of half precision the rounding error of one entry doubles with
every halving by chance once in three times; of sixteen hardly ever."""

NEVER = 10**9
"""A growth interval after which a scale never grows."""

Kind = Literal["grows", "falls", "otherwise"]


@dataclass(frozen=True, slots=True)
class ScaleDependence:
    """How the gradient that an optimizer's first step reads depends on the loss scale."""

    optimizer: int
    kind: Kind
    """It grows or falls with the scale, or changes otherwise."""
    whole: bool
    """Whether all of it does, or a part."""
    factor: float
    """By how much it changed as the scale was halved."""
    scale: float
    """What it was halved from."""
    names: tuple[str, ...]
    """Parameters whose gradients changed."""


@dataclass(frozen=True, slots=True)
class AtLowest:
    """Steps attempted and skipped at the lowest scale, and where the first non-finite value came from."""

    tried: int
    skipped: int
    origin: NonFiniteOrigin | None


class RescaledRuns:
    """The loop under other loss scales."""

    def __init__(self, evidence: Evidence | EnabledScaler) -> None:
        self._seen, self._plan, self._rerun = evidence.run(), evidence.plan(), evidence.rerun

    def dependences(self) -> Iterator[ScaleDependence]:
        """The first steps of each optimizer whose gradients depend on the scale; what comes after such a step of
        another optimizer is not judged."""
        wanted = {o.index: 1 for o in self._seen.optimizers if steps_of(self._seen, o.index)}
        tried = [t for trace in traces(self._seen) for t in zip(trace.factors, trace.made, strict=True)]
        scale = min([HIGHEST, *(factor for factor, made in tried if made and factor > 0)])
        records = [self._at(scale, wanted), self._at(scale / 2, wanted)]
        if not all(self._begun_at(r, scale / 2**i) for i, r in enumerate(records)) or _bit_equal(records, list(wanted)):
            return
        records.append(self._at(scale / 4, wanted))
        if not self._begun_at(records[2], scale / 4):
            return
        for optimizer in sorted(wanted, key=lambda o: steps_of(self._seen, o)[0].at):
            found = self._dependence(records, optimizer, scale)
            if found is not None:
                yield found
            if not _bit_equal(records, [optimizer]):
                if found is None:
                    yield ScaleDependence(optimizer, "otherwise", False, math.nan, scale, ())
                return

    def in_float32(self, optimizer: int) -> float | None:
        """By how much, relative to its length, the gradient of an optimizer's first step changes as the scale is
        halved, with every autocast block switched off: halving is exact there, and nothing under- or overflows. None
        where it cannot be said."""
        wanted, records = {optimizer: 1}, []
        with patched(torch.autocast, "__init__", _switched_off):
            for scale in (HIGHEST, HIGHEST / 2):
                records.append(self._at(scale, wanted))
                if not self._begun_at(records[-1], scale):
                    return None
        gradients = [_read(r, optimizer, 0) for r in records]
        known = [g for g in gradients if g]
        if len(known) < 2 or not _same_items(records, optimizer, 0) or not _as_read(records, optimizer):
            return None
        one, half = vectors(known)
        size = float(torch.linalg.vector_norm(one))
        return float(torch.linalg.vector_norm(one - half)) / size if 0.0 < size < math.inf else None

    def crossed(self) -> tuple[int, int, float] | None:
        """An optimizer whose gradients one scaler scales and another unscales: with the scale of one scaler alone
        halved, its first step reads half or twice the gradient. With it the scaler, as the nth that was built."""
        wanted = {o.index: 1 for o in self._seen.optimizers if steps_of(self._seen, o.index)}
        same = self._at(HIGHEST, wanted)
        for nth in range(len({c.scaler for c in self._seen.scaler_calls() if c.enabled})):
            with scalers_built_with(nth=nth, init_scale=HIGHEST / 2):
                other = self._at(HIGHEST, wanted)
            for optimizer in sorted(wanted, key=lambda o: steps_of(self._seen, o)[0].at):
                first, second = _read(same, optimizer, 0), _read(other, optimizer, 0)
                if first and second and _same_items([same, other], optimizer, 0):
                    one, half = vectors([first, second])
                    factor = _factor(one, half)
                    if factor is not None and any(factor == f and _near(half, f * one) for f in (0.5, 2.0)):
                        return optimizer, nth, factor
                if not _bit_equal([same, other], [optimizer]):
                    break  # what comes after such a step has other weights
        return None

    def grows_between(self, optimizer: int, nth: int) -> float | None:
        """The gradient that this step reads where the scale doubles at every update, over the one at a constant scale;
        None where the two are not proportional."""
        wanted = {optimizer: nth + 1}
        grown = self._at(HIGHEST, wanted, growth_interval=1, growth_factor=2.0)
        constant = self._at(HIGHEST, wanted, growth_interval=NEVER)
        first, second = _read(constant, optimizer, nth), _read(grown, optimizer, nth)
        begun = self._begun_at(grown, HIGHEST) and self._begun_at(constant, HIGHEST)
        if not begun or first is None or second is None or not _same_items([constant, grown], optimizer, nth):
            return None
        one, other = vectors([first, second])
        factor = _factor(one, other)
        return factor if factor is not None and _near(other, factor * one) else None

    def at_lowest(self, tries: int) -> AtLowest:
        """Steps skipped of ``tries`` at the lowest scale."""

        def enough(record: Record) -> bool:
            return sum(call.what == "step" for call in record.scaler_calls()) >= tries

        origins = NonFiniteOrigins()
        count = max(tries, self._plan.count)
        with scalers_built_with(init_scale=LOWEST, growth_interval=NEVER):
            record = self._rerun(contexts=origins.contexts, count=count, enough=enough, may_raise=True)
        made = [m for t in traces(record) for m in t.made] if self._begun_at(record, LOWEST) else []
        return AtLowest(len(made), made.count(False), origins.first)

    def _at(self, scale: float, wanted: dict[int, int], **how: Any) -> Record:
        def enough(record: Record) -> bool:
            return bool(record.steps) and all(len(steps_of(record, o)) >= n for o, n in wanted.items())

        with scalers_built_with(init_scale=scale, **{"growth_interval": NEVER, **how}):
            return self._rerun(enough=enough, may_raise=True)

    def _begun_at(self, record: Record, scale: float) -> bool:
        """Whether every scaler began at this scale (one that was loaded has another), and the run went as before."""
        first: dict[int, float] = {}
        for call in record.scaler_calls():
            if call.enabled and call.what == "scale" and math.isfinite(call.factor):
                first.setdefault(call.scaler, call.factor)
        as_before = record.raised is None or self._seen.raised is not None
        return as_before and bool(first) and all(f == scale for f in first.values())

    def _dependence(self, records: Sequence[Record], optimizer: int, scale: float) -> ScaleDependence | None:
        gradients = [_read(r, optimizer, 0) for r in records]
        if any(g is None for g in gradients) or not _same_items(records, optimizer, 0):
            return None
        if not _as_read(records, optimizer):
            return None
        named = [g for g in gradients if g is not None]
        one, half, quarter = vectors(named)
        first, second = one - half, half - quarter
        kind: Kind
        if _near(first, 2 * second):
            kind = "grows"
        elif _near(second, 2 * first):
            kind = "falls"
        else:
            return None
        factor = _factor(one, half)
        if factor is None:
            return None
        whole = _near(half, (0.5 if kind == "grows" else 2.0) * one)
        if not whole and int((first != 0).sum()) < LEAST:
            return None
        changed = [n for n, g in named[0].items() if n in named[1] and not torch.equal(g, named[1][n])]
        return ScaleDependence(optimizer, kind, whole, factor, scale, tuple(changed))


def _switched_off(original: Callable[..., None]) -> Callable[..., None]:
    """``torch.autocast.__init__`` for blocks that are never enabled."""

    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(block: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(block, *args, **kwargs)
        bound.arguments["enabled"] = False
        original(*bound.args, **bound.kwargs)

    return init


def _read(record: Record, optimizer: int, nth: int) -> Gradient | None:
    """The gradient that the optimizer's nth step read: as it was before clipping, unless it was unscaled after that."""
    steps = steps_of(record, optimizer)
    if nth >= len(steps):
        return None
    read = steps[nth].reads[0]
    since = steps[nth - 1].reads[0].at if nth else 0
    clips = [w.at for w in record.of(GradWrite) if w.how == "clipped" and since < w.at < read.at]
    unscaled = [c.at for c in record.scaler_calls() if c.what == "unscale" and c.optimizer == optimizer]
    if not clips or not any(clips[0] < at < read.at for at in unscaled):
        return consumed(record, optimizer, nth)
    samples = [(record.parameters[i], sample) for i, sample in read.grads.items() if sample is not None]
    return {p.name: values(sample, p.dtype) for p, sample in samples if not sample.sparse and sample.raw}


def _bit_equal(records: Sequence[Record], optimizers: Sequence[int]) -> bool:
    """Whether the first steps of these optimizers read the same in all runs, bit for bit."""
    for optimizer in optimizers:
        gradients = [_read(r, optimizer, 0) for r in records]
        known = [g for g in gradients if g is not None]
        if len(known) != len(gradients) or any(g.keys() != known[0].keys() for g in known):
            return False
        if any(not torch.equal(g[n], known[0][n]) for g in known[1:] for n in g):
            return False
    return True


def _same_items(records: Sequence[Record], optimizer: int, nth: int) -> bool:
    """Whether the step came after the same batch in all runs: a scaler may have skipped one."""
    items = set()
    for record in records:
        steps = steps_of(record, optimizer)
        before = [b.item for b in record.autograd_passes() if nth < len(steps) and b.at < steps[nth].at]
        items.add((len(before), before[-1] if before else 0))
    return len(items) == 1


def _as_read(records: Sequence[Record], optimizer: int) -> bool:
    """Whether the step uses the gradients as it reads them: at the same learning rate whatever the scale, and unchanged
    inside the step; of an optimizer that is not torch's own, the updates must differ as well."""
    steps: list[Step] = [steps_of(r, optimizer)[0] for r in records]
    if any(s.lrs != steps[0].lrs for s in steps):
        return False
    for step in steps:
        for index, grad in step.reads[-1].grads.items():
            if grad is not None and not grad.same(step.left.get(index)):
                return False
    return records[0].optimizers[optimizer].from_torch or steps[0].updates != steps[1].updates


def _factor(first: torch.Tensor, second: torch.Tensor) -> float | None:
    size = float(first @ first)
    return float(first @ second) / size if 0 < size < math.inf else None


def _near(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the two are the same but for rounding, and not zero."""
    size = float(torch.linalg.vector_norm(second))
    return 0 < size < math.inf and float(torch.linalg.vector_norm(first - second)) <= ROUNDING * size
