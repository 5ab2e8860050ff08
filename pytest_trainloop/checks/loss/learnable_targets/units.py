"""Targets that lie far from where any net begins: in other units than its output, or standardised a second time.

With usual initialisations outputs begin around 0. Where one constant for each output, the mean of its targets, is ten
times nearer to them than the first outputs are, the first steps only look for that constant. Where the targets of the
batch are in reach and the loop's own (y - mean) / spread takes them out of it, mean and spread are of other values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.learnable_targets.comparisons import FirstSteps
from pytest_trainloop.recording.torch_names import CASTS, DIVISIONS, INDEXING, MULTIPLICATIONS, SUBTRACTIONS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_trainloop.checks.loss.learnable_targets.comparisons import Comparison
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.call_log import Call, Value

FAR = 10.0
"""Times the spread of the targets from which the first outputs are far from them: as for torch's squared errors."""

NEAR = 3.0
"""Times the spread up to which they are near."""

LEAST = 8
"""Targets below which nothing is said of their spread."""


@dataclass(frozen=True, slots=True)
class FarTargets:
    """The first outputs are ``start`` from their targets in root mean square, the means of these are ``spread``."""

    place: Place
    start: float
    spread: float
    mean: float
    scaled_at: Place | None
    """The line that standardises what was standardised before; None where nothing does."""
    name: str
    before: tuple[float, float]
    """Mean and spread of the values of the batch."""


def far_targets(evidence: Evidence) -> Iterator[FarTargets]:
    """Each line whose first comparison finds the targets far from the outputs, beside their spread."""
    first = evidence.shared(FirstSteps.on)
    for compared in first.by_line().values():
        one = compared[0]
        made_of, predicted = first.origin(one.target), first.origin(one.prediction)
        of_data = made_of.batch and not (made_of.trained or made_of.weights or made_of.opaque or made_of.draws)
        if not of_data or not (predicted.trained and predicted.batch) or one.call.step:
            continue
        found = _far(first, one)
        if found is not None:
            yield found


def _far(first: FirstSteps, one: Comparison) -> FarTargets | None:
    start, spread = _rms(one.predicted - one.expected), _spread(one.expected)
    if one.expected.numel() < LEAST or not spread or not start >= FAR * spread:
        return None
    scaling, leaf = _standardising(one.target)
    values = next((t for v, t in zip(first.batch, first.tensors, strict=True) if v is leaf), None)
    before = (math.nan, math.nan)
    scaled = None
    if values is not None and values.numel() == one.expected.numel() and values.is_floating_point():
        values = values.reshape(one.expected.shape)
        before = float(values.double().mean()), _spread(values)
        near = _rms(one.predicted - values) <= NEAR * before[1]
        scaled = scaling.place if near and scaling is not None else None
    name = leaf.of_batch if leaf is not None else ""
    return FarTargets(one.call.place, start, spread, float(one.expected.double().mean()), scaled, name, before)


def _standardising(target: Value) -> tuple[Call | None, Value | None]:
    """The division of a difference that a target is the result of, and the tensor of the batch behind it."""
    moves = VIEWS | CASTS | INDEXING
    value = target.source(moves)
    call = value.made_by
    scales = call is not None and call.name in DIVISIONS | MULTIPLICATIONS and bool(call.inputs)
    if call is None or not scales:
        return None, next((v for v in target.origins() if v.of_batch), None)
    shifted = call.inputs[0].source(moves).made_by
    leaf = next((v for v in target.origins() if v.of_batch), None)
    return (call if shifted is not None and shifted.name in SUBTRACTIONS else None), leaf


def _rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def _spread(targets: torch.Tensor) -> float:
    """The distance of targets from the means of their columns, in root mean square."""
    rows = targets.double().reshape(len(targets), -1) if targets.dim() > 1 else targets.double()
    return _rms(rows - rows.mean(0))
