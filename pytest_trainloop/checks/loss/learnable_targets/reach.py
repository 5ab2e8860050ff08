"""Targets that lie outside of what the last function in front of the loss can give.

Where even the best output that the function can give is further from the targets than one constant number would be,
the range is wrong for them: no correct loop has that. A smaller share outside may be noise around the end of the range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.learnable_targets.comparisons import FirstSteps
from pytest_trainloop.recording.torch_names import CASTS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.learnable_targets.comparisons import Comparison
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence

RANGES = {
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "relu": (0.0, math.inf),
    "softplus": (0.0, math.inf),
    "exp": (0.0, math.inf),
    "log_softmax": (-math.inf, 0.0),
    "logsigmoid": (-math.inf, 0.0),
}

SHARE = 0.25
"""The share of targets outside of the range from which it is said."""


@dataclass(frozen=True, slots=True)
class OutOfReach:
    """``outside`` of ``count`` targets lie outside of the bounds, by ``least`` in root mean square over all of them;
    one constant number is ``constant`` away from them."""

    function: str
    bounds: tuple[float, float]
    outside: int
    count: int
    least: float
    constant: float
    smallest: float
    largest: float
    place: Place
    made_at: Place

    @property
    def hopeless(self) -> bool:
        """Whether a constant outside of the range is nearer to the targets than the best output within it."""
        return self.least > self.constant


def out_of_reach(evidence: Evidence) -> Iterator[OutOfReach]:
    """Each line that compares bounded outputs with data beyond their bounds."""
    first = evidence.shared(FirstSteps.on)
    for compared in first.by_line().values():
        made = [_bounded(one) for one in compared]
        wanted = [first.origin(one.target) for one in compared]
        known = [m for m in made if m is not None]
        if len(known) != len(made) or len({name for name, _ in known}) != 1:
            continue
        if any(not o.batch or o.trained or o.weights or o.opaque or o.draws for o in wanted):
            continue
        targets = torch.cat([one.expected.flatten().double() for one in compared])
        found = _beyond(targets[targets.isfinite()], known[0], compared[0].call.place)
        if found is not None and found.outside >= SHARE * found.count:
            yield found


def _bounded(compared: Comparison) -> tuple[str, Place] | None:
    """The function that gives the prediction, and its line, where it has bounds."""
    call = compared.prediction.source(VIEWS | CASTS).made_by
    if call is None or call.name.rstrip("_") not in RANGES:
        return None
    return call.name.rstrip("_"), call.place


def _beyond(targets: torch.Tensor, made: tuple[str, Place], place: Place) -> OutOfReach | None:
    if not len(targets):
        return None
    function, made_at = made
    low, high = RANGES[function]
    off = targets - targets.clamp(low, high)
    return OutOfReach(
        function,
        (low, high),
        outside=int((off != 0).sum()),
        count=len(targets),
        least=float(off.square().mean().sqrt()),
        constant=float(targets.std(unbiased=False)),
        smallest=float(targets.min()),
        largest=float(targets.max()),
        place=place,
        made_at=made_at,
    )
