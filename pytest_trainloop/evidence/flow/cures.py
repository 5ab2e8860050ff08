"""What would keep rows apart: the same pass with one kind of operation done along another axis.

An operation is named as the cause where, done right, it alone makes every row independent of all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from pytest_trainloop.evidence.contracts.walks import constant
from pytest_trainloop.evidence.flow.rows import axis_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_trainloop.evidence.flow.passing import Change, Op

Kind = Literal["softmax", "normalised", "views", "statistics", "batch_norm"]

_SOFTMAX = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
VIEWS = frozenset({"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"})
STATISTICS = frozenset(
    """mean sum std var norm amax amin max min median logsumexp var_mean std_mean vector_norm nanmean pow_sum square_sum
    abs_max cov corrcoef""".split()
)
_MADE_OF = frozenset("div __truediv__ true_divide __itruediv__ div_ mul __mul__ sub __sub__".split())
SEQUENCES = frozenset(
    "lstm gru rnn_tanh rnn_relu multi_head_attention_forward scaled_dot_product_attention matmul bmm baddbmm".split()
)
NEARLY = 1e-3
"""How near the spread of a standardised column comes to 1: what is added to keep a division from zero (1e-5 in torch's
norms) takes less than this off a variance above 0.01."""


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
    views = [op for op in ops if op.name in VIEWS and scrambles(op, rows)]
    if views:
        yield Cure("views", tuple(views), {op.number: moved_first(rows) for op in views})
    statistics = [op for op in ops if op.name in STATISTICS and takes_away(op, rows)]
    if statistics:
        yield Cure("statistics", tuple(statistics), {op.number: as_a_constant for op in statistics})


def standardised(ops: Sequence[Op], rows: int) -> Op | None:
    """The first quotient, product or difference that is standardised over the rows, by its values: each column has
    mean 0 and variance 1, length 1 or sum 1 over the rows; or all of it together has."""
    for op in ops:
        if op.name not in _MADE_OF:
            continue
        for out in op.gave:
            axis = axis_of(out, rows)
            if axis is not None and out.is_floating_point() and out.numel() > 2 * rows and _is_standard(out, axis):
                return op
    return None


def _is_standard(values: torch.Tensor, axis: int) -> bool:
    columns = values.detach().double().movedim(axis, 0).flatten(1)
    columns = columns[:, columns.std(0) > 0]
    return columns.shape[1] > 1 and len(columns) > 2 and (_is_one(columns, 0) or _is_one(columns.reshape(-1, 1), 0))


def _is_one(columns: torch.Tensor, axis: int) -> bool:
    mean, count = columns.mean(axis), columns.shape[axis]
    squares = columns.square().sum(axis)
    spread = (columns - mean).square().sum(axis)
    centred = bool((mean.abs() <= NEARLY * spread.sqrt()).all())
    standard = centred and any(bool(((spread / n - 1).abs() <= NEARLY).all()) for n in (count, count - 1))
    return standard or bool(((squares - 1).abs() <= NEARLY).all())


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
    """Whether entries of one row no longer stand together along any axis, by the numbers of their rows."""
    if not op.given or not op.gave or (axis := axis_of(op.given[0], rows)) is None:
        return False
    given, out = op.given[0], op.gave[0]
    beside = [1] * given.dim()
    beside[axis] = rows
    numbers = torch.arange(rows).reshape(beside).expand(given.shape).reshape(out.shape)
    return not any(all(constant(numbers, other) for other in range(out.dim()) if other != d) for d in range(out.dim()))
