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
from pytest_trainloop.tracing.forward_pass import Op, alone, axis_of, slopes, weighed
from pytest_trainloop.tracing.operation_fixes import normalising
from pytest_trainloop.tracing.provenance_queries import ancestors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.tracing.forward_pass import Pass


@dataclass(slots=True)
class Judged:
    """What passes showed: how many of a model's outputs have rows, whether ``meets`` some pair of different rows (the
    first, output and input), and which operations let rows meet, where it is to ``look_closer``; where none meet,
    ``scaled_by`` is what scales rows by a statistic over them (``behind_weights``: rows of activations, not the data's
    own). ``refused`` is torch's own word where no gradient could
    be taken."""

    rows: int
    outputs: int = 0
    entries: int = 0
    pairwise: int = 0
    meets: tuple[int, int] | None = None
    mixing: list[Op] = field(default_factory=list)
    refused: str = ""
    not_a_number: bool = False
    look_closer: bool = False
    scaled_by: Op | None = None
    behind_weights: bool = False

    @property
    def apart(self) -> bool:
        """Whether there were outputs to judge, and no rows met."""
        return self.outputs > 0 and self.meets is None and not self.refused and not self.not_a_number

    def look(self, seen: Pass, output: Any) -> None:
        """Judge what one outermost call of a model gave."""
        given = [t for t in nested.tensors(output) if t.requires_grad and t.is_floating_point()]
        judged = [(t, axis) for t in given if (axis := axis_of(t, self.rows)) is not None]
        self.pairwise += sum(1 for t in given if list(t.shape[:2]).count(self.rows) > 1)
        entries = [(e.leaf, axis) for e in seen.entries if (axis := axis_of(e.leaf, self.rows)) is not None]
        if not judged or not entries or self.meets is not None:
            return
        self.outputs += len(judged)
        self.entries += len(entries)
        try:
            for row in sorted({0, self.rows // 2, self.rows - 1}):
                self._row(judged, entries, row)
            if self.look_closer and self.meets is not None:
                self.mixing = [op for op in seen.ops if _lets_meet(op, self.rows)]
            elif self.look_closer:
                self.scaled_by = normalising(seen.ops, self.rows, lambda t: _arrives([t for t, _ in judged], t))
                if self.scaled_by is not None:
                    made_of = ancestors(seen.lineage.of(self.scaled_by.gave[0]))
                    self.behind_weights = any(node.parameter for node in made_of)
        except RuntimeError as error:  # a re-entrant checkpoint refuses it, and some custom functions do
            self.refused = str(error).partition("\n")[0]

    def _row(
        self, outputs: Sequence[tuple[torch.Tensor, int]], entries: Sequence[tuple[torch.Tensor, int]], row: int
    ) -> None:
        total = torch.stack([weighed(t.select(axis, row)) for t, axis in outputs]).sum()
        found = slopes(total, [leaf for leaf, _ in entries])
        for (_, axis), slope in zip(entries, found, strict=True):
            if slope is None:
                continue
            felt = slope.movedim(axis, 0).flatten(1)
            if bool(felt.isnan().any()):
                self.not_a_number = True
                continue
            others = [j for j in (felt != 0).any(1).nonzero().flatten().tolist() if j != row]
            if others and self.meets is None:
                self.meets = (row, others[0])


def _arrives(outputs: Sequence[torch.Tensor], at: torch.Tensor) -> bool:
    """Whether a gradient of the outputs comes in at a tensor."""
    (slope,) = slopes(torch.stack([weighed(t) for t in outputs]).sum(), [at]) if at.requires_grad else (None,)
    return slope is not None and bool((slope != 0).any())


def _lets_meet(op: Op, rows: int) -> bool:
    """Whether one row of what the operation gave depends on another row of what it was given."""
    if not any(t.requires_grad and axis_of(t, rows) is not None for t in op.gave):
        return False
    given, gave = alone(op)
    given = [t for t in given if axis_of(t, rows) is not None]
    for out in gave:
        to = axis_of(out, rows) if out.requires_grad else None
        for row in (0, rows - 1) if to is not None else ():
            for t, slope in zip(given, slopes(weighed(out.select(to or 0, row)), given), strict=True):
                if slope is not None:
                    felt = (slope.movedim(axis_of(t, rows) or 0, 0).flatten(1) != 0).any(1)
                    if bool(felt[torch.arange(rows, device=felt.device) != row].any()):
                        return True
    return False
