"""Weights that are kept in bfloat16 or float16 take up the updates that the optimizer makes.

What it does
    It makes each of the first 12 steps on low-precision weights again in float64, from the same values, gradients and
    state, and counts the updates that moved nothing. An optimizer whose steps cannot be made again entry by entry is
    copied, and makes many steps on the same gradient. Copies that average such weights are looked at as well.

Why is this bad?
    bfloat16 has 8 bits: next to 0.1 lie 0.1001 and 0.0996. An update of 1e-4 is rounded away there, and so is the next
    one, however often it is made. The loss falls at first and then stops too high. An average with decay 0.999 in
    bfloat16 never moves at all.

How it decides
    An update of an entry is lost if float64 moves it and its bits stay as they were. Updates are counted as large as
    they get: at the rate that a warm-up leads to, and with all the momentum that is to gather; where a rate still rises
    to what is not known, nothing is said. Entries whose gradient is zero in a step do not count. A fault needs one of
    two: more than half of all updates of such weights are lost, by their number and by their size alike; or 99 % of
    those of a tensor on which the loss depends. The size that counts is what is missing in all: some updates are
    rounded up, and go farther than they should. From 10 % on it is advice: some are lost at any rate. What others than
    optimizers move is not judged.
    An optimizer of which nothing is known may keep what rounding takes (Kahan summation, stochastic rounding, master
    weights). It races with a copy of itself that computes in float32, each on one gradient over and over, until float32
    has gone four spacings: what keeps or draws has moved the weight by then, and an entry with the same bits is lost.
    Masters are at fault that each step finds with the values of their low-precision copies, which are what the step
    before left in them, rounded: whatever is below half a spacing is gone by then.
    An average is at fault where most of its entries keep their bits, float64 moves it by a <- a + w (p - a) with some
    trained weight p, exactly, and w is so small that they rest until p is as far away as a is large. Put an eighth of
    that distance aside, it has to stay there for 60 steps: one that is copied from a better average comes back.

Faulty
    >>> model = Classifier()
    >>> model.encoder[1] = nn.Identity()               # else every_param_moves finds that the gains of the norm rest
    >>> model.to(torch.bfloat16)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)

Fixed
    >>> model = Classifier()                           # float32 weights; products in bfloat16 under torch.autocast
    >>> model.encoder[1] = nn.Identity()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)

Known limits
    Optimizers with step hooks of their own, LBFGS and others that need a closure, and what needs more than 256 steps to
    go four spacings are not judged. Of large tensors up to 128 entries are looked at. An average
    is seen where its module is given as a model of the loop or called, and where it is kept in parameters.

References
    https://arxiv.org/abs/1710.03740 (Micikevicius et al., Mixed Precision Training, section 3.1: master weights)
    https://arxiv.org/abs/2010.06192 (Zamirai et al., Revisiting BFloat16 Training: updates lost to rounding)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import some, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.optimizers.lost_updates import Losses
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("overfit_one_batch", "update_ratio", "precision_parity")

CAUSES = {
    "updates_lost": "most entries keep their bits, and the same steps move them without rounding",
    "updates_lost_in_part": "some entries keep their bits, and the same steps move them without rounding",
    "average_lost": "the same run in float64 moves the average by less than half the spacing of its dtype each time",
}

LOW = ("bfloat16", "float16")

HALF = 0.5
"""Share of all updates from which the greater part of the training is lost."""

ALL_BUT_FEW = 0.99
"""Share of a tensor's updates from which it does not train."""

NOTABLE = 0.1
"""Share of all updates from which advice is given."""

LEAST_STEPS = 3


@check(needs={"fit"}, causes=CAUSES, rank=20)
def parameter_precision(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.records.stepped_parameters import low_precision_stepped

    record = evidence.run()
    low = [p.name for p in low_precision_stepped(record, LOW)]
    if low:
        yield from _updates(evidence, record, _counted(evidence, low))
    if masters := _with_masters(record):
        from pytest_trainloop.checks.numerics.parameter_precision.master_weights import Refreshed

        yield from _updates(evidence, record, evidence.shared(Refreshed).losses(masters, LOW))
    yield from _averages(evidence, record)


def _with_masters(record: Record) -> list[str]:
    """Low-precision weights that are written by hand, where an optimizer steps float32 tensors of the same shapes."""
    by_hand = record.moved_outside_steps()
    stepped = {p.shape for p in record.parameters if p.dtype == "float32" and p.index in record.held}
    return [p.name for p in record.parameters if p.dtype in LOW and p.shape in stepped and p.index in by_hand]


def _updates(evidence: Evidence, record: Record, counted: Sequence[Losses]) -> Iterator[Finding]:
    losses = [found for found in counted if found.steps >= LEAST_STEPS]
    number, way = _share_of_number(losses, losses), _share_of_way(losses)
    if not any(found.share >= NOTABLE for found in losses):
        return
    suspects = [f for f in losses if f.share >= ALL_BUT_FEW and f.share_of_way > HALF]
    mostly = [f for f in losses if f.share >= HALF] if min(number, way) > HALF else []
    chosen = _that_matter(evidence, mostly or suspects)
    if mostly and _share_of_number(chosen, losses) <= HALF:
        chosen = [f for f in chosen if f in suspects]
    if chosen:
        yield _lost(record, chosen, losses, number)
    elif number >= NOTABLE:
        yield _in_part(record, [f for f in losses if f.share >= NOTABLE], number, way)


def _counted(evidence: Evidence, low: Sequence[str]) -> list[Losses]:
    """By parameter, of every optimizer whose steps can be made again."""
    from pytest_trainloop.optimizers.float32_twin import Races
    from pytest_trainloop.optimizers.lost_updates import Updates

    found = evidence.shared(Updates).losses(low, LOW)
    rest = [name for name in low if name not in {f.name for f in found}]
    if rest:
        found += evidence.shared(Races).losses(rest, LOW)
    return found


def _that_matter(evidence: Evidence, losses: Sequence[Losses]) -> list[Losses]:
    """Those of the tensors on which what is backpropagated depends: a bias before a batch norm moves nothing. What no
    module holds and a step is fed gradients for is a copy that others are made of (masters)."""
    from pytest_trainloop.gradients.dependence import Dependences

    copies = {p.name for p in evidence.run().parameters if p.role == "foreign"}
    names = [f.name for f in losses if f.name not in copies]
    depends = evidence.shared(Dependences).influence(names) if names else {}
    return [f for f in losses if f.name in copies or depends[f.name].change > depends[f.name].bound]


def _share_of_number(losses: Sequence[Losses], among: Sequence[Losses]) -> float:
    """The lost updates of all entries of some tensors, of those of all."""
    return sum(f.weight * f.share for f in losses) / max(sum(f.weight for f in among), 1.0)


def _share_of_way(losses: Sequence[Losses]) -> float:
    """The same of the way that updates would go."""
    ways = [(f.way * f.entries / f.sampled, f.share_of_way) for f in losses if f.sampled]
    every = sum(way for way, _ in ways)
    return sum(way * share for way, share in ways) / every if every else 0.0


_REPAIR = "keep the weights in float32 and compute under autocast, or give the optimizer float32 master weights"


def _lost(record: Record, chosen: Sequence[Losses], losses: Sequence[Losses], number: float) -> Finding:
    names = tuple(f.name for f in sorted(chosen, key=lambda f: -f.share * f.entries))
    first = max(chosen, key=lambda f: f.share * f.entries)
    whole = f"{number:.0%} of all updates of {first.dtype} weights are lost to rounding, most of them in {some(names)}"
    single = f"{some(names)} {verb(names, 'lose')} {first.share:.0%} of the updates to rounding in {first.dtype}"
    return Finding(
        cause="updates_lost",
        summary=(whole if number > HALF else single)
        + (": their float32 masters are written over with them between steps" if first.refreshed else ""),
        measured=f"{number:.0%} of the updates of {len(losses)} tensors; {_one(first)}",
        shown_by=_shown_by(first),
        culprits=names,
        where=record.step_line(),
        repair="copy the weights to the masters once, before the loop" if first.refreshed else _REPAIR,
        explains=CONSEQUENCES,
    )


def _shown_by(found: Losses) -> str:
    if found.refreshed:
        return (
            f"each step finds in the float32 master what the step before left in it, rounded to {found.dtype}: the "
            "values of this copy"
        )
    if found.raced:
        return (
            f"{found.steps} steps on the same gradient move these entries by four spacings or more in float32, and "
            f"leave their bits in {found.dtype} as they are"
        )
    return "the same steps made in float64 from the same values move these entries, by less than their rounding"


def _in_part(record: Record, chosen: Sequence[Losses], number: float, way: float) -> Finding:
    names = tuple(f.name for f in sorted(chosen, key=lambda f: -f.share))
    first = max(chosen, key=lambda f: f.share)
    return Finding(
        cause="updates_lost_in_part",
        level="advice",
        summary=f"{number:.0%} of all updates of {first.dtype} weights are lost to rounding",
        measured=f"{way:.0%} of the way that they would go in all; {_one(first)}",
        shown_by=_shown_by(first),
        culprits=names,
        where=record.step_line(),
        repair=_REPAIR,
    )


def _one(found: Losses) -> str:
    state = f", state in {' and '.join(found.state)}" if found.state else ""
    return (
        f"{found.name}: {found.share:.0%} in {found.steps} steps, typical update {found.update:.1e}, spacing of "
        f"{found.dtype} {found.spacing:.1e}{state}"
    )


def _averages(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Copies that follow trained weights and cannot."""
    from pytest_trainloop.checks.numerics.parameter_precision.weight_averages import Averages, resting_copies

    if not resting_copies(record, LOW):
        return
    for found in evidence.shared(Averages).lost(LOW):
        yield Finding(
            cause="average_lost",
            summary=(
                f"{some(found.names)} {verb(found.names, 'average')} trained weights in {found.dtype} and never "
                f"{verb(found.names, 'move')}: weight {found.weight:.1g} of each blend is below its rounding"
            ),
            measured=(
                f"bit-equal after {record.rounds} steps; {found.names[0]}: a blend moves it by at most "
                f"{found.largest:.1e}, spacing {found.spacing:.1e}; it moves once the weight is "
                f"{found.needed:.1f} times its own size away"
            ),
            shown_by="the same run in float64 moves it by this share of the distance, which this dtype cannot hold",
            culprits=found.names,
            where=found.place,
            repair="keep the averaged copy in float32 (AveragedModel of a float32 model, or masters of its own)",
        )
