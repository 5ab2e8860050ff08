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
    trained weight p, exactly, and w is so small that they rest until p is as far away as a is large. A running value
    that is held elsewhere (a dict of shadow weights, a buffer of statistics, a copy of the model) is at fault where it
    keeps its bits and float64 moves it at every step, by this rule or another. Begun an eighth of its size away, with
    the same ULP, it must still be there 60 steps later: one that is copied from a better average comes back.

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
    module is given as a model of the loop, and where the loop's functions hold it between steps; not where it is a
    local variable of fit.

References
    https://arxiv.org/abs/1710.03740 (Micikevicius et al., Mixed Precision Training, section 3.1: master weights)
    https://arxiv.org/abs/2010.06192 (Zamirai et al., Revisiting BFloat16 Training: updates lost to rounding)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.numerics.parameter_precision.causes import CAUSES, found
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.optimizers.lost_updates import LostUpdates
    from pytest_trainloop.runs.evidence import Evidence

LOW = ("bfloat16", "float16")

HALF = 0.5
"""Share of all updates from which the greater part of the training is lost."""

NEARLY_ALL = 0.99
"""Share of a tensor's updates from which it does not train."""

NOTABLE = 0.1
"""Share of all updates from which advice is given."""

LEAST_STEPS = 3


def _nothing_low(evidence: Evidence) -> str:
    from pytest_trainloop.checks.numerics.parameter_precision.runs import low_values

    if any(p.dtype in LOW for p in evidence.run().parameters):
        return ""
    if evidence.repeatable and evidence.shared(low_values):
        return ""
    return f"no parameter, average or running value is kept in {' or '.join(LOW)}"


@check(needs={"fit"}, causes=CAUSES, rank=20, steps=1, absent=_nothing_low)
def parameter_precision(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.parameter_precision import runs
    from pytest_trainloop.instruments.optimizers.float32_twin import Float32Twins
    from pytest_trainloop.instruments.optimizers.lost_updates import RepeatedSteps
    from pytest_trainloop.instruments.records.stepped_parameters import low_precision_stepped

    if low := [p.name for p in low_precision_stepped(evidence.run(), LOW)]:
        counted = list(evidence.shared(RepeatedSteps).lost_updates(low, LOW))
        if rest := [name for name in low if name not in {c.name for c in counted}]:
            counted += evidence.shared(Float32Twins).lost_updates(rest, LOW)
        yield from _lost_updates(evidence, counted)
    yield from _lost_updates(evidence, runs.overwritten_masters(evidence))
    yield from runs.lost_averages(evidence)


def _lost_updates(evidence: Evidence, counted: Sequence[LostUpdates]) -> Iterator[Finding]:
    every = [one for one in counted if one.steps >= LEAST_STEPS]
    notable = sorted((one for one in every if one.share >= NOTABLE), key=lambda one: -one.share)
    if not notable:
        return
    number = _share_of_number(every, every)
    sizes = [(one.due * one.entries / one.sampled, one.share_of_size) for one in every if one.sampled]
    size = sum(due * share for due, share in sizes) / (sum(due for due, _ in sizes) or 1.0)
    suspects = [one for one in every if one.share >= NEARLY_ALL and one.share_of_size > HALF]
    mostly = [one for one in every if one.share >= HALF] if min(number, size) > HALF else []
    chosen = _that_matter(evidence, mostly or suspects)
    if mostly and _share_of_number(chosen, every) <= HALF:
        chosen = [one for one in chosen if one in suspects]
    if not chosen and number < NOTABLE:
        return
    chosen.sort(key=lambda one: -one.share * one.entries)
    first = (chosen or notable)[0]
    names = tuple(one.name for one in chosen or notable)
    variant = "overwritten" if first.master_overwritten else "twin" if first.from_twin else ""
    facts = {
        "number": number,
        "size": size,
        "tensors": len(every),
        "tensor": first.name,
        "dtype": first.dtype,
        "part": first.share,
        "steps": first.steps,
        "update": first.update,
        "ulp": first.ulp,
        "state": " and ".join(first.state),
    }
    step = evidence.run().step_line()
    if chosen:
        yield found("updates_lost", step, names, variant, **facts, mostly=number > HALF, several=len(names) > 1)
    else:
        yield found("updates_lost_in_part", step, names, variant, **facts, level="advice")


def _that_matter(evidence: Evidence, losses: Sequence[LostUpdates]) -> list[LostUpdates]:
    """Those of the tensors on which the loss depends: a bias before a batch norm changes nothing. A tensor that no
    module holds, and that is stepped with gradients, is a master that others are copied from."""
    from pytest_trainloop.instruments.gradients.dependence import Dependences

    masters = {p.name for p in evidence.run().parameters if p.role == "foreign"}
    names = [one.name for one in losses if one.name not in masters]
    depends = evidence.shared(Dependences).influence(names) if names else {}
    return [one for one in losses if one.name in masters or depends[one.name].change > depends[one.name].bound]


def _share_of_number(losses: Sequence[LostUpdates], among: Sequence[LostUpdates]) -> float:
    """The lost updates of all entries of some tensors, as a share of the updates of all."""
    every = sum(one.updates_of_all_entries for one in among)
    return sum(one.updates_of_all_entries * one.share for one in losses) / max(every, 1.0)
