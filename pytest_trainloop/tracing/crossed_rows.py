"""Columns (N, 1) that meet rows (N,) in a table of N by N, of which the step takes nothing but its sum.

See docs/how-it-decides.md#rows-that-meet-outside-of-the-model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES, RESHAPES
from pytest_trainloop.tracing.row_tape import leads_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from pytest_trainloop.tracing.forward_pass import Op, Replacement
    from pytest_trainloop.tracing.row_tape import RowTape, Tape

_MEET = frozenset(
    "add sub rsub mul div __add__ __sub__ __rsub__ __mul__ __radd__ __rmul__ __truediv__ true_divide".split()
)
_LINEAR = _MEET | set("neg __neg__ negative detach float double to square pow __pow__".split())
"""What takes sums over a table apart into sums over its rows and over its columns; a square
does so too."""

_SUMS = frozenset({"mean", "sum"}) | DISTANCE_LOSSES


@dataclass(frozen=True, slots=True)
class Crossing:
    """One call that makes such a table. It holds no tensor."""

    at: int
    """Its place on the tape."""
    operands: tuple[int, int]
    """The calls that made the column and the row; -1 for a tensor of the batch."""
    rolled: tuple[Mapping[int, Replacement], ...]
    """The same with the entries of one side moved on by one wherever it meets, by the operations' numbers."""


def crossings(seen: RowTape) -> Iterator[Crossing]:
    """The calls of the step so far, while their tensors are there."""
    n = seen.rows
    makers = {id(t): op for op in seen.ops for t in op.outputs}
    at_number = {call.number: at for at, call in enumerate(seen.tape.calls)}
    tables = [(op, sides) for op in seen.ops if (sides := _sides(op, n)) is not None and op.number in at_number]
    for op, sides in tables:
        made_by = tuple(seen.made_by(t) for t in sides)
        if all(t.requires_grad for t in sides) or None in made_by or not _made_as_column(sides[0], makers, n):
            continue
        column, row = (-1 if found is None else found for found in made_by)
        moved = (_rolled(tables, side) for side in sides if not torch.equal(side, side.roll(1, 0)))
        if rolled := tuple(moved):
            yield Crossing(at_number[op.number], (column, row), rolled)


def summed_only(tape: Tape, at: int, rows: int) -> bool:
    """Whether what reaches the root of this table is its sum, or sums of products with rows or columns."""
    reached = leads_to(tape, tape.roots)
    tables, ends = {at}, 0
    if at not in reached:
        return False
    for number, call in enumerate(tape.calls):
        if number not in reached or not tables.intersection(call.inputs):
            continue
        if call.name in _SUMS and call.shapes == ((),):
            ends += 1
        elif call.shapes == ((rows, rows),) and call.name in _LINEAR:
            tables.add(number)
        else:
            return False
    return ends > 0


def _sides(op: Op, n: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The column (N, 1) and the row (N,) that the call makes a table of."""
    given = [a for a in op.args if isinstance(a, torch.Tensor)]
    if op.name not in _MEET or len(given) != 2 or [tuple(t.shape) for t in op.outputs] != [(n, n)]:
        return None
    column, row = sorted(given, key=lambda t: -t.dim())
    return (column, row) if column.shape == (n, 1) and row.shape == (n,) else None


def _made_as_column(column: torch.Tensor, makers: Mapping[int, Op], n: int) -> bool:
    """Whether its axis of length 1 came with what it was made of: an output of a layer, a column of the batch. Where
    each was put in by hand, all pairs are meant."""
    todo, known = [column], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        op = makers.get(id(one))
        before = [t for t in op.inputs if t.shape == (n, 1)] if op is not None else []
        if op is None or (not before and not _put_in(op, n)):
            return True
        todo.extend(before)
    return False


def _put_in(op: Op, n: int) -> bool:
    flat: Sequence[torch.Tensor] = [t for t in op.inputs if t.shape == (n,)]
    return bool(flat) and (op.name in RESHAPES or op.name in ("unsqueeze", "__getitem__", "expand", "atleast_2d"))


def _rolled(
    tables: Sequence[tuple[Op, tuple[torch.Tensor, torch.Tensor]]], side: torch.Tensor
) -> dict[int, Replacement]:
    """All tables that this side is in, with its entries moved on by one."""
    found: dict[int, Replacement] = {}
    for op, sides in tables:
        places = [i for i, a in enumerate(op.args) if a is side]
        if places and any(side is one for one in sides):
            found[op.number] = _with_rolled(places[0])
    return found


def _with_rolled(place: int) -> Replacement:
    def change(op: Op) -> Any:
        args = [a.roll(1, 0) if i == place else a for i, a in enumerate(op.args)]
        return op.func(*args, **op.kwargs)

    return change
