"""Weights that are kept in bfloat16 or float16 take up the updates that the optimizer makes.

What it does
    It repeats each of the first 12 steps on low-precision weights in float64, from the same values, gradients and
    state, and counts the updates that moved nothing. An optimizer whose steps cannot be repeated entry by entry is
    copied, and the copy makes many steps on the same gradient. Averages of weights that are kept in low precision are
    judged as well.

Why is this bad?
    bfloat16 has 8 significant bits: next to 0.1 lie 0.1001 and 0.0996. An update of 1e-4 is rounded away there, and so
    is the next one, however often it is made. The loss falls at first and then stops too high. An average with decay
    0.999 in bfloat16 never moves at all.

How it decides
    An update of an entry is lost if float64 moves the entry and its bits stay as they were. Updates are counted at the
    largest size that they reach: at the learning rate that a warm-up leads to, and with all the momentum still to build
    up; where a learning rate still rises to an unknown value, nothing is reported. Entries whose gradient is zero in a
    step do not count. A fault needs one of two: more than half of all updates of such weights are lost, by number and
    by summed size alike; or 99 % of those of a tensor on which the loss depends. The summed size is that of what is
    missing in all: some updates are rounded up, and go farther than they should. From 10 % on it is advice: some are
    lost at any learning rate. Tensors that are moved by anything but optimizers are not judged.
    An optimizer of unknown arithmetic may keep what rounding takes (Kahan summation, stochastic rounding, master
    weights). It is compared with a copy of itself that computes in float32, both on one gradient over and over, until
    float32 has gone four ULPs: an optimizer that keeps or draws has moved the weight by then, and an entry with the
    same bits is lost.
    Master weights are at fault if each step finds them with the values of their low-precision copies, which are what
    the step before left in them, rounded: whatever is below half a ULP is gone by then.
    An average is at fault where most of its entries keep their bits, float64 moves it by a <- a + w (p - a) with some
    trained weight p, exactly, and w is so small that they rest until p is as far away as a is large. Displaced by an
    eighth of that distance, it has to stay there for 60 steps: one that is copied from a better average comes back.
    A running value that is held elsewhere (a dict of shadow weights, a buffer of statistics, a copy of the model) is at
    fault where it keeps its bits, float64 moves it at every step, and begun an eighth of its size away, with the same
    ULP, it is still there 60 steps later.

Faulty
    >>> model = Classifier()
    >>> model.encoder[1] = nn.Identity()               # else every_param_moves finds the norm
    >>> model.to(torch.bfloat16)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)

Fixed
    >>> model = Classifier()                           # float32 weights; products in bfloat16 under torch.autocast
    >>> model.encoder[1] = nn.Identity()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)

Known limits
    Optimizers with step hooks of their own, LBFGS and others that need a closure, and tensors that need more than 256
    steps to go four ULPs are not judged. Of large tensors up to 128 entries are read. An average is seen where its
    module is given as a model of the loop or called, and where the loop's functions hold it between steps; not where it
    is a local variable of fit.

References
    https://arxiv.org/abs/1710.03740 (Micikevicius et al., Mixed Precision Training, section 3.1: master weights)
    https://arxiv.org/abs/2010.06192 (Zamirai et al., Revisiting BFloat16 Training: updates lost to rounding)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, some, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.optimizers.lost_updates import LostUpdates
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

_EXPLAINS = ("overfit_one_batch", "update_ratio", "precision_parity")

_REPAIR = "keep the weights in float32 and compute under autocast, or give the optimizer float32 master weights"

CAUSES = {
    "updates_lost": Cause(
        proof="most entries keep their bits, and the same steps move them without rounding",
        repair=_REPAIR,
        explains=_EXPLAINS,
        change=(
            "cast",
            "module",
        ),
    ),
    "updates_lost_in_part": Cause(
        proof="some entries keep their bits, and the same steps move them without rounding",
        repair=_REPAIR,
        change=(
            "cast",
            "module",
        ),
    ),
    "average_lost": Cause(
        proof="the same run in float64 moves the average by less than half a ULP of its dtype each time",
        repair="keep the averaged copy in float32 (AveragedModel of a float32 model, or float32 masters of its own)",
        change=(
            "module",
            "seen",
        ),
    ),
}

LOW = ("bfloat16", "float16")

HALF = 0.5
"""Share of all updates from which the greater part of the training is lost."""

NEARLY_ALL = 0.99
"""Share of a tensor's updates from which it does not train."""

NOTABLE = 0.1
"""Share of all updates from which advice is given."""

LEAST_STEPS = 3


def _nothing_low(evidence: Evidence) -> str:
    from pytest_trainloop.checks.numerics.parameter_precision.running_values import RunningValues

    record = evidence.run()
    if any(p.dtype in LOW for p in record.parameters):
        return ""
    if evidence.repeatable and evidence.shared(RunningValues).candidates:
        return ""
    return f"no parameter, average or running value is kept in {' or '.join(LOW)}"


@check(needs={"fit"}, causes=CAUSES, rank=20, steps=1, absent=_nothing_low)
def parameter_precision(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.records.stepped_parameters import low_precision_stepped

    record = evidence.run()
    low = [p.name for p in low_precision_stepped(record, LOW)]
    if low:
        yield from _updates(evidence, record, _counted(evidence, low))
    if copies := _copies_of_masters(record):
        from pytest_trainloop.checks.numerics.parameter_precision.master_weights import OverwrittenMasters

        yield from _updates(evidence, record, evidence.shared(OverwrittenMasters).lost_updates(copies, LOW))
    averages = list(_averages(evidence, record))
    yield from averages or _running_values(evidence)


def _copies_of_masters(record: Record) -> list[str]:
    """Low-precision weights that user code writes, where an optimizer steps float32 tensors of the same shapes."""
    moved = record.moved_outside_steps()
    stepped = {p.shape for p in record.parameters if p.dtype == "float32" and p.index in record.held}
    return [p.name for p in record.parameters if p.dtype in LOW and p.shape in stepped and p.index in moved]


def _counted(evidence: Evidence, low: Sequence[str]) -> list[LostUpdates]:
    """By parameter: of steps repeated in float64 where that can be done, else of a float32 twin."""
    from pytest_trainloop.optimizers.float32_twin import Float32Twins
    from pytest_trainloop.optimizers.lost_updates import RepeatedSteps

    found = evidence.shared(RepeatedSteps).lost_updates(low, LOW)
    rest = [name for name in low if name not in {f.name for f in found}]
    return found + (evidence.shared(Float32Twins).lost_updates(rest, LOW) if rest else [])


def _updates(evidence: Evidence, record: Record, counted: Sequence[LostUpdates]) -> Iterator[Finding]:
    every = [found for found in counted if found.steps >= LEAST_STEPS]
    number, size = _share_of_number(every, every), _share_of_size(every)
    if not any(found.share >= NOTABLE for found in every):
        return
    suspects = [f for f in every if f.share >= NEARLY_ALL and f.share_of_size > HALF]
    mostly = [f for f in every if f.share >= HALF] if min(number, size) > HALF else []
    chosen = _that_matter(evidence, mostly or suspects)
    if mostly and _share_of_number(chosen, every) <= HALF:
        chosen = [f for f in chosen if f in suspects]
    if chosen:
        yield _lost(record, chosen, every, number)
    elif number >= NOTABLE:
        notable = sorted((f for f in every if f.share >= NOTABLE), key=lambda f: -f.share)
        yield Finding(
            cause="updates_lost_in_part",
            level="advice",
            summary=f"{number:.0%} of all updates of {notable[0].dtype} weights are lost to rounding",
            measured=f"{number:.0%} of the updates, {size:.0%} of their summed size; {_one(notable[0])}",
            shown_by=_shown_by(notable[0]),
            culprits=tuple(f.name for f in notable),
            where=record.step_line(),
        )


def _that_matter(evidence: Evidence, losses: Sequence[LostUpdates]) -> list[LostUpdates]:
    """Those of the tensors on which the loss depends: a bias before a batch norm changes nothing. A tensor that no
    module holds, and that is stepped with gradients, is a master that others are copied from."""
    from pytest_trainloop.gradients.dependence import Dependences

    masters = {p.name for p in evidence.run().parameters if p.role == "foreign"}
    names = [f.name for f in losses if f.name not in masters]
    depends = evidence.shared(Dependences).influence(names) if names else {}
    return [f for f in losses if f.name in masters or depends[f.name].change > depends[f.name].bound]


def _share_of_number(losses: Sequence[LostUpdates], among: Sequence[LostUpdates]) -> float:
    """The lost updates of all entries of some tensors, as a share of the updates of all."""
    return sum(f.updates_of_all_entries * f.share for f in losses) / max(
        sum(f.updates_of_all_entries for f in among), 1.0
    )


def _share_of_size(losses: Sequence[LostUpdates]) -> float:
    """The same by the summed size of the updates."""
    sizes = [(f.due * f.entries / f.sampled, f.share_of_size) for f in losses if f.sampled]
    every = sum(size for size, _ in sizes)
    return sum(size * share for size, share in sizes) / every if every else 0.0


def _lost(record: Record, chosen: Sequence[LostUpdates], every: Sequence[LostUpdates], number: float) -> Finding:
    names = tuple(f.name for f in sorted(chosen, key=lambda f: -f.share * f.entries))
    first = max(chosen, key=lambda f: f.share * f.entries)
    whole = f"{number:.0%} of all updates of {first.dtype} weights are lost to rounding, most of them in {some(names)}"
    single = f"{some(names)} {verb(names, 'lose')} {first.share:.0%} of the updates to rounding in {first.dtype}"
    overwritten = first.master_overwritten
    return Finding(
        cause="updates_lost",
        summary=(whole if number > HALF else single)
        + (": their float32 masters are overwritten with them between steps" if overwritten else ""),
        measured=f"{number:.0%} of the updates of {len(every)} tensors; {_one(first)}",
        shown_by=_shown_by(first),
        culprits=names,
        where=record.step_line(),
        repair="copy the weights to the masters once, before the loop" if overwritten else "",
    )


def _shown_by(found: LostUpdates) -> str:
    if found.master_overwritten:
        return (
            f"each step finds in the float32 master what the step before left in it, rounded to {found.dtype}: the "
            "values of this copy"
        )
    if found.from_twin:
        return (
            f"{found.steps} steps on the same gradient move these entries by four ULPs or more in float32, and leave "
            f"their bits in {found.dtype} as they are"
        )
    return "the same steps made in float64 from the same values move these entries, by less than their rounding"


def _one(found: LostUpdates) -> str:
    state = f", state in {' and '.join(found.state)}" if found.state else ""
    return (
        f"{found.name}: {found.share:.0%} in {found.steps} steps, typical update {found.update:.1e}, ULP of "
        f"{found.dtype} there {found.ulp:.1e}{state}"
    )


def _averages(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Averages of trained weights that cannot follow them."""
    from pytest_trainloop.checks.numerics.parameter_precision.weight_averages import WeightAverages, resting_copies

    if not resting_copies(record, LOW):
        return
    for found in evidence.shared(WeightAverages).lost(LOW):
        yield Finding(
            cause="average_lost",
            summary=(
                f"{some(found.names)} {verb(found.names, 'average')} trained weights in {found.dtype} and never "
                f"{verb(found.names, 'move')}: weight {found.weight:.1g} of each update is below its rounding"
            ),
            measured=(
                f"weight {found.weight:.1g}, bit-equal after {record.rounds} steps; {found.names[0]}: an update moves "
                f"it by at most {found.largest:.1e}, its ULP is {found.ulp:.1e}; it moves once the weight is "
                f"{found.needed:.1f} times its own size away"
            ),
            shown_by="the same run in float64 moves it by this share of the distance, which this dtype cannot hold",
            culprits=found.names,
            where=found.place,
        )


def _running_values(evidence: Evidence) -> Iterator[Finding]:
    """Averages that are held outside of modules' parameters."""
    from pytest_trainloop.checks.numerics.parameter_precision.running_values import RunningValues

    for found in evidence.shared(RunningValues).lost() if evidence.repeatable else ():
        yield Finding(
            cause="average_lost",
            summary=f"{some(found.names)} {be(found.names)} kept in {found.dtype} and never "
            f"{verb(found.names, 'move')}: each update is below its rounding",
            measured=(
                f"bit-equal after {found.steps - 1} steps; {found.names[0]}: an update moves it by at most "
                f"{found.largest:.1e}, its ULP is {found.ulp:.1e}"
            ),
            shown_by=f"the same run in float64 moves it at every step; begun an eighth of its size away, it has the "
            f"same bits {found.displaced} steps later",
            culprits=found.names,
            where=found.place,
            repair="keep the running value in float32: .float() where it is made, and no .to(dtype) after it",
        )
