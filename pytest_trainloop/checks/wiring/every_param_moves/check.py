"""Every parameter that is stepped with a gradient moves.

What it does
    It notes each held parameter's values before and after the run, bit for bit, and the gradients and rates of its
    steps. One that never changed is looked at again in a float64 run.

Why is this bad?
    In bfloat16 the number after 1.0 is 1.0078: a norm's gain at 1.0 that is stepped by 1e-4 stays at 1.0 for ever. No
    error is raised, and the loss falls, since the rest of the model trains.

How it decides
    A fault needs all of: gradients other than zero that a step consumed, at a rate above zero, at least three times; no
    change by anyone in between (a projection, a restore); the same bits at the end. Then one of two. Lost to rounding:
    float64 moves it, by less than half the spacing of its dtype at any rate that the schedule leads to. In float32 that
    is advice: the rate is far too low, which is for update_ratio to judge. So it is where the optimizer is not torch's
    own: it may keep what rounding takes (Kahan summation, stochastic rounding, master weights); where copies of it show
    that it does, nothing is said. Left out: such an optimizer does not move it by any means. Not in 156 steps from
    another start (it may rest at the bound of a projection), nor at 1e4 times the rate (its steps may be kept elsewhere
    until they are large enough), while it moves others, or nothing moves at all.
    Entries are counted as well: one is lost if it never changed and half its spacing is more than the largest step on
    its tensor in float64. Half of all low-precision entries lost is a fault, whether a whole tensor rests or not.

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

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import some, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import Stuck
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("parameter_precision", "overfit_one_batch", "update_ratio")

CAUSES = {
    "lost_to_rounding": "the same run in float64 moves the parameter by less than half the spacing of its dtype a step",
    "not_updated": "a higher rate from another start does not move it, and other parameters move, or none at all",
}

LOW = ("bfloat16", "float16")

FEW = 0.1
"""Share of entries lost, below which an optimizer keeps what rounding takes: chance leaves 2 % at rest."""

MOST = 0.5
"""Share of entries lost to rounding from which a model trains less of itself than it leaves as it was."""


@check(needs={"fit"}, causes=CAUSES, rank=50)
def every_param_moves(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import bit_equal, low_and_stepped
    from pytest_trainloop.gradients.dependence import Dependences

    record = evidence.run()
    stuck = bit_equal(record)
    low = low_and_stepped(record, LOW)
    if not stuck and not low:
        return
    depends = evidence.shared(Dependences).influence([p.name for p in stuck]) if stuck else {}
    stuck = [p for p in stuck if depends[p.name].change > depends[p.name].bound]
    if not stuck and not low:
        return
    most = list(_most_entries(evidence, record, low)) if low else []
    yield from most
    said = {name for finding in most for name in finding.culprits}
    yield from _whole_tensors(evidence, record, [p for p in stuck if p.name not in said])


def _whole_tensors(evidence: Evidence, record: Record, stuck: Sequence[Parameter]) -> Iterator[Finding]:
    """Parameters that are bit-equal after the run, and what float64 makes of them."""
    from pytest_trainloop.runs.further_runs import float64_run

    if not stuck:
        return
    from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import measure

    left_out = _left_out_by_own(evidence, record, [p for p in stuck if not _by_torch(record, p.index)])
    if left_out:
        yield _left_out(record, left_out)
    rest = [p for p in stuck if p.name not in left_out]
    lost = [s for s in measure(rest, record, evidence.shared(float64_run)) if s.lost] if rest else []
    sure = {p.name for p in rest if p.dtype in LOW and _by_torch(record, p.index)}
    if any(s.name not in sure and s.dtype in LOW for s in lost) and _kept(evidence, record):
        lost = [s for s in lost if s.name in sure or s.dtype not in LOW]
    for level, chosen in (
        ("fault", [s for s in lost if s.name in sure]),
        ("advice", [s for s in lost if s.name not in sure]),
    ):
        if chosen:
            yield _lost(record, chosen, level == "fault")


def _kept(evidence: Evidence, record: Record) -> bool:
    """Whether updates below half a spacing move other weights in the long run: then the optimizer keeps them."""
    from pytest_trainloop.optimizers.float32_twin import Float32Twins
    from pytest_trainloop.records.stepped_parameters import low_precision_stepped

    names = [p.name for p in low_precision_stepped(record, LOW)]
    counted = evidence.shared(Float32Twins).lost_updates(names, LOW)
    return any(f.share < FEW and f.update < f.ulp / 2 for f in counted)


def _left_out_by_own(evidence: Evidence, record: Record, stuck: Sequence[Parameter]) -> list[str]:
    """Parameters of optimizers that are not torch's own which nothing makes move: not more steps, nor higher rates from
    another start."""
    from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import bit_equal
    from pytest_trainloop.checks.wiring.every_param_moves.displaced import displaced_run, displaced_run_at_high_lr

    names = [p.name for p in stuck if _others_move(record, p.index) or not record.moves]
    if names:
        later = {p.name for p in bit_equal(displaced_run(evidence, names))}
        names = [name for name in names if name in later]
    if names:
        stirred = {p.name for p in bit_equal(displaced_run_at_high_lr(evidence, names))}
        names = [name for name in names if name in stirred]
    return names


def _most_entries(evidence: Evidence, record: Record, low: Sequence[Parameter]) -> Iterator[Finding]:
    """Low-precision entries that never move, where they are the greater part of all."""
    from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import lost_shares, measure
    from pytest_trainloop.gradients.dependence import Dependences
    from pytest_trainloop.runs.further_runs import float64_run

    shares = lost_shares(low, record, evidence.shared(float64_run))
    sizes = {p.name: math.prod(p.shape) for p in low}
    lost = sum(share * sizes[name] for name, share in shares.items())
    names = tuple(name for name, share in shares.items() if share >= MOST)
    if names and lost >= MOST * sum(sizes.values()):
        depends = evidence.shared(Dependences).influence(names)
        names = tuple(n for n in names if depends[n].change > depends[n].bound)
        if sum(shares[n] * sizes[n] for n in names) >= MOST * sum(sizes.values()):
            chosen = measure([p for p in low if p.name in names], record, evidence.shared(float64_run))
            yield _lost_in_part(record, chosen, len(low), lost / sum(sizes.values()))


def _by_torch(record: Record, index: int) -> bool:
    return all(record.optimizers[o].from_torch for o in record.held.get(index, ()))


def _others_move(record: Record, index: int) -> bool:
    """Whether an optimizer that holds the parameter moves others."""
    moving = {(move.by, i) for move in record.moves for i in move.parameters}
    return any(by in record.held.get(index, ()) for by, _ in moving)


_KEEP_FLOAT32 = "keep the weights in float32 and compute under autocast, or give the optimizer float32 master weights"


def _lost(record: Record, stuck: Sequence[Stuck], fault: bool) -> Finding:
    names = tuple(s.name for s in stuck)
    first = max(stuck, key=lambda s: s.spacing / s.update)
    held = sum(p.index in record.held for p in record.parameters)
    return Finding(
        cause="lost_to_rounding",
        level="fault" if fault else "advice",
        summary=(
            f"{some(names)} never {verb(names, 'move')}: each update is below half the spacing of {first.dtype} and "
            "rounds away"
        ),
        measured=(
            f"{len(names)} of {held} parameters bit-equal after {record.rounds} steps; {first.name}: typical update "
            f"{first.update:.1e}, spacing {first.spacing:.1e}"
        ),
        shown_by="the same steps in float64 move them by less than half that spacing each",
        culprits=names,
        where=record.step_line(),
        repair=(
            _KEEP_FLOAT32 if first.dtype in LOW else "raise the learning rate of this group, if it is meant to train"
        ),
        explains=CONSEQUENCES if fault else (),
    )


def _lost_in_part(record: Record, lost: Sequence[Stuck], among: int, share: float) -> Finding:
    names = tuple(s.name for s in lost)
    first = max(lost, key=lambda s: s.spacing)
    dtype = first.dtype
    return Finding(
        cause="lost_to_rounding",
        summary=(
            f"{share:.0%} of the {dtype} weights never move, most of them in {some(names)}: each update is below half "
            f"the spacing of {dtype} and rounds away"
        ),
        measured=(
            f"bit-equal entries of {among} tensor{'s' if among > 1 else ''} after {record.rounds} steps; "
            f"{first.name}: typical update {first.update:.1e}, spacing {first.spacing:.1e}"
        ),
        shown_by="in float64 the largest entry of any step on these tensors is below half the spacing at these values",
        culprits=names,
        where=record.step_line(),
        repair=_KEEP_FLOAT32,
        explains=CONSEQUENCES,
    )


def _left_out(record: Record, names: Sequence[str]) -> Finding:
    holders = {o for p in record.parameters if p.name in names for o in record.held.get(p.index, ())}
    from pytest_trainloop.checks.wiring.every_param_moves.displaced import RAISED

    kinds = ", ".join(record.optimizers[o].kind for o in sorted(holders))
    beside = bool(record.moves)
    return Finding(
        cause="not_updated",
        summary=(
            f"{some(names)} {verb(names, 'get')} gradients and never {verb(names, 'move')}: {kinds} leaves them out"
            if beside
            else f"no parameter moves: {kinds} steps, and what it computes never reaches the {len(names)} parameters"
        ),
        measured=(
            f"bit-equal after 156 steps from another start, at {RAISED:,.0f} times the rate too"
            + (f"; {kinds} moves other parameters" if beside else "")
        ),
        shown_by="the step reads their gradients, at a rate above zero, and their values stay as they are",
        culprits=tuple(names),
        where=record.step_line(),
        repair=(
            f"go through all of {kinds}.param_groups in step()"
            if beside
            else f"change the parameters in place in {kinds}.step() (p.add_(update), p.copy_(new)), not copies of them"
        ),
        explains=CONSEQUENCES,
    )
