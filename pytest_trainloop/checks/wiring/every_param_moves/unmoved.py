"""Parameters that stay bit-equal although they are stepped with a gradient.

See docs/how-it-decides.md#whether-a-step-changes-a-parameter.

A step that changes w by less than half a ULP of w's dtype changes nothing, however often it is made. The same run in
float64 shows the size of the update; ``initial_lr`` shows the learning rate that a warm-up leads to. A weight that
stays at the bound of a projection moves from another start. One whose steps are kept elsewhere until they are large
enough moves at a higher learning rate.

``contiguous``, ``reshape`` and ``flatten`` give a view where the layout allows it, and a copy elsewhere. What is
written to the copy is lost: the same loop moves such a parameter once it lies in memory in another layout. Both runs
are in float64, so that no update is lost to rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.every_param_moves.causes import found
from pytest_trainloop.declare.memory_layout import turned
from pytest_trainloop.instruments.gradients.dependence import Dependences, mover
from pytest_trainloop.instruments.gradients.vectors import values
from pytest_trainloop.instruments.optimizers.float32_twin import Float32Twins
from pytest_trainloop.instruments.optimizers.spacing import lr_growth, spacings
from pytest_trainloop.instruments.records.stepped_parameters import (
    LEAST_STEPS,
    low_precision_stepped,
    noise_of,
    steps_with_gradient,
)
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.recording.events import Step
from pytest_trainloop.recording.shards import is_distributed
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.further_runs import float64_run
from pytest_trainloop.runs.optimizer_options import lr_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

LOW = ("bfloat16", "float16")

FEW = 0.1
"""Share of updates lost, below which an optimizer keeps what rounding takes: chance leaves 2 % unchanged."""

RAISED = 1e4
"""Factor on the learning rates: more than the 256 steps of half a ULP that rounding to bfloat16 can take back."""

LONGER = 13
"""Times as many steps as are watched in full, from another start."""


def bit_equal(record: Record) -> list[Parameter]:
    """Held parameters whose sampled entries were stepped with gradients other than zero and never changed."""
    moved = {i for move in record.moves for i in move.parameters}
    steps = steps_with_gradient(record)
    return [
        p
        for p in record.parameters
        if steps.get(p.index, 0) >= LEAST_STEPS
        and p.index not in moved
        and p.index in record.end
        and p.start.same(record.end[p.index])
        and not p.gone
    ]


def depending(evidence: Evidence, names: Sequence[str]) -> list[str]:
    """Those of the parameters that the loss depends on."""
    influence = evidence.shared(Dependences).influence(names) if names else {}
    return [n for n in names if influence[n].change > influence[n].bound]


def by_torch(record: Record, p: Parameter) -> bool:
    """Whether only optimizers of torch's own hold the parameter."""
    return all(record.optimizers[o].from_torch for o in record.held.get(p.index, ()))


def _in_float64(
    evidence: Evidence, parameters: Sequence[Parameter]
) -> Iterator[tuple[Parameter, Parameter, list[float]]]:
    """Each parameter with that of its name in float64, and the sizes of the steps there; not those unknown there."""
    double = evidence.shared(float64_run)
    wide = {p.name: p for p in double.parameters}
    for p in parameters:
        other = wide.get(p.name)
        if other is not None and other.index in double.end and other.start.raw:
            yield p, other, [s.updates[other.index] for s in double.of(Step) if other.index in s.updates]


def _measured(evidence: Evidence, parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
    """What the texts say of each: the median size of a step on it in float64, at the learning rate that a warm-up leads
    to, and the median distance of its values to the next of its dtype."""
    native, double = evidence.run(), evidence.shared(float64_run)
    measured = []
    for p, other, steps in _in_float64(evidence, parameters):
        change = values(double.end[other.index], "float64") - values(other.start, "float64")
        typical = float(change.abs().median()) / max(1, len(steps) or double.rounds)
        update = typical * lr_growth(native, p.index) if typical else 0.0
        ulp = float(spacings(values(p.start, p.dtype), p.dtype).median())
        measured.append({"first": p.name, "dtype": p.dtype, "update": update, "ulp": ulp})
    return measured


def left_out(evidence: Evidence, unmoved: Sequence[Parameter]) -> Iterator[Finding]:
    """Parameters that nothing makes move: not more steps, nor higher learning rates from another start. The optimizer
    that holds them must move others, or no parameter may move at all."""
    record = evidence.run()
    moving = {move.by for move in record.moves if move.parameters}
    held = {p.name: record.held.get(p.index, ()) for p in unmoved if not by_torch(record, p)}
    names = [name for name, holders in held.items() if not record.moves or not moving.isdisjoint(holders)]
    faster = {"contexts": lr_times(RAISED), "varied": "with a higher learning rate"}
    for times, changes in ((LONGER, {}), (5, faster)):
        if names:
            changes["count"] = times * evidence.plan().count
            changes["enough"] = lambda r, rounds=times * FULL_ROUNDS: r.rounds >= rounds
            resting = {p.name for p in bit_equal(evidence.rerun(prepare=displaced(names), **changes))}
            names = [name for name in names if name in resting]
    if names:
        kinds = ", ".join(record.optimizers[o].kind for o in sorted({o for name in names for o in held[name]}))
        facts = {"optimizers": kinds, "raised": RAISED, "all": len(names)}
        yield found("not_updated", record.step_line(), names, "others move" if record.moves else "none moves", **facts)


def displaced(names: Sequence[str]) -> Callable[[Watch], None]:
    """Moves the named parameters by half their root mean square before the run begins."""
    move = mover(names, jitter=False)

    def prepare(watch: Watch) -> None:
        move(watch)
        watch.table.take_as_start()

    return prepare


def whole_tensors(evidence: Evidence, unmoved: Sequence[Parameter]) -> Iterator[Finding]:
    """Parameters that are bit-equal after the run, where float64 moves them by less than rounding takes back."""
    record = evidence.run()
    measured = _measured(evidence, unmoved) if unmoved else []
    lost = [m for m in measured if 0.0 < m["update"] < m["ulp"] / 2]
    sure = {p.name for p in unmoved if p.dtype in LOW and by_torch(record, p)}
    if any(m["first"] not in sure and m["dtype"] in LOW for m in lost):
        # an optimizer may keep what rounding takes: then updates below half a ULP move other weights in the long run
        names = [p.name for p in low_precision_stepped(record, LOW)]
        counted = evidence.shared(Float32Twins).lost_updates(names, LOW)
        if any(f.share < FEW and f.update < f.ulp / 2 for f in counted):
            lost = [m for m in lost if m["first"] in sure or m["dtype"] not in LOW]
    for level in ("fault", "advice"):
        if mine := [m for m in lost if (m["first"] in sure) == (level == "fault")]:
            facts = max(mine, key=lambda m: m["ulp"] / m["update"]) | {"unmoved": len(mine), "steps": record.rounds}
            facts |= {"held": sum(p.index in record.held for p in record.parameters), "level": level}
            form = "" if facts["dtype"] in LOW else "full precision"
            if form:
                holders = next(record.held.get(p.index, ()) for p in unmoved if p.name == facts["first"])
                facts["change"] = evidence.shared(MadeAt.of).group(next(iter(holders), 0))
            yield found("lost_to_rounding", record.step_line(), [m["first"] for m in mine], form, **facts)


def left_in_copies(evidence: Evidence) -> Iterator[Finding]:
    """The parameters that never move, and move in another layout; also those that no optimizer holds."""
    record = evidence.run()
    suspected = {p.name: p for p in _suspects(record)}
    if not suspected or not evidence.repeatable:
        return
    double = evidence.shared(float64_run)
    resting = suspected.keys() - _moved(double) if double.raised is None else set()
    if not resting:
        return

    def turn(watch: Watch) -> None:
        for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
            if entry.name in resting and tensor.layout is torch.strided and not is_distributed(tensor):
                tensor.data = turned(tensor.data)
        watch.table.take_as_start()

    other = evidence.rerun(replace(evidence.plan(), double=True, may_raise=True, prepare=turn))
    moved = resting & _moved(other) if other.raised is None else set()
    if copied := [p for name, p in suspected.items() if name in moved]:
        first, at = copied[0], record.step_line() or next(iter(record.backwards()), "")
        passes = sum(any(not a.incoming.zero for a in b.arrivals.get(first.index, ())) for b in record.backwards())
        facts = {"passes": passes, "first": first.name, "shape": str(first.shape), "contiguous": first.contiguous}
        yield found("written_to_a_copy", at, [p.name for p in copied], **facts)


def _suspects(record: Record) -> Iterator[Parameter]:
    """Parameters that got gradients and never moved, and for which the layout may be the reason: not contiguous, or
    matrices that the loop's own code may read by columns."""
    noise, moved = noise_of(record), record.changed() | {i for move in record.moves for i in move.parameters}
    for p in record.parameters:
        if not p.requires_grad or p.role == "foreign" or p.gone or p.index not in record.end or p.index in moved:
            continue
        holders = [record.optimizers[o] for o in record.held.get(p.index, ())]
        own_code = not record.optimizers or any(not o.from_torch for o in holders)
        if record.declared_frozen(p.name) or (p.contiguous and not (len(p.shape) > 1 and own_code)):
            continue
        passes = sum(any(noise < a.incoming.peak for a in b.arrivals.get(p.index, ())) for b in record.backwards())
        if passes >= LEAST_STEPS:
            yield p


def _moved(record: Record) -> set[str]:
    return set(record.names(record.changed() | {i for move in record.moves for i in move.parameters}))
