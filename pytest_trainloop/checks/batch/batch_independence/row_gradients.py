"""Whether an output of the model depends on other rows of the batch than its own, by exact gradients.

See docs/how-it-decides.md#rows-and-positions-by-exact-gradients.

In evaluation mode the gradient of output row i with respect to input row j is exactly 0 for i other than j: products
with zero rows give zeros, whatever the order of summation. There is no tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.gradients.reached import Reached
from pytest_trainloop.tracing.forward_pass import Op, axis_of, grads, recomputed, weighted_sum
from pytest_trainloop.tracing.operation_fixes import normalising
from pytest_trainloop.tracing.provenance_queries import ancestors
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.tracing.forward_pass import ForwardPass


@dataclass(slots=True)
class RowGradients:
    """What the gradients of single output rows show."""

    rows: int
    look_closer: bool = False
    """Whether operations are looked at as well."""
    outputs: int = 0
    """Outputs of a model that have one axis of rows."""
    pairwise: int = 0
    """Outputs that have two."""
    interacting: tuple[int, int] | None = None
    """The first output row, and another input row, with a gradient between them."""
    mixing: list[Op] = field(default_factory=list)
    """The operations that let rows interact."""
    reached: Reached = field(default_factory=Reached)
    """What every output row depends on, of the first call in which rows interact; with a closer look only."""
    refused: str = ""
    """Torch's message where no gradient could be taken."""
    has_nan: bool = False
    scaled_by: Op | None = None
    """What scales rows by a statistic over them, where no rows interact."""
    behind_weights: bool = False
    """Whether that scales activations, and not the data."""

    @property
    def apart(self) -> bool:
        """Whether there were outputs to judge, and no rows interact."""
        return self.outputs > 0 and self.interacting is None and not self.refused and not self.has_nan

    def look(self, seen: ForwardPass, output: Any) -> None:
        """Judge what one outermost call of a model returned."""
        given = [t for t in nested.tensors(output) if t.requires_grad and t.is_floating_point()]
        judged = [(t, axis) for t in given if (axis := axis_of(t, self.rows)) is not None]
        self.pairwise += sum(1 for t in given if list(t.shape[:2]).count(self.rows) > 1)
        entries = [(e.leaf, axis) for e in seen.data_inputs if (axis := axis_of(e.leaf, self.rows)) is not None]
        if not judged or not entries or self.interacting is not None:
            return
        self.outputs += len(judged)
        try:
            for row in sorted({0, self.rows // 2, self.rows - 1}):
                self._row(judged, entries, row)
            if self.look_closer and self.interacting is not None:
                self.mixing = [op for op in seen.ops if _mixes_rows(op, self.rows)]
                self.reached.note(self.rows, lambda row: _along_rows(judged, entries, row))
            elif self.look_closer:
                self.scaled_by = normalising(seen.ops, self.rows, lambda t: _reaches([t for t, _ in judged], t))
                if self.scaled_by is not None:
                    made_of = ancestors(seen.lineage.of(self.scaled_by.outputs[0]))
                    self.behind_weights = any(node.parameter for node in made_of)
        except RuntimeError as error:  # a re-entrant checkpoint refuses it, and some custom functions do
            reraise_raised(error)
            self.refused = str(error).partition("\n")[0]

    def _row(
        self, outputs: Sequence[tuple[torch.Tensor, int]], entries: Sequence[tuple[torch.Tensor, int]], row: int
    ) -> None:
        for by_row in _along_rows(outputs, entries, row):
            nonzero = by_row.reshape(len(by_row), -1)  # an input may have no other axis than its rows
            if bool(nonzero.isnan().any()):
                self.has_nan = True
                continue
            others = [j for j in (nonzero != 0).any(1).nonzero().flatten().tolist() if j != row]
            if others and self.interacting is None:
                self.interacting = (row, others[0])


def _along_rows(
    outputs: Sequence[tuple[torch.Tensor, int]], entries: Sequence[tuple[torch.Tensor, int]], row: int
) -> Iterator[torch.Tensor]:
    """The gradients of one output row with respect to what entered, their rows first."""
    total = _total([weighted_sum(t.select(axis, row)) for t, axis in outputs])
    found = grads(total, [leaf for leaf, _ in entries])
    return (g.movedim(axis, 0) for (_, axis), g in zip(entries, found, strict=True) if g is not None)


def _total(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum; outputs may lie on several devices."""
    return torch.stack([one.to(sums[0].device) for one in sums]).sum()


def _reaches(outputs: Sequence[torch.Tensor], at: torch.Tensor) -> bool:
    """Whether a gradient of the outputs reaches a tensor."""
    (gradient,) = grads(_total([weighted_sum(t) for t in outputs]), [at]) if at.requires_grad else (None,)
    return gradient is not None and bool((gradient != 0).any())


def _mixes_rows(op: Op, rows: int) -> bool:
    """Whether a row of the operation's outputs depends on another row of its inputs."""
    if not any(t.requires_grad and axis_of(t, rows) is not None for t in op.outputs):
        return False
    inputs, outputs = recomputed(op)
    inputs = [t for t in inputs if axis_of(t, rows) is not None]
    for out in outputs:
        to = axis_of(out, rows) if out.requires_grad else None
        for row in (0, rows - 1) if to is not None else ():
            for t, gradient in zip(inputs, grads(weighted_sum(out.select(to or 0, row)), inputs), strict=True):
                if gradient is not None:
                    nonzero = (gradient.movedim(axis_of(t, rows) or 0, 0).reshape(rows, -1) != 0).any(1)
                    if bool(nonzero[torch.arange(rows, device=nonzero.device) != row].any()):
                        return True
    return False
