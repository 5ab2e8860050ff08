"""What a step does along the rows of its batch, and the same step done another way: an operation along another axis,
copies of rows in another order, a table of all pairs with the rows of one side moved on.

See docs/how-it-decides.md#rows-that-meet-outside-of-the-model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.instruments.tracing.forward_pass import axis_of
from pytest_trainloop.instruments.tracing.operation_fixes import moved_first, scrambles
from pytest_trainloop.instruments.tracing.row_tape import leads_to
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES, RESHAPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.instruments.tracing.forward_pass import Op, Replacement
    from pytest_trainloop.instruments.tracing.row_tape import RowTape, Tape
    from pytest_trainloop.recording.events import Place

_AXIS_AT: dict[str, tuple[str, int, int | None]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), ("softmax", 1, None)),
    "normalize": ("normalised", 2, 1),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), ("normalised", 2, None)),
    "cosine_similarity": ("similarity", 2, 1),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "flip"), ("cumulated", 1, None)),
}
"""By the name of a function: the kind, where it takes its axis among the arguments, and the axis by default."""

COPIES = frozenset({"repeated", "interleaved"})
"""Copies of rows, whole batches one after the other, or those of each row together."""

LAYOUTS = COPIES | {"strided", "halved"}
"""These, and rows that were joined, cut into every second (third, ...) row or into halves (thirds, ...)."""

_MEET = frozenset(
    "add sub rsub mul div __add__ __sub__ __rsub__ __mul__ __radd__ __rmul__ __truediv__ true_divide".split()
)
_LINEAR = _MEET | set("neg __neg__ negative detach float double to square pow __pow__".split())
"""What splits sums over a table into sums over its rows and over its columns; a square does so too."""

_SUMS = frozenset({"mean", "sum"}) | DISTANCE_LOSSES


@dataclass(frozen=True, slots=True)
class RowFix:
    """Operations of one kind that run over the rows. It holds no tensor."""

    kind: str
    named: str
    place: Place
    places: tuple[Place, ...]
    replacements: Mapping[int, Replacement]
    """The same done another way, by the operations' numbers."""
    dims: tuple[int, int] | None = None
    """The axis that the first one runs along, and the other; None where it lays rows out."""
    sources: frozenset[Path] = frozenset()
    """The tensors of the batch that what is laid out was made of; of layouts only."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A call by which a column (N, 1) and a row (N,) become a table. It holds no tensor."""

    at: int
    """Its place on the tape."""
    operands: tuple[int, int]
    """The calls that made the column and the row; -1 for a tensor of the batch."""
    rolled: tuple[Mapping[int, Replacement], ...]
    """The same with the entries of one side moved on by one wherever it is used, by the operations' numbers."""


def row_fixes(seen: RowTape, whole: int) -> Iterator[RowFix]:
    """One for each kind of operation that runs over an axis of rows, where there is another one to take, or that lays
    out copies of rows. The loop's own batch has ``whole`` rows."""
    rows = seen.rows
    found: dict[str, dict[Op, Replacement]] = {}
    makers = {id(t): op for op in seen.ops for t in op.outputs}
    for op in seen.ops:
        laid_out = _of_other_layout(op, rows, frozenset({rows, whole or rows}))
        if laid_out is not None:
            found.setdefault(laid_out[0], {})[op] = laid_out[1]
        elif op.name in _AXIS_AT and (change := _along_another(op, rows)):
            found.setdefault(_AXIS_AT[op.name][0], {})[op] = change
        elif op.name in RESHAPES and op.inputs and op.outputs:
            joined = moved_first(rows) if scrambles(op, rows) else _of_joined(op, rows, makers)
            if joined is not None:
                found.setdefault("views", {})[op] = joined
    for kind, changes in found.items():
        if all(op.name == "flip" for op in changes):
            continue  # rows in the other order, as partners of each other
        if kind in LAYOUTS - COPIES and not all(op.inputs[0].requires_grad for op in changes):
            continue  # what identifies pairs is cut in the same way (odd: neighbours_of_two_sources_are_ranked)
        first = next(op for op in changes if op.name != "flip")
        axis = axis_of(first.inputs[0], rows) if first.name in _AXIS_AT else None
        yield RowFix(
            kind,
            first.named,
            first.place,
            tuple(dict.fromkeys(op.place for op in changes)),
            {op.number: change for op, change in changes.items()},
            dims=None if axis is None else (axis, _other_axis(first.inputs[0], axis)),
            sources=frozenset(path for op in changes if kind in LAYOUTS for path in seen.made_of(op.inputs[0])),
        )


def _along_another(op: Op, rows: int) -> Replacement | None:
    """The same function along the last axis, or the first where the rows are last."""
    _, at, default = _AXIS_AT[op.name]
    if not op.inputs or (axis := axis_of(op.inputs[0], rows)) is None:
        return None
    given = op.inputs[0]
    if op.name.endswith("norm") and not (op.outputs and op.outputs[0].dim() == given.dim()):
        return None  # its axis is gone, and another one would leave another shape
    asked = op.args[at] if len(op.args) > at else op.kwargs.get("dim", op.kwargs.get("dims", default))
    listed = list(asked) if isinstance(asked, (list, tuple)) else [asked]
    if len(listed) != 1 or not isinstance(listed[0], int) or isinstance(listed[0], bool):
        return None
    if max((n for d, n in enumerate(given.shape) if d != axis), default=0) < 2 or listed[0] % given.dim() != axis:
        return None
    dim = [_other_axis(given, axis)] if isinstance(asked, (list, tuple)) else _other_axis(given, axis)

    def change(op: Op) -> Any:
        if len(op.args) > at:
            return op.func(*op.args[:at], dim, *op.args[at + 1 :], **op.kwargs)
        return op.func(*op.args, **{**op.kwargs, "dims" if op.name == "flip" else "dim": dim})

    return change


def _other_axis(given: torch.Tensor, axis: int) -> int:
    """The axis after the rows in a table of rows and steps, which is the last; of one that is longer than 1."""
    return [d for d, size in enumerate(given.shape) if d != axis and size > 1][-1]


def _of_joined(op: Op, rows: int, makers: Mapping[int, Op]) -> Replacement | None:
    """For steps that were joined one after the other and are cut as if those of each row were together."""
    given, out = op.inputs[0], op.outputs[0]
    maker = makers.get(id(given))
    if maker is None or maker.name not in ("cat", "concat", "concatenate") or not out.dim() or len(out) != rows:
        return None
    parts = maker.inputs
    whole = len(parts) > 1 and all(t.dim() and len(t) == rows and t.shape == parts[0].shape for t in parts)
    if not whole or len(given) != rows * len(parts):
        return None

    def change(op: Op) -> Any:
        joined = op.inputs[0]
        steps = len(joined) // rows
        return joined.reshape(steps, rows, *joined.shape[1:]).transpose(0, 1).reshape(op.outputs[0].shape)

    return change


def _of_other_layout(op: Op, rows: int, product: frozenset[int]) -> tuple[str, Replacement] | None:
    """How an operation lays out copies of rows, or cuts them, and the same done the other way. As many copies as one of
    ``product``, or a multiple, make all pairs of two rows, on purpose."""
    given = op.inputs[0] if op.inputs else None
    if given is None or not given.dim() or not op.outputs:
        return None
    many, out = len(given) // max(rows, 1), op.outputs[0]
    if op.name in ("repeat", "tile", "repeat_interleave"):
        copies = len(out) // rows if out.dim() == given.dim() and len(given) == rows else 0
        all_pairs = any(copies % count == 0 for count in product)
        if copies < 2 or all_pairs or out.shape[1:] != given.shape[1:] or len(out) != copies * rows:
            return None
        if op.name == "repeat_interleave":
            return "interleaved", lambda op: op.inputs[0].repeat(copies, *[1] * (op.inputs[0].dim() - 1))
        return "repeated", lambda op: op.inputs[0].repeat_interleave(copies, dim=0)
    if many < 2 or len(given) != many * rows or any(not t.dim() or len(t) != rows for t in op.outputs):
        return None
    if op.name in ("chunk", "split", "tensor_split") and len(op.outputs) == many:
        return "halved", lambda op: tuple(op.inputs[0][part::many] for part in range(many))
    index = op.args[1] if op.name == "__getitem__" and len(op.args) > 1 else None
    first = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(first, slice):
        return None
    start, stop, step = first.indices(many * rows)
    if step == many and start < many:
        kind, other = "strided", slice(start * rows, (start + 1) * rows)
    elif step == 1 and start % rows == 0 and stop - start == rows:
        kind, other = "halved", slice(start // rows, None, many)
    else:
        return None
    return kind, lambda op: op.args[0][(other, *index[1:]) if isinstance(index, tuple) else other]


def crossings(seen: RowTape) -> Iterator[Crossing]:
    """The calls of the step so far that make a table of all pairs, while their tensors are there."""
    n = seen.rows
    makers = {id(t): op for op in seen.ops for t in op.outputs}
    at_number = {call.number: at for at, call in enumerate(seen.tape.calls)}
    tables = [(op, sides) for op in seen.ops if (sides := _sides(op, n)) is not None and op.number in at_number]
    for op, (column, row) in tables:
        made_by = seen.made_by(column), seen.made_by(row)
        if (column.requires_grad and row.requires_grad) or not _made_as_column(column, makers, n):
            continue
        moved = (_rolled(tables, side) for side in (column, row) if not torch.equal(side, side.roll(1, 0)))
        if made_by[0] is not None and made_by[1] is not None and (rolled := tuple(moved)):
            yield Crossing(at_number[op.number], (made_by[0], made_by[1]), rolled)


def summed_only(tape: Tape, at: int, rows: int) -> bool:
    """Whether what reaches the root of this table is its sum, or sums of products with rows or columns."""
    reached = leads_to(tape, tape.roots)
    tables, ends = {at}, 0
    for number, call in enumerate(tape.calls if at in reached else ()):
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
    each was put in by hand, all pairs are intended."""
    todo, known = [column], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        op = makers.get(id(one))
        before = [t for t in op.inputs if t.shape == (n, 1)] if op is not None else []
        flat = op is not None and any(t.shape == (n,) for t in op.inputs)
        put_in = op is not None and flat and op.name in RESHAPES | {"unsqueeze", "__getitem__", "expand", "atleast_2d"}
        if not before and not put_in:
            return True
        todo.extend(before)
    return False


def _rolled(
    tables: Sequence[tuple[Op, tuple[torch.Tensor, torch.Tensor]]], side: torch.Tensor
) -> dict[int, Replacement]:
    """All tables that this side is in, with its entries moved on by one."""

    def of(place: int) -> Replacement:
        return lambda op: op.func(*(a.roll(1, 0) if i == place else a for i, a in enumerate(op.args)), **op.kwargs)

    with_side = (op for op, sides in tables if any(side is one for one in sides))
    return {op.number: of(next(i for i, a in enumerate(op.args) if a is side)) for op in with_side}
