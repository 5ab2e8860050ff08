"""The first loss of the loop, and that with initial values put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core import members
from pytest_trainloop.runs.run import fit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.checks.learning.initial_values_are_kept.initial_values import Lost
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence


def first_losses(evidence: Evidence, lost: Sequence[Lost]) -> tuple[float, float] | None:
    """The first value that is backpropagated, and that of a run with the lost values put back; None where either is
    not positive, so that a factor says nothing."""
    values = {one.name: one.chosen.values for one in lost}

    def put_back(loop: TrainLoop) -> Callable[[Any], Any]:
        for prefix, module in loop.modules.items():
            for name, parameter in members.named_parameters(module, prefix):
                if name in values and parameter.shape == values[name].shape:
                    with torch.no_grad():
                        parameter.copy_(values[name])
        return fit_of(loop)

    other = evidence.rerun(fit=put_back, enough=lambda record: record.rounds >= 1)
    firsts = [b.roots[0].value for r in (evidence.run(), other) for b in r.backwards()[:1] if b.roots]
    return (firsts[0], firsts[1]) if len(firsts) == 2 and min(firsts) > 0 else None
