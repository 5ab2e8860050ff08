"""Whether an output of the model changes with the place of its row in the batch, by a table of positions.

A table (positions, 1, features) that is cut to ``x.size(0)`` gives each row of a batch-first input one position. No
gradient joins rows there. So the pass is made with the rows in reverse order, where the outputs must come in reverse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.batch.batch_independence.other_masks import pass_over, rows_that_differ
from pytest_trainloop.checks.batch.batch_independence.other_values import OtherOrder
from pytest_trainloop.instruments.tracing.forward_pass import axis_of
from pytest_trainloop.recording.torch_names import ADDITIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_trainloop.checks.batch.batch_independence.few_rows import FewRows
    from pytest_trainloop.instruments.tracing.forward_pass import Op, Replacement
    from pytest_trainloop.runs.evidence import Evidence


def by_place(evidence: Evidence, few: FewRows) -> tuple[Op, int, int] | None:
    """The operation that adds a table cut to the rows, the positions of the table and of the input; None where no
    output changes with the place of its row, or where the same table along the positions does not help."""
    if few.axis:
        return None
    order = OtherOrder(tuple(reversed(range(few.rows))))
    batches = few.batch, order.apply(few.batch, few.rows, few.axis)
    base, moved = (pass_over(evidence, batch) for batch in batches)
    found = cut_to_rows([op for op, _ in base[1]], few.rows)
    if found is None or not _moved(base[0], moved[0], few.rows):
        return None
    add, table, steps = found
    fixes = {add.number: _along_positions(table.detach())}
    one, two = (pass_over(evidence, batch, fixes) for batch in batches)
    same = one[0] and [t.shape for t in one[0]] == [t.shape for t in base[0]]
    return (add, len(table), steps) if same and not _moved(one[0], two[0], few.rows) else None


def _moved(base: Sequence[torch.Tensor], moved: Sequence[torch.Tensor], rows: int) -> bool:
    """Whether some row is another one at its other place."""
    pairs = [(a, b.flip(axis)) for a, b in zip(base, moved, strict=False) if (axis := axis_of(b, rows)) is not None]
    return any(True for a, b in pairs for _ in rows_that_differ(a, b, rows))


def cut_to_rows(ops: Sequence[Op], rows: int) -> tuple[Op, torch.Tensor, int] | None:
    """The sum of an input (rows, positions, features) and the first entries of a longer table, as many as there are
    rows: the sum, the table, and the positions of the input."""
    cut: dict[int, torch.Tensor] = {}
    for op in ops:
        inputs, made = op.inputs, op.outputs
        if len(made) != 1 or not inputs or made[0].dim() == 0 or len(made[0]) != rows:
            continue
        tables = [cut[id(t)] for t in inputs if id(t) in cut]
        whole = next((t for t in inputs if t.dim() == 3 and t.shape == made[0].shape and id(t) not in cut), None)
        if tables and whole is not None and op.name in ADDITIONS and len(tables[0]) >= whole.size(1):
            return op, tables[0], whole.size(1)
        if made[0].numel() != rows * made[0].shape[-1]:
            continue
        longer = len(inputs) == 1 and inputs[0].dim() in (2, 3) and len(inputs[0]) > rows
        if op.name == "__getitem__" and longer and inputs[0].shape[-1] == made[0].shape[-1]:
            cut[id(made[0])] = inputs[0]
        elif tables:  # unsqueezed, or moved to another dtype
            cut[id(made[0])] = tables[0]
    return None


def _along_positions(table: torch.Tensor) -> Replacement:
    def change(op: Op) -> Any:
        whole = next(t for t in op.inputs if t.dim() == 3 and t.size(1) != 1)
        steps = table.reshape(len(table), -1)[: whole.size(1)]
        return whole + steps.to(whole)

    return change
