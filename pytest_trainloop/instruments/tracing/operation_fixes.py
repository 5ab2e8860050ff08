"""What makes rows independent: the same pass with one kind of operation along another axis.

An operation is named as the cause where this fix alone makes every row independent of all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from pytest_trainloop.instruments.tracing.forward_pass import axis_of
from pytest_trainloop.instruments.tracing.tape_queries import constant
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_trainloop.instruments.tracing.forward_pass import Op, Replacement

Kind = Literal["softmax", "normalised", "views", "statistics", "batch_norm"]

_NORMS = frozenset({"normalize", "layer_norm"})
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


@dataclass(frozen=True, slots=True)
class OperationFix:
    """One kind of operation, done otherwise."""

    kind: Kind
    ops: tuple[Op, ...]
    replacements: Mapping[int, Replacement]
    """The new results, by the operations' numbers."""


def operation_fixes(ops: Sequence[Op], mixing: Sequence[Op], rows: int) -> Iterator[OperationFix]:
    """The fixes to try, one kind of operation at a time; ``mixing`` are the operations that let rows meet."""
    kinds: tuple[tuple[Kind, Sequence[Op], Callable[[Op], bool], Replacement], ...] = (
        ("batch_norm", mixing, lambda op: op.name == "batch_norm", as_a_constant),
        ("softmax", mixing, lambda op: op.name in _SOFTMAX and _wide(op, rows), _along_another_axis(rows)),
        ("normalised", mixing, lambda op: op.name in _NORMS and _wide(op, rows), _each_row_alone(rows)),
        ("views", ops, lambda op: op.name in RESHAPES and scrambles(op, rows), moved_first(rows)),
        ("statistics", ops, lambda op: op.name in STATISTICS and takes_away(op, rows, folded=True), as_a_constant),
    )
    for kind, among, applies, replacement in kinds:
        found = tuple(op for op in among if applies(op))
        if found:
            yield OperationFix(kind, found, {op.number: replacement for op in found})


def normalising(ops: Sequence[Op], rows: int, reaches: Callable[[torch.Tensor], bool]) -> Op | None:
    """The first operation that centres or scales rows by a statistic over all rows.

    It is a difference, product or quotient of rows and the statistic, and ``reaches`` says of its result that it lies
    on a row's own way to the outputs. No weight lies between the statistic and it: a layer that reads a statistic
    may gate what it likes. The statistic is a mean, a spread or a norm: a largest value may be a range.
    """
    made_by = {id(t): op for op in ops for t in op.outputs}
    for op in ops:
        if op.name not in _SCALES or len(op.outputs) != 1:
            continue
        holds = _folds if axis_of(op.outputs[0], rows) is None else axis_of
        if holds(op.outputs[0], rows) is None:
            continue
        own = [t for t in op.inputs if t.requires_grad and holds(t, rows) is not None]
        others = [t for t in op.inputs if holds(t, rows) is None]
        if own and any(_is_statistic(t, made_by, rows) for t in others) and reaches(op.outputs[0]):
            return op
    return None


def _is_statistic(tensor: torch.Tensor, made_by: Mapping[int, Op], rows: int, left: int = 12) -> bool:
    """Whether this is a statistic over rows, or computed from such without a weight."""
    maker = made_by.get(id(tensor))
    if maker is None or left == 0:
        return False
    if maker.name in STATISTICS and takes_away(maker, rows, folded=True):
        return maker.name in _SPREADS
    parents = [t for t in maker.inputs if id(t) in made_by]
    plain = not any(isinstance(t, torch.nn.Parameter) for t in maker.inputs)
    return plain and bool(parents) and all(_is_statistic(t, made_by, rows, left - 1) for t in parents)


def in_sequence(mixing: Sequence[Op], rows: int) -> list[Op]:
    """Operations over sequences that take the rows for positions, and take another axis for rows."""
    return [op for op in mixing if op.name in SEQUENCES and _wide(op, rows) and max(t.dim() for t in op.inputs) > 2]


def folded_sequences(ops: Sequence[Op], rows: int) -> list[Op]:
    """Operations over sequences in which the rows are part of a longer axis, as windows or stripes of each."""
    return [
        op
        for op in ops
        if op.name in SEQUENCES
        and any(t.dim() > 2 and any(n % rows == 0 and n > rows for n in t.shape[:2]) for t in op.inputs)
    ]


def _wide(op: Op, rows: int) -> bool:
    """Whether the first input with rows has more than one entry in its first other axis, or in the only one."""
    given = next((t for t in op.inputs if axis_of(t, rows) is not None), None)
    if given is None:
        return False
    rest = [size for d, size in enumerate(given.shape) if d != axis_of(given, rows)]
    return math.prod(rest[:1] if given.dim() > 2 else rest) > 1


def axes_of_fix(op: Op, rows: int) -> tuple[int, int] | None:
    """The axis of rows that a softmax or a norm of vectors runs along, and the one that its fix takes in its place;
    None for other operations."""
    if op.name not in {"normalize", *_SOFTMAX} or not op.inputs:
        return None
    given = op.inputs[0]
    axis = axis_of(given, rows)
    return None if axis is None else (axis, given.dim() - 1 if axis != given.dim() - 1 else 0)


def _along_another_axis(rows: int) -> Replacement:
    def change(op: Op) -> Any:
        given = op.inputs[0]
        axis = axis_of(given, rows)
        return _SOFTMAX[op.name](given, given.dim() - 1 if axis != given.dim() - 1 else 0)

    return change


def _each_row_alone(rows: int) -> Replacement:
    def change(op: Op) -> Any:
        given = op.inputs[0]
        axis = axis_of(given, rows) or 0
        if op.name == "normalize":
            return F.normalize(given, dim=given.dim() - 1 if axis != given.dim() - 1 else 0)
        moved = given.movedim(axis, 0)
        return F.layer_norm(moved, moved.shape[1:]).movedim(0, axis)

    return change


def moved_first(rows: int) -> Replacement:
    """The same shape with the rows in an axis of their own."""

    def change(op: Op) -> Any:
        given, shape = op.inputs[0], list(op.outputs[0].shape)
        moved = given.movedim(axis_of(given, rows) or 0, 0)
        if rows not in shape:
            return moved.reshape(shape)
        to = shape.index(rows)
        return moved.reshape([rows, *shape[:to], *shape[to + 1 :]]).movedim(0, to)

    return change


def as_a_constant(op: Op) -> Any:
    """The operation's result, detached."""
    return tree_map(lambda value: value.detach() if isinstance(value, torch.Tensor) else value, op.out)


def takes_away(op: Op, rows: int, *, folded: bool = False) -> bool:
    """Whether the operation's input has the rows and its outputs do not; ``folded``: also as part of a longer axis."""
    given = op.inputs[:1]
    if given and folded and axis_of(given[0], rows) is None and _folds(given[0], rows) is not None:
        return all(axis_of(t, rows) is None and _folds(t, rows) is None for t in op.outputs)
    return bool(given) and axis_of(given[0], rows) is not None and all(axis_of(t, rows) is None for t in op.outputs)


def _folds(tensor: torch.Tensor, rows: int) -> int | None:
    """The first axis, where it may hold the rows and another axis: the nodes of all graphs."""
    folds = tensor.dim() > 0 and len(tensor) > rows and len(tensor) % rows == 0
    return 0 if folds and not isinstance(tensor, torch.nn.Parameter) else None


def scrambles(op: Op, rows: int) -> bool:
    """Whether no axis of the output holds whole rows any more: that as long as the rows, where there is one."""
    if not op.inputs or not op.outputs or (axis := axis_of(op.inputs[0], rows)) is None:
        return False
    given, out = op.inputs[0], op.outputs[0]
    sizes = [1] * given.dim()
    sizes[axis] = rows
    numbers = torch.arange(rows).reshape(sizes).expand(given.shape).reshape(out.shape)
    to = axis_of(out, rows)
    return not any(
        all(constant(numbers, other) for other in range(out.dim()) if other != d)
        for d in (range(out.dim()) if to is None else (to,))
    )
