"""What would keep rows apart: the same pass with one kind of operation done along another axis.

An operation is named as the cause where, done right, it alone makes every row independent of all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from pytest_trainloop.recording.torch_internals import tree_map
from pytest_trainloop.recording.torch_names import (
    ATTENTION,
    DIVISIONS,
    EXTREMES,
    MULTIPLICATIONS,
    RECURRENT,
    REDUCTIONS,
    RESHAPES,
    SUBTRACTIONS,
)
from pytest_trainloop.tracing.forward_pass import axis_of
from pytest_trainloop.tracing.provenance_queries import constant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_trainloop.tracing.forward_pass import Change, Op

Kind = Literal["softmax", "normalised", "views", "statistics", "batch_norm"]

_SOFTMAX = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
STATISTICS = (REDUCTIONS - {"nansum"}) | {"cov", "corrcoef"}
_SPREADS = REDUCTIONS - EXTREMES - {"nansum", "logsumexp", "median"}
"""What layers that normalise take over their rows: a largest value may be a range."""

_SCALES = (
    (DIVISIONS - {"truediv", "divide", "__div__"})
    | (MULTIPLICATIONS - {"rmul", "__rmul__"})
    | (SUBTRACTIONS - {"rsub", "__rsub__"})
    | {"div_", "mul_", "sub_"}
)
"""Rows minus a statistic, times it or over it."""

SEQUENCES = RECURRENT | ATTENTION | {"matmul", "bmm", "baddbmm"}
Reaches = Callable[[torch.Tensor], bool]
"""Whether a gradient comes in at a tensor, once statistics over rows are constants."""


@dataclass(frozen=True, slots=True)
class Cure:
    """``changes`` are results by the operations' numbers; ``ops`` are the operations that would be other."""

    kind: Kind
    ops: tuple[Op, ...]
    changes: Mapping[int, Change]


def cures(ops: Sequence[Op], mixing: Sequence[Op], rows: int) -> Iterator[Cure]:
    """What may be tried, one kind of operation at a time."""
    norms = [op for op in mixing if op.name == "batch_norm"]
    if norms:
        yield Cure("batch_norm", tuple(norms), {op.number: as_a_constant for op in norms})
    softmaxes = [op for op in mixing if op.name in _SOFTMAX and _wide(op, rows)]
    if softmaxes:
        yield Cure("softmax", tuple(softmaxes), {op.number: _along_another_axis(rows) for op in softmaxes})
    normalised = [op for op in mixing if op.name in ("normalize", "layer_norm") and _wide(op, rows)]
    if normalised:
        yield Cure("normalised", tuple(normalised), {op.number: _each_row_alone(rows) for op in normalised})
    views = [op for op in ops if op.name in RESHAPES and scrambles(op, rows)]
    if views:
        yield Cure("views", tuple(views), {op.number: moved_first(rows) for op in views})
    statistics = [op for op in ops if op.name in STATISTICS and takes_away(op, rows)]
    if statistics:
        yield Cure("statistics", tuple(statistics), {op.number: as_a_constant for op in statistics})


def normalising(ops: Sequence[Op], rows: int, reaches: Reaches) -> Op | None:
    """The first difference, product or quotient of rows and a statistic over them that lies on a row's own way to the
    outputs: rows are centred or scaled by each other. The statistic must come there without a weight (a layer that
    looks at it may gate what it likes), and be a mean, a spread or a norm (a largest value may be a range)."""
    made_by = {id(t): op for op in ops for t in op.gave}
    for op in ops:
        if op.name not in _SCALES or len(op.gave) != 1 or axis_of(op.gave[0], rows) is None:
            continue
        own = [t for t in op.given if t.requires_grad and axis_of(t, rows) is not None]
        others = [t for t in op.given if axis_of(t, rows) is None]
        if own and any(_is_statistic(t, made_by, rows) for t in others) and reaches(op.gave[0]):
            return op
    return None


def _is_statistic(tensor: torch.Tensor, made_by: Mapping[int, Op], rows: int, left: int = 12) -> bool:
    """Whether it is a statistic over rows, or made of such by plain operations."""
    maker = made_by.get(id(tensor))
    if maker is None or left == 0:
        return False
    if maker.name in STATISTICS and takes_away(maker, rows):
        return maker.name in _SPREADS
    parents = [t for t in maker.given if id(t) in made_by]
    plain = not any(isinstance(t, torch.nn.Parameter) for t in maker.given)
    return plain and bool(parents) and all(_is_statistic(t, made_by, rows, left - 1) for t in parents)


def in_sequence(mixing: Sequence[Op], rows: int) -> list[Op]:
    """Operations over sequences that take the rows for positions, and have another axis for what they take for rows."""
    return [op for op in mixing if op.name in SEQUENCES and _wide(op, rows) and max(t.dim() for t in op.given) > 2]


def _wide(op: Op, rows: int) -> bool:
    """Whether what it is given has, besides the rows and the last axis or in the last axis, more than one entry."""
    given = next((t for t in op.given if axis_of(t, rows) is not None), None)
    if given is None:
        return False
    rest = [size for d, size in enumerate(given.shape) if d != axis_of(given, rows)]
    return math.prod(rest[:1] if given.dim() > 2 else rest) > 1


def _along_another_axis(rows: int) -> Change:
    def change(op: Op) -> Any:
        given = op.given[0]
        axis = axis_of(given, rows)
        return _SOFTMAX[op.name](given, given.dim() - 1 if axis != given.dim() - 1 else 0)

    return change


def _each_row_alone(rows: int) -> Change:
    def change(op: Op) -> Any:
        given = op.given[0]
        axis = axis_of(given, rows) or 0
        if op.name == "normalize":
            return F.normalize(given, dim=given.dim() - 1 if axis != given.dim() - 1 else 0)
        moved = given.movedim(axis, 0)
        return F.layer_norm(moved, moved.shape[1:]).movedim(0, axis)

    return change


def moved_first(rows: int) -> Change:
    """The same shape with the rows in an axis of their own."""

    def change(op: Op) -> Any:
        given, shape = op.given[0], list(op.gave[0].shape)
        moved = given.movedim(axis_of(given, rows) or 0, 0)
        if rows not in shape:
            return moved.reshape(shape)
        to = shape.index(rows)
        return moved.reshape([rows, *shape[:to], *shape[to + 1 :]]).movedim(0, to)

    return change


def as_a_constant(op: Op) -> Any:
    """What it gave, without a history."""
    return tree_map(lambda value: value.detach() if isinstance(value, torch.Tensor) else value, op.out)


def takes_away(op: Op, rows: int) -> bool:
    given = op.given[:1]
    return bool(given) and axis_of(given[0], rows) is not None and all(axis_of(t, rows) is None for t in op.gave)


def scrambles(op: Op, rows: int) -> bool:
    """Whether entries of one row no longer stand together along any axis (along the axis that is as long as there are
    rows, where there is one), by the numbers of their rows."""
    if not op.given or not op.gave or (axis := axis_of(op.given[0], rows)) is None:
        return False
    given, out = op.given[0], op.gave[0]
    beside = [1] * given.dim()
    beside[axis] = rows
    numbers = torch.arange(rows).reshape(beside).expand(given.shape).reshape(out.shape)
    to = axis_of(out, rows)
    return not any(
        all(constant(numbers, other) for other in range(out.dim()) if other != d)
        for d in (range(out.dim()) if to is None else (to,))
    )
