"""From the weights of the shares to a cause. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.scale.distributed_equivalence.weighing import CLOSE, listed
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.scale.distributed_equivalence.weighing import Weighing
    from pytest_trainloop.finding import Level


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A cause that is proven; ``shown`` is the observation that proves it."""

    cause: str
    summary: str
    shown: str = ""
    level: Level = "fault"
    culprits: tuple[str, ...] = ()
    repair: str = ""
    where: str = ""
    """The line, where it is another than that of the backward pass or the step."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What else was seen of the loop on its ranks."""

    wrong: tuple[str, ...] = ()
    """The parameters whose gradient differs."""
    others: int = 0
    """How many others have the right gradient."""
    wrappers: int = 0
    """Instances of DistributedDataParallel."""
    calls: int = 0
    """Calls of them."""
    valid: Sequence[int] | None = None
    """The valid targets of each share, where these explain the weights in one process."""


def of_weights(weighing: Weighing, seen: Circumstances) -> Diagnosis | None:
    """What the weights prove; None where they follow no known pattern."""
    world, pattern = weighing.world, weighing.pattern
    names = some(seen.wrong, most=3)
    if pattern == "own":
        shown = f"weights of the ranks' rows: {_by_rank(weighing)}"
        if seen.others:
            return Diagnosis(
                "parameters_not_in_wrapper",
                f"on each rank {names} {'get' if len(seen.wrong) > 1 else 'gets'} the gradient of its own rows alone, "
                f"and {seen.others} other parameter{'s get' if seen.others > 1 else ' gets'} that of all rows",
                shown,
                culprits=seen.wrong,
            )
        if seen.wrappers and not seen.calls:
            return Diagnosis(
                "wrapper_bypassed",
                f"DistributedDataParallel wraps the model, and is never called: each of {world} ranks trains on its "
                "own rows alone",
                f"{shown}; 0 calls of the wrapper",
            )
        return Diagnosis(
            "never_synchronised", f"each of {world} ranks trains on the gradient of its own rows alone", shown
        )
    if pattern == "one_rank":
        only = next(r for r in range(world) if abs(weighing.ranks[0][weighing.own(r)[0]]) > 0.5 * _most(weighing))
        return Diagnosis(
            "never_synchronised",
            f"all ranks train on the gradient of rank {only} alone: the rows of the others do not count",
            f"weights of the ranks' rows: {_by_rank(weighing)}",
        )
    if pattern == "last_own":
        return Diagnosis(
            "last_micro_batch_not_synchronised",
            f"of {weighing.window} micro-batches the last one is not synchronised: each rank adds that of its own rows "
            "alone",
            f"weights of the micro-batches: {_by_rank(weighing)}",
        )
    if pattern == "means":
        return _means(weighing, seen)
    if pattern == "clipped":
        return Diagnosis(
            "norm_of_one_shard",
            "each rank's gradient is clipped by its own norm before the gradients are reduced",
            f"each rank weighs one over the length of its own gradient: {listed(weighing.ranks[0])}",
        )
    return _scaled(weighing, seen) if pattern == "scaled" else None


def _means(weighing: Weighing, seen: Circumstances) -> Diagnosis:
    """A fault where one process weighs by valid targets; weights of classes or examples may be meant."""
    what = "with unequal numbers of valid targets" if seen.valid else "whose examples have unequal weights"
    one = weighing.one or ()
    return Diagnosis(
        "mean_of_means",
        f"the losses of ranks {what} get weights {listed(weighing.ranks[0])}, and in one process {listed(one)}",
        f"in one process each weighs in proportion to its {', '.join(map(str, seen.valid))} valid targets"
        if seen.valid
        else "",
        level="fault" if seen.valid else "advice",
    )


def _scaled(weighing: Weighing, seen: Circumstances) -> Diagnosis:
    world, factor = weighing.world, weighing.factor
    if abs(factor) < CLOSE:
        return Diagnosis(
            "never_synchronised",
            f"the steps of {world} ranks read no gradient, where that of one process reads some",
            f"weights of the ranks' rows: {_by_rank(weighing)}",
        )
    power = math.log(abs(factor)) / math.log(world)
    whole = factor > 0 and abs(factor / world ** round(power) - 1) < CLOSE
    culprits = seen.wrong if seen.others else ()
    of = f" of {some(culprits, most=3)}" if culprits else ""
    if whole and power > 0:
        return Diagnosis(
            "summed_over_ranks",
            f"{world} ranks give {factor:.4g} times the gradient{of} of the same rows in one process",
            f"every rank weighs exactly {_power(world, round(power))} times what it does in one process",
            culprits=culprits,
        )
    if whole:
        return Diagnosis(
            "divided_twice",
            f"{world} ranks give {factor:.4g} times the gradient{of} of the same rows in one process",
            f"every rank weighs exactly 1/{_power(world, -round(power))} of what it does in one process",
            culprits=culprits,
        )
    return in_one_direction(factor, world)


def in_one_direction(factor: float, world: int) -> Diagnosis:
    """The gradient of one process times a number that the learning rate may be set for."""
    return Diagnosis(
        "summed_over_ranks" if factor > 1 else "divided_twice",
        f"{world} ranks give {factor:.4g} times the gradient of the same rows in one process",
        "all parameters have the direction that they have in one process",
        level="advice",
        repair=f"where the learning rate is not scaled to match, multiply the loss by {1 / factor:.4g} with {world} "
        "ranks",
    )


def _power(world: int, power: int) -> str:
    return str(world**power)


def _most(weighing: Weighing) -> float:
    return max(map(abs, weighing.ranks[0]))


def _by_rank(weighing: Weighing) -> str:
    return ", ".join(f"rank {rank} {listed(weights)}" for rank, weights in enumerate(weighing.ranks))
