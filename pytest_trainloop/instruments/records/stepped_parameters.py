"""Which parameters were stepped with a gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.instruments.gradients.tolerances import CANCELLATION
from pytest_trainloop.recording.events import Backward, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.recording.record import Parameter, Record


LEAST_STEPS = 3
"""Steps with a gradient that must leave a parameter as it was."""


def noise_of(record: Record) -> float:
    """The size up to which a gradient is what is left of terms that cancel (a bias before a batch norm)."""
    peaks = [a.incoming.peak for b in record.of(Backward) for arrived in b.arrivals.values() for a in arrived]
    return CANCELLATION * max((p for p in peaks if math.isfinite(p)), default=0.0)


def steps_with_gradient(record: Record) -> dict[int, int]:
    """For each parameter, the number of steps at a learning rate above zero that consumed a gradient: one with sampled
    entries other than zero, and above what is left of terms that cancel (a bias before a batch norm)."""
    noise = noise_of(record)
    steps: dict[int, int] = {}
    for step in record.of(Step):
        if step.nested or not step.full or not step.reads:
            continue
        optimizer = record.optimizers[step.optimizer]
        group_of = dict(zip(optimizer.parameters, optimizer.groups, strict=True))
        for index, grad in step.reads[-1].grads.items():
            if grad is None or grad.sparse or not noise < grad.peak < math.inf or not any(grad.raw):
                continue
            group = group_of.get(index, 0)
            if group < len(step.lrs) and step.lrs[group] > 0:
                steps[index] = steps.get(index, 0) + 1
    return steps


def low_precision_stepped(record: Record, dtypes: Sequence[str]) -> list[Parameter]:
    """Parameters of these dtypes that were stepped with gradients, and that only optimizers move."""
    by_others = {i for move in record.moves if move.by is None for i in move.parameters}
    steps = steps_with_gradient(record)
    return [
        p
        for p in record.parameters
        if p.dtype in dtypes and steps.get(p.index, 0) >= LEAST_STEPS and p.index not in by_others and not p.gone
    ]
