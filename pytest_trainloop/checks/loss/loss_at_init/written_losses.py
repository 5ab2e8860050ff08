"""Losses that are written by hand: the calls between the last layers and what is backpropagated, made again with zeros
as the outputs of these layers.

Zeros are equal scores, even odds and an output that says nothing; for targets far from zero they are a high chance
level. By how much the value grows with the outputs (its degree) is asked of the same calls with outputs twice as large.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLoss
from pytest_trainloop.tracing.loss_slice import CannotReplay
from pytest_trainloop.tracing.loss_tape import LossTape

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.loss_slice import Slice

HIGHEST_DEGREE = 4.0


def written_losses(evidence: Evidence, prepare: Callable[[Watch], None] = lambda watch: None) -> list[InitialLoss]:
    """The values that are backpropagated before the first step, with what they are for outputs of zero."""
    tape = LossTape()
    evidence.rerun(
        contexts=tape.contexts,
        before_item=tape.take,
        enough=lambda record: record.begun,
        double=True,
        may_raise=True,
        prepare=prepare,
    )
    found = [_initial(s) for s in tape.slices if s.step == 0]
    return [loss for loss in found if loss is not None]


def _initial(found: Slice) -> InitialLoss | None:
    outputs = found.trained(found.root)
    if not outputs or found.values[found.root].tensor.numel() != 1:
        return None
    value = float(found.values[found.root].tensor)
    try:
        chance, doubled = (
            float(found.replay({v.number: factor * v.tensor.detach() for v in outputs}, [found.root])[0])
            for factor in (0.0, 2.0)
        )
    except CannotReplay:
        return None
    degree = math.log2(doubled / value) if doubled > value > 0 else 1.0
    squares = torch.cat([v.tensor.detach().double().reshape(-1) for v in outputs]).square()
    return InitialLoss(
        "the loss",
        str(found.place or ""),
        value,
        chance=chance,
        degree=round(min(max(degree, 1.0), HIGHEST_DEGREE)),
        outputs=float(squares.mean().sqrt()),
    )
