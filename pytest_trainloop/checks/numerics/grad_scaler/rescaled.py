"""Gradients that depend on the loss scale, by runs in which nothing but the scale is another.

Halving a loss scale is exact in floating point as long as nothing leaves the range. So the gradient that a step reads
is the same bit for bit where all of it was scaled and unscaled by the same number. Where it is not, three scales s, s/2
and s/4 separate the part that grows with the scale (never unscaled) from the part that falls with it (never scaled): of
the differences between neighbours, one is twice the other.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.checks.numerics.grad_scaler.calls import at, traces
from pytest_trainloop.checks.numerics.grad_scaler.causes import found
from pytest_trainloop.instruments.gradients.vectors import consumed, steps_of, vectors
from pytest_trainloop.instruments.tracing.nonfinite import NonFiniteOrigins
from pytest_trainloop.recording.events import Backward, ScalerCall, Step
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.runs.scalers import scalers_built_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.checks.numerics.grad_scaler.calls import ScaleTrace
    from pytest_trainloop.checks.numerics.grad_scaler.enabled_scaler import EnabledScaler
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.gradients.vectors import Gradient
    from pytest_trainloop.instruments.records.gradient_ledger import Ledger
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

LEAST_ENTRIES = 16
"""Entries that a part must change in. Below the range of half precision the rounding error of one entry doubles with
every halving by chance once in three times; of sixteen hardly ever."""

FEW = 4
"""Scalers, of which each is tried by a run of its own."""

NEVER = 10**9
"""A growth interval after which a scale never grows."""


@dataclass(frozen=True, slots=True)
class Dependence:
    """How the gradient that an optimizer's first step reads depends on the loss scale."""

    optimizer: int
    kind: Literal["grows", "falls", "otherwise"]
    whole: bool
    """Whether all of it does, or a part."""
    halved: str
    """What it was with the scale halved, in words."""
    changed: tuple[str, ...]


def scale_findings(evidence: Evidence | EnabledScaler, ledger: Ledger) -> Iterator[Finding]:
    record = ledger.record
    first = {o.index: steps_of(record, o.index)[0] for o in record.optimizers if steps_of(record, o.index)}
    optimizers = sorted(first, key=lambda o: first[o].at)
    if not record.steps:
        return
    if (between := _update_between(evidence, ledger)) is not None:
        yield between
        return
    dependences = list(_dependences(evidence, record, optimizers))
    for found_ in dependences:
        yield from _named(evidence, ledger, found_)
    scalers = len({c.scaler for c in record.scaler_calls() if c.enabled})
    if not dependences and 1 < scalers <= FEW:
        yield from _another_scaler(evidence, record, optimizers, scalers)


def _dependences(evidence: Evidence | EnabledScaler, record: Record, optimizers: Sequence[int]) -> Iterator[Dependence]:
    """By optimizer, in the order of their first steps, up to the first that depends on the scale: what comes after has
    other weights."""
    tried = [t for trace in traces(record) for t in zip(trace.factors, trace.made, strict=True)]
    scale = min([HIGHEST, *(factor for factor, made in tried if made and factor > 0)])
    records: list[Record] = []
    for s in (scale, scale / 2, scale / 4):
        records.append(_at(evidence, s, optimizers))
        if not _begun_at(record, records[-1], s) or (s == scale / 2 and _bit_equal(records, optimizers)):
            return
    for optimizer in optimizers:
        found_ = _dependence(records, optimizer, scale)
        if found_ is not None:
            yield found_
        if not _bit_equal(records, [optimizer]):
            if found_ is None:
                halved = f"with the scale halved from {scale:g}, the first step reads another gradient"
                yield Dependence(optimizer, "otherwise", False, halved, ())
            return


def _dependence(records: Sequence[Record], optimizer: int, scale: float) -> Dependence | None:
    gradients = _read_in(records, optimizer)
    if gradients is None or not _as_read(records, optimizer):
        return None
    one, half, quarter = vectors(gradients)
    first, second = one - half, half - quarter
    grows = _near(first, 2 * second)
    factor = _factor(one, half)
    whole = _near(half, (0.5 if grows else 2.0) * one)
    if (
        not (grows or _near(second, 2 * first))
        or factor is None
        or (not whole and int((first != 0).sum()) < LEAST_ENTRIES)
    ):
        return None
    changed = [n for n, g in gradients[0].items() if n in gradients[1] and not torch.equal(g, gradients[1][n])]
    halved = f"with the scale halved from {scale:g}, the first step reads "
    if whole:
        halved += f"{factor:.4g} times the gradient"
    else:
        halved += f"another gradient, and from {scale / 2:g} to {scale / 4:g} it changes {'half' if grows else 'twice'}"
        halved += " as much"
    return Dependence(optimizer, "grows" if grows else "falls", whole, halved, tuple(changed))


def _named(evidence: Evidence | EnabledScaler, ledger: Ledger, it: Dependence) -> Iterator[Finding]:
    """The cause of one dependence: the narrowest first."""
    record, optimizer = ledger.record, it.optimizer
    kind, step = record.optimizers[optimizer].kind, _first_step(record, optimizer)
    at_step = step or record.step_line()
    unscaled = [c for c in record.scaler_calls() if c.what == "unscale" and c.optimizer == optimizer]
    steps = [c for c in record.scaler_calls() if c.what == "step"]
    facts = {"kind": kind, "whole": it.whole, "halved": it.halved, "changed": it.changed}
    if early := _unscaled_early(ledger, optimizer, unscaled):
        names = ("scaler.unscale_(optimizer)", *it.changed)
        yield found("unscaled_inside_window", early[0], names, first=at(early[0]), then=at(early[1]), **facts)
    elif it.kind == "falls":
        # divided by a scale that it never had, or that a clip removed
        until = max((c.at for c in unscaled if step and c.at < step.at), default=0)
        since = next((b.at for b in ledger.live(optimizer, until)), until)
        writes = ledger.between(since, until, record.optimizers[optimizer].parameters, "altered", "clipped")
        write = writes[0].event if writes else None
        passes = ledger.live(optimizer, step.at) if step else []
        if write is not None and it.whole:
            yield found("clip_before_unscale", write, (write.by, *it.changed), "to a size", **facts)
        else:
            where = write or (passes[-1] if passes else at_step)
            facts |= {"losses": sum(c.what == "scale" for c in record.scaler_calls()), "passes": len(ledger.passes)}
            yield found("not_scaled", where, ("scaler.scale(loss)", *it.changed), **facts)
    elif it.kind == "grows" and not any(step and c.at < step.at < c.until for c in steps):
        yield found("not_unscaled", at_step, ("optimizer.step()", *it.changed), **facts)
    elif not it.whole and (change := _in_float32(evidence, record, optimizer)) > ROUNDING:
        # through a scaler all of it may grow: a fused optimizer unscales inside its step
        before = [b for b in record.of(Backward) if step is None or b.at < step.at]
        used = next((b for b in before if b.kind == "grad"), None)
        moved = used is None and any(m.by is None and set(m.parameters) & set(record.held) for m in record.moves)
        facts |= {"used": used is not None, "moved": moved, "by": change}
        facts |= {"repair": "divide it by the scale before it is used: slope / scaler.get_scale()"} if used else {}
        where = used or (before[-1] if before else record.step_line())
        yield found("scale_in_loss", where, ("scaler.scale(loss)",), **facts)


def _first_step(record: Record, optimizer: int) -> Step | None:
    return next((s for s in record.innermost_steps() if s.optimizer == optimizer), None)


def _unscaled_early(ledger: Ledger, optimizer: int, unscaled: list[ScalerCall]) -> tuple[ScalerCall, Backward] | None:
    """The first unscale_ of an optimizer's gradients that is followed by another backward pass before their step."""
    steps = [s for s in ledger.record.of(Step) if s.optimizer == optimizer]
    for call in unscaled:
        step = next((s for s in steps if s.at > call.at), None)
        passes = ledger.live(optimizer, step.at) if step and call.enabled else []
        later = next((b for b in passes if b.at > call.at), None)
        if later is not None and passes[0].at < call.at:
            return call, later
    return None


def _update_between(evidence: Evidence | EnabledScaler, ledger: Ledger) -> Finding | None:
    """The first step through a scaler that was updated since all passes that made its gradients, where a scale that
    doubles at every update changes what the step reads."""
    record = ledger.record
    calls, steps = [c for c in record.scaler_calls() if c.enabled], record.innermost_steps()
    for call in calls:
        if call.what != "step" or call.optimizer is None:
            continue
        mine = [c for c in calls if c.scaler == call.scaler and c.at < call.at]
        update = next((c for c in reversed(mine) if c.what == "update"), None)
        passes = ledger.live(call.optimizer, call.at)
        made = next((s for s in steps if call.at < s.at < call.until), None)
        if update is None or made is None or not passes or passes[-1].at > update.at:
            continue
        optimizer, nth = made.optimizer, sum(s.optimizer == made.optimizer and s.at < made.at for s in steps)
        constant = _at(evidence, HIGHEST, [optimizer], nth)
        grown = _at(evidence, HIGHEST, [optimizer], nth, growth_interval=1, growth_factor=2.0)
        gradients = _read_in([constant, grown], optimizer, nth)
        if gradients is None or not all(_begun_at(record, r, HIGHEST) for r in (constant, grown)):
            return None
        one, other = vectors(gradients)
        factor = _factor(one, other)
        if factor is None or round(factor, 2) != 0.5 or not _near(other, factor * one):
            return None
        unscaled = [c for c in mine if c.what == "unscale" and c.optimizer == call.optimizer and c.at > passes[-1].at]
        kind = record.optimizers[optimizer].kind
        return found(
            "update_between",
            update,
            ("scaler.update()", f"scaler.step({kind})"),
            kind=kind,
            early=bool(unscaled) and unscaled[-1].at < update.at,
            factor=f"{factor:.3g}",
            first=at(update),
            then=at(call),
        )
    return None


def _another_scaler(
    evidence: Evidence | EnabledScaler, record: Record, optimizers: Sequence[int], scalers: int
) -> Iterator[Finding]:
    """An optimizer whose gradients one scaler scales and another unscales: with the scale of one scaler alone halved,
    its first step reads half or twice the gradient."""
    same = _at(evidence, HIGHEST, optimizers)
    for number in range(scalers):
        with scalers_built_with(nth=number, init_scale=HIGHEST / 2):
            other = _at(evidence, HIGHEST, optimizers)
        for optimizer in optimizers:
            gradients = _read_in([same, other], optimizer)
            one, half = vectors(gradients) if gradients and all(gradients) else (torch.zeros(1), torch.zeros(1))
            factor = _factor(one, half)
            if factor in (0.5, 2.0) and _near(half, factor * one):
                step, kind = _first_step(record, optimizer), record.optimizers[optimizer].kind
                calls = [c for c in record.scaler_calls() if c.what == "scale" and c.enabled]
                scaled = [c for c in calls if step and c.at < step.at]
                facts = {"kind": kind, "number": number + 1, "factor": f"{factor:.3g}"}
                facts["first"] = scaled[-1].place if scaled else "no line"
                yield found("another_scaler", step or record.step_line(), (f"scaler.step({kind})",), **facts)
                return
            if not _bit_equal([same, other], [optimizer]):
                break  # what comes after such a step has other weights


def _in_float32(evidence: Evidence | EnabledScaler, record: Record, optimizer: int) -> float:
    """By how much, relative to its length, the gradient of an optimizer's first step changes as the scale is halved,
    with every autocast block switched off: halving is exact there, and nothing under- or overflows. NaN where it cannot
    be said."""
    records = []
    with patched(torch.autocast, "__init__", _switched_off):
        for scale in (HIGHEST, HIGHEST / 2):
            records.append(_at(evidence, scale, [optimizer]))
            if not _begun_at(record, records[-1], scale):
                return math.nan
    gradients = _read_in(records, optimizer)
    if gradients is None or not all(gradients) or not _as_read(records, optimizer):
        return math.nan
    one, half = vectors(gradients)
    size = float(torch.linalg.vector_norm(one))
    return float(torch.linalg.vector_norm(one - half)) / size if 0.0 < size < math.inf else math.nan


def _switched_off(original: Callable[..., None]) -> Callable[..., None]:
    """``torch.autocast.__init__`` for blocks that are never enabled."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(block: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(block, *args, **kwargs)
        bound.arguments["enabled"] = False
        original(*bound.args, **bound.kwargs)

    return init


def scale_collapsed(evidence: Evidence, trace: ScaleTrace, tries: int) -> Iterator[Finding]:
    """A scale that falls, where steps are skipped as often at the lowest scale of all: else a lower one will fit."""

    def enough(record: Record) -> bool:
        return sum(call.what == "step" for call in record.scaler_calls()) >= tries

    origins, count = NonFiniteOrigins(), max(tries, evidence.plan().count)
    with scalers_built_with(init_scale=LOWEST, growth_interval=NEVER):
        record = evidence.rerun(contexts=origins.contexts, count=count, enough=enough, may_raise=True)
    made = [m for t in traces(record) for m in t.made] if _begun_at(evidence.run(), record, LOWEST) else []
    skipped, origin, steps = made.count(False), origins.first, len(trace.made)
    if skipped and 2 * skipped * steps >= trace.skipped * len(made):
        words = f"; {origin} makes the first {origin.value} ({origin.direction} pass)" if origin else ""
        facts = {"trace": trace, "steps": steps, "skipped": trace.skipped}
        facts |= {"skipped_lowest": skipped, "tries": len(made), "origin": words}
        yield found("scale_collapsed", origin or trace, (origin.op if origin else "scaler.step(optimizer)",), **facts)


def _at(
    evidence: Evidence | EnabledScaler, scale: float, optimizers: Sequence[int], nth: int = 0, **how: Any
) -> Record:
    """The run in which every scaler begins at this scale, up to the given step of these optimizers."""

    def enough(record: Record) -> bool:
        return bool(record.steps) and all(len(steps_of(record, o)) > nth for o in optimizers)

    with scalers_built_with(init_scale=scale, **{"growth_interval": NEVER, **how}):
        return evidence.rerun(enough=enough, may_raise=True)


def _begun_at(seen: Record, record: Record, scale: float) -> bool:
    """Whether every scaler began at this scale (one that was loaded has another), and the run went as before."""
    first: dict[int, float] = {}
    for call in record.scaler_calls():
        if call.enabled and call.what == "scale" and math.isfinite(call.factor):
            first.setdefault(call.scaler, call.factor)
    as_before = record.raised is None or seen.raised is not None
    return as_before and bool(first) and all(f == scale for f in first.values())


def _read_in(records: Sequence[Record], optimizer: int, nth: int = 0) -> list[Gradient] | None:
    """What the optimizer's nth step read in each run; None where it came after other batches (a scaler may have skipped
    a step) or was not made."""
    gradients, items = [], set()
    for record in records:
        gradient, steps = consumed(record, optimizer, nth), steps_of(record, optimizer)
        if gradient is None:
            return None
        gradients.append(gradient)
        before = [b.item for b in record.autograd_passes() if b.at < steps[nth].at]
        items.add((len(before), before[-1] if before else 0))
    return gradients if len(items) == 1 else None


def _bit_equal(records: Sequence[Record], optimizers: Sequence[int]) -> bool:
    """Whether the first steps of these optimizers read the same in all runs, bit for bit."""
    for optimizer in optimizers:
        first, *others = (consumed(r, optimizer, 0) for r in records)
        if first is None or any(g is None or g.keys() != first.keys() for g in others):
            return False
        if any(not torch.equal(values_, first[n]) for g in others if g for n, values_ in g.items()):
            return False
    return True


def _as_read(records: Sequence[Record], optimizer: int) -> bool:
    """Whether the step uses the gradients as it reads them: at the same learning rate whatever the scale, and unchanged
    inside the step; of an optimizer that is not torch's own, the updates must differ as well."""
    steps: list[Step] = [steps_of(r, optimizer)[0] for r in records]
    grads = [(grad, step.left.get(i)) for step in steps for i, grad in step.reads[-1].grads.items() if grad is not None]
    constant = all(s.lrs == steps[0].lrs for s in steps) and all(grad.same(left) for grad, left in grads)
    return constant and (records[0].optimizers[optimizer].from_torch or steps[0].updates != steps[1].updates)


def _factor(first: torch.Tensor, second: torch.Tensor) -> float | None:
    size = float(first @ first)
    return float(first @ second) / size if 0 < size < math.inf else None


def _near(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the two are the same but for rounding, and not zero."""
    size = float(torch.linalg.vector_norm(second))
    return 0 < size < math.inf and float(torch.linalg.vector_norm(first - second)) <= ROUNDING * size
