"""Whether an output of the model changes with the mask of another row than its own.

No gradient goes through a mask or a length. So the pass over a few rows in evaluation mode is made twice: as it is, and
with the mask of one row in place of another row's. Only the outputs of that one row may change.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.batch_independence.other_values import OtherOrder, changes, has_rows
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.forward_pass import ForwardPass, Op, Replacement, axis_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.checks.batch.batch_independence.few_rows import FewRows
    from pytest_trainloop.runs.evidence import Evidence

ROUNDING = 1e3
"""Times the precision of a dtype: other rows of a kernel may be grouped in another way, each sum then rounds otherwise
(docs/how-it-decides.md#rows-that-meet-outside-of-the-model)."""


Pass = tuple[list[torch.Tensor], list[tuple["Op", list[torch.Tensor]]]]
"""What the models return for a batch, and each operation with its results."""


@dataclass(slots=True)
class OtherMask:
    """An output ``row`` that changes with the mask at ``path`` of row ``other``, by ``op``: ``by`` is the share of the
    largest output."""

    row: int
    other: int
    path: nested.Path
    by: float
    op: Op | None
    counted: bool = False
    """Whether a count of the whole batch is the reason: with each row's own count in its place no row changes."""


def by_other_mask(evidence: Evidence, few: FewRows) -> OtherMask | None:
    """The first output row that does; None where none does, or the two passes cannot be compared."""
    masks = {p: t for p, t in nested.paths(few.batch) if _is_mask(p, t, few)}
    changed = next(_other_rows(masks, few), None)
    if changed is None:
        return None
    path, other, order = changed
    batches = few.batch, order.apply(few.batch, few.rows, few.axis)
    base, moved = (pass_over(evidence, batch) for batch in batches)
    met = next(_rows_met(base, moved, other, few.rows), None)
    if met is None:
        return None
    found = OtherMask(met[0], other, path, met[1], _first(base, moved, other, few.rows))
    counts = {} if found.op is None else _counts(base, moved, found.op.outputs[0].dim(), few.rows)
    if counts and not _scaled(base, moved, other, few.rows):
        one, two = (pass_over(evidence, batch, counts) for batch in batches)
        same = [t.shape for t in one[0]] == [t.shape for t in base[0]]
        found.counted = same and next(_rows_met(one, two, other, few.rows), None) is None
    return found


def _rows_met(base: Pass, moved: Pass, other: int, rows: int) -> Iterator[tuple[int, float]]:
    """The output rows that differ and have no other mask, each by what share of the largest entry."""
    for one, two in zip(base[0], moved[0], strict=False):
        yield from ((row, by) for row, by in rows_that_differ(one, two, rows) if row != other)


def _scaled(base: Pass, moved: Pass, other: int, rows: int) -> bool:
    """Whether all other rows are scaled by one factor: losses of the rows, over the tokens of the batch."""
    for one, two in zip(base[0], moved[0], strict=False):
        axis = axis_of(one, rows)
        if axis is not None and one.shape == two.shape:
            mine, theirs = (t.movedim(axis, 0).reshape(rows, -1).double() for t in (one, two))
            kept = [row for row in range(rows) if row != other]
            factor = theirs[kept].norm() / mine[kept].norm()
            bound = ROUNDING * torch.finfo(one.dtype).eps
            if bool(((theirs[kept] - factor * mine[kept]).norm() > bound * theirs[kept].norm()).any()):
                return False
    return True


def _counts(base: Pass, moved: Pass, axes: int, rows: int) -> dict[int, Replacement]:
    """What makes a count of each row, with this number of axes, of the counts over the whole batch."""

    def of_each_row(op: Op) -> Any:
        given = op.inputs[0]
        by_rows = given.movedim(axis_of(given, rows) or 0, 0).flatten(1)
        return getattr(by_rows, op.name)(1).view(-1, *[1] * (axes - 1))

    return {
        one.number: of_each_row
        for (one, mine), (_, theirs) in zip(base[1], moved[1], strict=False)
        if one.name in ("sum", "mean", "count_nonzero") and len(mine) == 1
        if mine[0].numel() == 1 and not torch.equal(mine[0], theirs[0]) and axis_of(one.inputs[0], rows) is not None
    }


def _is_mask(path: nested.Path, tensor: torch.Tensor, few: FewRows) -> bool:
    return has_rows(tensor, few.rows, few.axis) and not changes(path, tensor, few.axis)


def _other_rows(masks: dict[nested.Path, torch.Tensor], few: FewRows) -> Iterator[tuple[nested.Path, int, OtherOrder]]:
    """A mask, a row of it, and the batch in which all masks have there what another row has."""
    for (path, mask), row, other in itertools.product(masks.items(), range(few.rows), range(few.rows)):
        if not torch.equal(mask.select(few.axis, row), mask.select(few.axis, other)):
            order = tuple(other if at == row else at for at in range(few.rows))
            yield path, row, OtherOrder(order, frozenset(masks))


def pass_over(evidence: Evidence, batch: Any, replacements: Mapping[int, Replacement] = MappingProxyType({})) -> Pass:
    outputs: list[torch.Tensor] = []
    ops: list[tuple[Op, list[torch.Tensor]]] = []

    def keep(seen: ForwardPass, output: Any) -> None:
        outputs.extend(t.detach().clone() for t in nested.tensors(output) if t.is_floating_point())
        ops.extend((op, [t.detach() for t in op.outputs]) for op in seen.ops[len(ops) :])

    seen = ForwardPass(at_end=keep, eval_mode=True, open_inputs=False, replacements=replacements)
    evidence.rerun(seen.plan(replace(evidence.plan(), stream=lambda _loop: itertools.repeat(batch))))
    return outputs, ops


def rows_that_differ(one: torch.Tensor, two: torch.Tensor, rows: int) -> Iterator[tuple[int, float]]:
    """The rows that differ, each by what share of the largest entry."""
    axis = axis_of(one, rows)
    if axis is None or one.shape != two.shape or not bool((one.isfinite() & two.isfinite()).all()):
        return
    size = float(torch.maximum(one.abs().max(), two.abs().max())) if one.numel() else 0.0
    difference = (one - two).abs().movedim(axis, 0).reshape(rows, -1)
    bound = ROUNDING * torch.finfo(one.dtype).eps
    for row, by in enumerate(difference.max(1).values.tolist() if difference.numel() else ()):
        if by > bound * size:
            yield row, by / size


def _first(base: Pass, moved: Pass, other: int, rows: int) -> Op | None:
    """The first operation of the pass of whose result another row changes; None where the passes go other ways."""
    for (one, mine), (two, theirs) in zip(base[1], moved[1], strict=False):
        if one.name != two.name:
            return None
        for a, b in zip(mine, theirs, strict=False):
            if a.is_floating_point() and any(row != other for row, _ in rows_that_differ(a, b, rows)):
                return one
    return None
