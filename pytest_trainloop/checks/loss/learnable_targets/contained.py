"""Targets that stand among the inputs: a table that keeps its target, a window that is one step too long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.checks.loss.learnable_targets.comparisons import FirstSteps
from pytest_trainloop.recording.torch_names import CASTS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.learnable_targets.comparisons import Comparison
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.call_log import Value

LEAST = 6
"""Different targets below which a column may equal them by chance: of 6 rows one order in 720 does."""


@dataclass(frozen=True, slots=True)
class Contained:
    """Each column of ``target`` stands in ``input``, in all rows; ``columns`` are their places in its rows."""

    input: str
    target: str
    columns: tuple[int, ...]
    of: int
    rows: int
    place: Place


def contained_targets(evidence: Evidence) -> Iterator[Contained]:
    """Targets of the batch whose values stand in a tensor that their prediction is made of."""
    first = evidence.shared(FirstSteps.on)
    given = {id(v): t for v, t in zip(first.batch, first.tensors, strict=True)}
    for compared in first.by_line().values():
        one = compared[0]
        target = one.target.source(VIEWS | CASTS)
        wanted = given.get(id(target))
        if wanted is None or one.call.step or not wanted.is_floating_point():
            continue
        sources = {id(v): v for v in one.prediction.origins(20_000) if v.of_batch and v.number == target.number}
        for source in sources.values():
            columns = _columns(given[id(source)], wanted) if source is not target else ()
            if columns and _depends(evidence, one, source, columns):
                size = math.prod(source.shape[1:])
                yield Contained(source.of_batch, target.of_batch, columns, size, source.shape[0], one.call.place)


def _columns(given: torch.Tensor, wanted: torch.Tensor) -> tuple[int, ...]:
    """Where in the rows of an input each column of a target stands; empty where one does not, or nothing is left."""
    if not given.dim() or not wanted.dim() or given.shape[0] != wanted.shape[0] or given.dtype != wanted.dtype:
        return ()
    rows, targets = given.reshape(len(given), -1), wanted.reshape(len(wanted), -1)
    if targets.shape[1] >= rows.shape[1] or not targets.shape[1]:
        return ()  # a net that gives back its input
    found = []
    for column in targets.T:
        equal = (rows == column.unsqueeze(1)).all(0).nonzero().flatten()
        if not len(equal) or len(column.unique()) < LEAST:
            return ()
        found.append(int(equal[0]))
    return tuple(found)


def _depends(evidence: Evidence, one: Comparison, source: Value, columns: tuple[int, ...]) -> bool:
    """Whether the prediction is another one where these columns of the input change rows."""
    same, other = (_prediction(evidence, one, source, c) for c in ((), columns))
    return same == one.prediction.digest and other is not None and other != same


def _prediction(evidence: Evidence, one: Comparison, source: Value, columns: tuple[int, ...]) -> int | None:
    seen = FirstSteps(steps=1)

    def prepared(number: int, item: Any) -> None:
        with seen.watch.suspended():
            _turn(item, source.of_batch, columns)
        seen.take(number, item)

    evidence.rerun(
        contexts=seen.contexts,
        before_item=prepared,
        enough=lambda r: r.rounds >= 1,
        varied="with columns of an input in other rows",
        may_raise=True,
    )
    call = seen.calls[one.call.number] if one.call.number < len(seen.calls) else None
    if call is None or call.name != one.call.name:
        return None
    side = [v is one.prediction for v in one.call.inputs].index(True)
    return call.inputs[side].digest


def _turn(item: Any, name: str, columns: tuple[int, ...]) -> None:
    for path, tensor in nested.paths(item):
        if columns and nested.shown(path) == name and tensor.is_contiguous():
            with torch.no_grad():
                rows = tensor.view(len(tensor), -1)
                rows[:, list(columns)] = rows[:, list(columns)].roll(1, 0)
