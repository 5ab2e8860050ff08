"""Weights that are kept in bfloat16 or float16 take up the updates that the optimizer makes.

What it does
    It repeats each of the first 12 steps on low-precision weights in float64, from the same values, gradients and
    state, and counts the updates that moved nothing. An optimizer whose steps cannot be repeated entry by entry is
    copied, and the copy makes many steps on one gradient. Averages of weights that are kept in low precision are judged
    as well.

Why is this bad?
    bfloat16 has 8 significant bits: next to 0.1 lie 0.1001 and 0.0996. An update of 1e-4 is rounded away there, and so
    is the next one, however often it is made. The loss falls at first and then stops too high. An average with decay
    0.999 in bfloat16 never moves at all.

How it decides
    1. An update of an entry is lost if float64 moves the entry and its bits stay. Updates are counted at the largest
       size that they reach: at the end of a warm-up and with full momentum. If a learning rate rises to an unknown
       value, nothing is reported. Entries with gradient zero do not count.
    2. An optimizer of unknown arithmetic may keep what rounding takes (Kahan summation, stochastic rounding, master
       weights). It is compared with a float32 copy of itself, both on one gradient, until float32 has gone four ULPs.
       An entry with unchanged bits is lost.
    3. An average must move in float64 by a <- a + w (p - a) with some trained weight p. It is lost if w is so small
       that most entries rest until p is as far away as a is large.
    4. A running value held elsewhere (a dict of shadow weights) must keep its bits while float64 moves it at every
       step. Begun an eighth of its size away, it must still be there 60 steps later.
    5. Tensors that anything but optimizers moves are not judged, nor tensors on which no loss depends.

    | seen | cause | advice if |
    |---|---|---|
    | over half of all updates are lost, by number and by summed size | ``updates_lost`` |  |
    | 99 % of a tensor's updates are lost | ``updates_lost`` |  |
    | each step finds master weights with the values of their low-precision copies | ``updates_lost`` |  |
    | 10 % or more are lost | ``updates_lost_in_part`` | always |
    | items 3 and 4 | ``average_lost`` |  |

When it is skipped
    It skips a loop without bfloat16 or float16.

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
    module is given as a model of the loop, and where the loop's functions hold it between steps. It is not seen where
    it is a local variable of fit.

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
