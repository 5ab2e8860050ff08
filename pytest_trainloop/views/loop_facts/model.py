"""The lines "model", "optimizer" and "precision"."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.weight_decay_groups.groups import Kind, kind_of
from pytest_trainloop.recording.events import LossCall
from pytest_trainloop.views.loop_facts.facts import none_seen
from pytest_trainloop.views.loop_facts.page import Line
from pytest_trainloop.views.loop_facts.words import marked, names, numbered, span, two

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.recording.record import Parameter
    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.loop_facts.measured import Group

KINDS: tuple[Kind, ...] = ("embedding", "matrix", "norm", "bias", "vector")
"""What the tensors of a group are, in the order of the line."""

_SINGLE = "float32"


def model(facts: Facts) -> Iterator[Line]:
    record, measured = facts.record, facts.measured
    own = [p for p in record.parameters if p.role != "foreign" and p.declared] or record.parameters
    if not own:
        yield none_seen("model", "give model=")
        return
    weights = sum(math.prod(p.shape) for p in own)
    held = record.held
    frozen = [p for p in own if not p.trainable]
    silent = [p for p in own if p.trainable and not record.reached(p.index)]
    homeless = [p for p in own if p.trainable and p.index not in held]
    parts = [f"{numbered(weights, 'weight')} in {numbered(len(own), 'tensor')}"]
    parts.append(f"{len(frozen)} frozen{_shown(frozen)}")
    parts.append(marked(f"{len(silent)} without gradient{_shown(silent)}", bool(silent)))
    if homeless:
        parts.append(marked(f"{len(homeless)} in no optimizer{_shown(homeless)}", True))
    if measured.tied:
        parts.append(f"tied: {'; '.join(' = '.join(group) for group in measured.tied[:2])}")
    if measured.buffers:
        parts.append(numbered(measured.buffers, "buffer"))
    dtypes = Counter(p.dtype for p in own)
    kinds = ", ".join(d if len(dtypes) == 1 else f"{d} ({n})" for d, n in sorted(dtypes.items()))
    tops = ("", *sorted({p.owner.split(".")[0] for p in own}))
    where = next((line for path in tops if (line := measured.made.module(path))), "")
    yield Line(
        label="model",
        text=f"{', '.join(parts)}; {kinds}",
        where=facts.where(where),
        odd=bool(silent or homeless),
    )


def optimizer(facts: Facts) -> Iterator[Line]:
    record, measured = facts.record, facts.measured
    known = {p.name: p for p in record.parameters}
    if not facts.stepping:
        yield none_seen("optimizer", "no optimizer stepped; give optimizer=", odd=True)
    for index in facts.stepping:
        held = record.optimizers[index]
        name = facts.optimizer(index)
        kind = held.kind if not name else f"{held.kind} {name}" if name.isdigit() else f"{held.kind} of {name}"
        stepped = marked(numbered(held.steps, "step"), not held.steps)
        dtypes = measured.state_dtypes.get(index, ())
        other = [d for d in dtypes if d != _SINGLE]
        state = f", state {marked(', '.join(dtypes), bool(other))}" if dtypes else ""
        maximizes = ", maximize *" if held.maximizes else ""
        yield Line(
            label="optimizer",
            text=f"{kind}, {stepped}{state}{maximizes}",
            where=facts.where(measured.made.optimizer(index)),
            odd=bool(not held.steps or other or held.maximizes),
        )
        groups = measured.groups.get(index, [])
        lrs = _lrs(facts, index)
        line = facts.where(measured.made.group(index))
        for number, group in enumerate(groups):
            yield _group(number, group, lrs[number] if number < len(lrs) else [], known, line)


def _lrs(facts: Facts, index: int) -> list[list[float]]:
    """The rates of each group at the steps of an optimizer."""
    steps = [s for s in facts.record.innermost_steps() if s.optimizer == index and s.lrs]
    return [[s.lrs[g] for s in steps if g < len(s.lrs)] for g in range(max((len(s.lrs) for s in steps), default=0))]


def _group(number: int, group: Group, lrs: list[float], known: Mapping[str, Parameter], where: str) -> Line:
    unmoved = bool(group.moved) and all(m == 0 for m in group.moved)
    norms = [n for n in group.norms if not math.isnan(n)]
    empty = not group.names and not norms
    still = bool(lrs) and not any(lrs) and not empty
    kinds = Counter(kind_of(known[name]) for name in group.names if name in known)
    kinds_of_norm = ", ".join(numbered(kinds[kind], kind) for kind in KINDS if kinds[kind])
    without = not norms and bool(group.norms) and not empty
    fields = [
        f"decay {two(group.decay)}",
        f"rate {marked(span(lrs[0], lrs[-1]), still)}" if lrs else "rate not seen",
        f"|g| {span(norms[0], norms[-1])}" if norms else "" if empty else marked("|g| none", without),
        f"update/weight {marked(span(group.moved[0], group.moved[-1]), unmoved)}" if group.moved and not empty else "",
        "no tensors"
        if empty
        else f"{kinds_of_norm}: {names(group.names)}"
        if kinds_of_norm
        else "tensors of no module",
    ]
    return Line(
        label=f"  group {number}",
        text=(f"{group.name}: " if group.name else "") + "   ".join(filter(None, fields)),
        where=where,
        odd=not empty and (still or unmoved or without),
    )


def precision(facts: Facts) -> Iterator[Line]:
    record = facts.record
    forwards = [f for f in record.root_forwards() if f.grad_enabled]
    cast = [f for f in forwards if f.autocast]
    low = sorted({p.dtype for p in record.parameters if p.dtype not in (_SINGLE, "")})
    calls = record.scaler_calls()
    parts = []
    where = ""
    if cast:
        kinds = ", ".join(sorted({f.autocast for f in cast}))
        every = len(cast) == len(forwards)
        parts.append(marked(f"autocast {kinds} in {len(cast)} of {len(forwards)} forward passes", not every))
        where = facts.where(cast[0].place)
    outside = [c for c in record.of(LossCall) if c.input_dtype in ("bfloat16", "float16")]
    if outside:
        parts.append(f"loss computed in {outside[0].input_dtype} *")
        where = where or facts.where(outside[0].place)
    if low:
        parts.append(f"weights in {', '.join(low)}")
    if calls:
        scaled = [c.factor for c in calls if c.what == "scale" and not math.isnan(c.factor)]
        if any(c.enabled for c in calls):
            scale = f"scale {span(scaled[0], scaled[-1])}" if scaled else "scale not applied *"
            parts.append(f"{scale}, {marked(numbered(record.skipped, 'step') + ' skipped', bool(record.skipped))}")
        else:
            parts.append("scaler disabled")
        where = where or facts.where(calls[0].place)
    text = "; ".join(parts) or "all in float32, no autocast, no scaler"
    yield Line(label="precision", text=text, where=where, odd="*" in text)


def _shown(parameters: list[Parameter]) -> str:
    return f" ({names([p.name for p in parameters], 2)})" if parameters else ""
