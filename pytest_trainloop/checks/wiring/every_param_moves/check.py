"""Every parameter that is stepped with a gradient moves.

What it does
    It records each held parameter's values before and after the run, bit for bit, and the gradients and learning rates
    of its steps. One that never changed is looked at again in a float64 run.

Why is this bad?
    In bfloat16 the number after 1.0 is 1.0078: a norm's gain at 1.0 that is stepped by 1e-4 stays at 1.0 for ever. No
    error is raised, and the loss falls, since the rest of the model trains.

How it decides
    A fault needs all of: gradients other than zero that a step used, at a learning rate above zero, at least three
    times; no change by user code in between (a projection, a restore); the same bits at the end. Then one of two.
    Lost to rounding: float64 moves it, by less than half a ULP of its dtype at any learning rate that the schedule
    leads to. In float32 that is advice: the learning rate is far too low, which is for update_ratio to judge. So it is
    where the optimizer is not torch's own: it may keep what rounding takes (Kahan summation, stochastic rounding,
    master weights); where copies of it show that it does, nothing is said. Left out: such an optimizer does not move it
    by any means. Not in 156 steps from another start (it may stay at the bound of a projection), nor at 1e4 times the
    learning rate (its steps may be kept elsewhere until they are large enough), while it moves others, or nothing moves
    at all.
    Written to a copy: a parameter that got gradients in at least three backward passes and never changed, whoever
    updates it, is run again with the same values in another layout: contiguous, or with its axes in reverse order. In
    float64 it rests in its own layout and moves in the other one.
    Entries are counted as well: one is lost if it never changed and half a ULP at its value is more than the largest
    step on its tensor in float64. Half of all low-precision entries lost is a fault, whether a whole tensor stays or
    not.

Faulty
    >>> model = Classifier().to(torch.bfloat16)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

Fixed
    >>> model = Classifier()                           # float32 weights; products in bfloat16 under torch.autocast
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

Known limits
    Of large tensors up to 128 entries are looked at.

References
    https://arxiv.org/abs/1710.03740 (Micikevicius et al., Mixed Precision Training, section 3.1: master weights)
    https://arxiv.org/abs/2010.06192 (Zamirai et al., Revisiting BFloat16 Training: updates lost to rounding)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.consequences import LEARNING
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import some, them, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import Unmoved
    from pytest_trainloop.finding import Level
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "lost_to_rounding": Cause(
        proof="the same run in float64 moves the parameter by less than half a ULP of its dtype a step",
        repair=("keep the weights in float32 and compute under autocast, or give the optimizer float32 master weights"),
        explains=("parameter_precision", *LEARNING),
        change=(
            "cast",
            "module",
        ),
    ),
    "written_to_a_copy": Cause(
        proof="in float64 the same loop moves the parameter once it lies in memory in another layout",
        repair=(
            "write into the parameter: p.add_(update.view_as(p)), or p.copy_(new); p.contiguous(), p.reshape(-1) and "
            "p.flatten() give a copy where the layout of p needs one"
        ),
        explains=LEARNING,
        change=(
            "step",
            "optimizer",
        ),
    ),
    "not_updated": Cause(
        proof="a higher learning rate from another start does not move it, and other parameters move, or none at all",
        repair="go through all of the optimizer's param_groups in step()",
        explains=LEARNING,
        change=(
            "step",
            "optimizer",
        ),
    ),
}

LOW = ("bfloat16", "float16")

FEW = 0.1
"""Share of updates lost, below which an optimizer keeps what rounding takes: chance leaves 2 % unchanged."""

MOST = 0.5
"""Share of entries lost to rounding from which more of a model stays as it was than trains."""


@check(needs={"fit"}, causes=CAUSES, rank=50, steps=1)
def every_param_moves(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import bit_equal, low_precision_by_torch
    from pytest_trainloop.checks.wiring.every_param_moves.left_in_copies import left_in_copies

    record = evidence.run()
    if not record.steps and not record.changed():
        raise CannotDecide("no optimizer step was seen, and no weight changed")
    if in_copies := left_in_copies(evidence, record):
        yield _in_copies(record, in_copies)
    known = {p.name for p in in_copies}
    unmoved = [p for p in bit_equal(record) if p.name not in known]
    low = low_precision_by_torch(record, LOW)
    if unmoved:
        depending = _depending(evidence, [p.name for p in unmoved])
        unmoved = [p for p in unmoved if p.name in depending]
    most = list(_most_entries(evidence, record, low)) if low else []
    yield from most
    reported = {name for finding in most for name in finding.culprits}
    unmoved = [p for p in unmoved if p.name not in reported]
    if unmoved:
        yield from _whole_tensors(evidence, record, unmoved)


def _depending(evidence: Evidence, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the parameters that the loss depends on."""
    from pytest_trainloop.gradients.dependence import Dependences

    found = evidence.shared(Dependences).influence(names)
    return tuple(n for n in names if found[n].change > found[n].bound)


def _whole_tensors(evidence: Evidence, record: Record, unmoved: Sequence[Parameter]) -> Iterator[Finding]:
    """Parameters that are bit-equal after the run, and what float64 makes of them."""
    from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import held_by_torch, measure
    from pytest_trainloop.runs.further_runs import float64_run

    left_out = _never_moved(evidence, record, [p for p in unmoved if not held_by_torch(record, p.index)])
    if left_out:
        yield _left_out(record, left_out)
    rest = [p for p in unmoved if p.name not in left_out]
    lost = [u for u in measure(rest, record, evidence.shared(float64_run)) if u.lost] if rest else []
    sure = {p.name for p in rest if p.dtype in LOW and held_by_torch(record, p.index)}
    if any(u.name not in sure and u.dtype in LOW for u in lost) and _keeps_lost_updates(evidence, record):
        lost = [u for u in lost if u.name in sure or u.dtype not in LOW]
    if faults := [u for u in lost if u.name in sure]:
        yield _lost(evidence, record, faults, "fault")
    if advice := [u for u in lost if u.name not in sure]:
        yield _lost(evidence, record, advice, "advice")


def _keeps_lost_updates(evidence: Evidence, record: Record) -> bool:
    """Whether updates below half a ULP move other weights in the long run: then the optimizer keeps them."""
    from pytest_trainloop.optimizers.float32_twin import Float32Twins
    from pytest_trainloop.records.stepped_parameters import low_precision_stepped

    names = [p.name for p in low_precision_stepped(record, LOW)]
    counted = evidence.shared(Float32Twins).lost_updates(names, LOW)
    return any(f.share < FEW and f.update < f.ulp / 2 for f in counted)


def _never_moved(evidence: Evidence, record: Record, unmoved: Sequence[Parameter]) -> list[str]:
    """Parameters that nothing makes move: not more steps, nor higher learning rates from another start. The optimizer
    that holds them must move others, or no parameter may move at all."""
    from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import bit_equal
    from pytest_trainloop.checks.wiring.every_param_moves.displaced import displaced_run, displaced_run_at_high_lr

    moving = {move.by for move in record.moves if move.parameters}
    names = [p.name for p in unmoved if not record.moves or not moving.isdisjoint(record.held.get(p.index, ()))]
    for further_run in (displaced_run, displaced_run_at_high_lr):
        if names:
            still_equal = {p.name for p in bit_equal(further_run(evidence, names))}
            names = [name for name in names if name in still_equal]
    return names


def _most_entries(evidence: Evidence, record: Record, low: Sequence[Parameter]) -> Iterator[Finding]:
    """Low-precision entries that never move, where they are the greater part of all."""
    from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import lost_shares, measure
    from pytest_trainloop.runs.further_runs import float64_run

    double = evidence.shared(float64_run)
    shares = lost_shares(low, record, double)
    sizes = {p.name: math.prod(p.shape) for p in low}
    lost = sum(share * sizes[name] for name, share in shares.items())
    names = tuple(name for name, share in shares.items() if share >= MOST)
    if not names or lost < MOST * sum(sizes.values()):
        return
    names = _depending(evidence, names)
    if sum(shares[n] * sizes[n] for n in names) < MOST * sum(sizes.values()):
        return
    unmoved = measure([p for p in low if p.name in names], record, double)
    names = tuple(u.name for u in unmoved)
    first = max(unmoved, key=lambda u: u.ulp)
    yield Finding(
        cause="lost_to_rounding",
        summary=(
            f"{lost / sum(sizes.values()):.0%} of the {first.dtype} weights never move, most of them in {some(names)}: "
            f"each update is below half a ULP of {first.dtype} and rounds away"
        ),
        measured=(
            f"{lost / sum(sizes.values()):.0%} bit-equal entries of {len(low)} tensor{'s' if len(low) > 1 else ''} "
            f"after {record.rounds} steps; "
            f"{first.name}: typical update {first.update:.1e}, ULP {first.ulp:.1e}"
        ),
        shown_by="in float64 the largest entry of any step on these tensors is below half a ULP at these values",
        culprits=names,
        where=record.step_line(),
    )


def _lost(evidence: Evidence, record: Record, unmoved: Sequence[Unmoved], level: Level) -> Finding:
    from pytest_trainloop.tracing.made_at import MadeAt

    names = tuple(u.name for u in unmoved)
    first = max(unmoved, key=lambda u: u.ulp / u.update)
    held = sum(p.index in record.held for p in record.parameters)
    group = next((o for p in record.parameters if p.name == first.name for o in record.held.get(p.index, ())), 0)
    return Finding(
        cause="lost_to_rounding",
        level=level,
        summary=(
            f"{some(names)} never {verb(names, 'move')}: each update is below half a ULP of {first.dtype} and rounds "
            "away"
        ),
        measured=(
            f"{len(names)} of {held} parameters bit-equal after {record.rounds} steps; {first.name}: typical update "
            f"{first.update:.1e}, ULP {first.ulp:.1e}"
        ),
        shown_by="the same steps in float64 move them by less than half a ULP each",
        culprits=names,
        where=record.step_line(),
        change="" if first.dtype in LOW else evidence.shared(MadeAt.of).group(group),
        repair="" if first.dtype in LOW else "raise the learning rate of this group, if it is meant to train",
    )


def _in_copies(record: Record, found: Sequence[Parameter]) -> Finding:
    names, first = tuple(p.name for p in found), found[0]
    reason = "its memory is not contiguous" if not first.contiguous else "its memory is read in another order"
    other = "contiguous memory" if not first.contiguous else "memory with the axes in reverse order"
    passes = sum(any(not a.incoming.zero for a in b.arrivals.get(first.index, ())) for b in record.backwards())
    return Finding(
        cause="written_to_a_copy",
        summary=(
            f"{some(names)} {verb(names, 'get')} gradients and never {verb(names, 'move')}: each update is written to "
            "a copy"
        ),
        measured=(
            f"bit-equal after {passes} backward passes that gave a gradient, in float64 too; {first.name} of shape "
            f"{first.shape}: {reason}"
        ),
        shown_by=f"the same loop moves {them(names)} once the same values lie in {other}",
        culprits=names,
        where=record.step_line() or next((str(b.place) for b in record.backwards()), ""),
    )


def _left_out(record: Record, names: Sequence[str]) -> Finding:
    from pytest_trainloop.checks.wiring.every_param_moves.displaced import RAISED

    holders = {o for p in record.parameters if p.name in names for o in record.held.get(p.index, ())}
    kinds = ", ".join(record.optimizers[o].kind for o in sorted(holders))
    measured = f"bit-equal after 156 steps from another start, at {RAISED:,.0f} times the learning rate too"
    shown = "the step reads their gradients, at a learning rate above zero, and their values stay as they are"
    if record.moves:
        return Finding(
            cause="not_updated",
            summary=(
                f"{some(names)} {verb(names, 'get')} gradients and never {verb(names, 'move')}: {kinds} leaves them out"
            ),
            measured=f"{measured}; {kinds} moves other parameters",
            shown_by=shown,
            culprits=tuple(names),
            where=record.step_line(),
            repair=f"go through all of {kinds}.param_groups in step()",
        )
    return Finding(
        cause="not_updated",
        summary=f"no parameter moves: {kinds} steps, and what it computes never reaches the {len(names)} parameters",
        measured=measured,
        shown_by=shown,
        culprits=tuple(names),
        where=record.step_line(),
        repair=f"change the parameters in place in {kinds}.step() (p.add_(update), p.copy_(new)), not copies of them",
    )
