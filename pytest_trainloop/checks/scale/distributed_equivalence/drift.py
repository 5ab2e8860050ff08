"""Weights and buffers that begin alike on all ranks and part, and what parts first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.scale.distributed_equivalence.diagnosis import Diagnosis
from pytest_trainloop.checks.scale.distributed_equivalence.own_batches import ROUNDING, ends_apart
from pytest_trainloop.gradients.vectors import values
from pytest_trainloop.recording.events import SchedulerStep, Step
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did
    from pytest_trainloop.gradients.vectors import Gradient
    from pytest_trainloop.recording.record import Record


def of_drift(dids: Sequence[Did]) -> Iterator[Diagnosis]:
    """Weights that an optimizer steps and that part; else buffers and averages that do; norms by rank."""
    record = dids[0].require()
    norms = {plain(s.name): plain(s.owner) for s in record.statistics}
    stepped = set().union(*(did.seen.stepped for did in dids))
    apart = ends_apart(dids)
    weights = tuple(name for name in apart if name in stepped)
    others = tuple(name for name in apart if name not in stepped and name not in norms)
    if weights:
        first, where = _parts_first(dids, weights)
        yield Diagnosis(
            "weights_drift",
            f"the weights {some(weights, most=3)} begin alike on all ranks and end apart: {first}",
            "weights, learning rates and gradients at each step, by rank",
            culprits=weights,
            where=where,
        )
    elif others:
        yield Diagnosis(
            "weights_drift",
            f"{some(others, most=3)} {'begin' if len(others) > 1 else 'begins'} alike on all ranks and "
            f"{'end' if len(others) > 1 else 'ends'} apart",
            "no optimizer steps it, and nothing brings it together",
            level="advice",
            culprits=others,
        )
    by_rank = tuple(dict.fromkeys(norms[name] for name in apart if name in norms))
    if by_rank:
        yield Diagnosis(
            "batch_norm_per_rank",
            f"{some(by_rank, most=3)} {'normalise' if len(by_rank) > 1 else 'normalises'} by the rows of one rank",
            "the running statistics of the ranks begin alike and end apart",
            level="advice",
            culprits=by_rank,
        )


def _parts_first(dids: Sequence[Did], names: Sequence[str]) -> tuple[str, str]:
    """What is another on some rank before the weights are, in words, and its line where that is known."""
    held = [did.seen.stepped for did in dids]
    steps = [_steps(did.require()) for did in dids]
    counts = [len(of_rank) for of_rank in steps]
    if min(counts) != max(counts):
        return f"the optimizer steps {_listed(counts, ' times')}", ""
    for who, of_rank in enumerate(held):
        alone = [n for n in names if n in of_rank and sum(n in other for other in held) == 1]
        if alone:
            stepped = f"{some(alone, most=1)} {'is' if len(alone) == 1 else 'are'} stepped by rank {who} alone"
            return f"{stepped}, and not sent to the others", ""
    until = _first_apart(dids, names)
    for number, at_once in enumerate(zip(*steps, strict=True)):
        if number >= until:
            break
        rates = [(s.lrs, *s.named_rates.values()) for s in at_once]
        if any(r != rates[0] for r in rates[1:]):
            return _rates(dids, number, at_once)
        if any(_other_gradients(dids, at_once, name) for name in names):
            first = [n for n in names if _other_gradients(dids, at_once, n)]
            what = f"at step {number + 1} the ranks read different gradients of {some(first, most=2)}"
            return what, str(at_once[0].place)
    return f"after step {until} they differ, though rates and gradients are the same on all ranks until then", ""


def _steps(record: Record) -> list[Step]:
    return [s for s in record.of(Step) if not s.nested]


def _first_apart(dids: Sequence[Did], names: Sequence[str]) -> int:
    """How many steps were made before some of these weights differ."""
    logs = [did.seen.digests for did in dids]
    for number, states in enumerate(zip(*logs, strict=False)):
        if any(len({state.get(name) for state in states}) > 1 for name in names):
            return number
    return min(map(len, logs))


def _rates(dids: Sequence[Did], number: int, steps: Sequence[Step]) -> tuple[str, str]:
    """The rates of a step, and the line of the scheduler that set some of them."""
    lrs = [s.lrs for s in steps]
    group = next((g for g, of_group in enumerate(zip(*lrs, strict=False)) if len(set(of_group)) > 1), None)
    shown = f": {_listed([of_rank[group] for of_rank in lrs])}" if group is not None else ""
    scheduled = [
        s
        for did, step in zip(dids, steps, strict=True)
        for s in did.require().of(SchedulerStep)
        if s.at < step.at and s.optimizer in (None, step.optimizer)
    ]
    return f"the learning rates part at step {number + 1}{shown}", str(scheduled[-1].place) if scheduled else ""


def _other_gradients(dids: Sequence[Did], steps: Sequence[Step], name: str) -> bool:
    """Whether the ranks' steps read different gradients of a parameter, by more than rounding."""
    read = [_read(did.require(), step).get(name) for did, step in zip(dids, steps, strict=True)]
    first = read[0]
    if first is None or any(other is None or len(other) != len(first) for other in read):
        return False
    limit = ROUNDING["float32"] * float(first.abs().max()) if len(first) else 0.0
    return any(float((other - first).abs().max()) > limit for other in read[1:] if other is not None)


def _read(record: Record, step: Step) -> Gradient:
    found: Gradient = {}
    for index, sample in (step.reads[0].grads if step.reads else {}).items():
        if sample is not None and sample.raw and not sample.sparse:
            entries = values(sample, record.parameters[index].dtype)
            found[plain(record.name(index))] = entries if len(entries) else torch.zeros(1)
    return found


def _listed(numbers: Sequence[float], unit: str = "") -> str:
    return ", ".join(f"{number:.6g}{unit} on rank {rank}" for rank, number in enumerate(numbers))
