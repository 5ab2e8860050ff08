"""A row of length one, alone and cut to its length, as a collate function that pads to the longest row gives it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop import nested
from pytest_trainloop.compositions.composition import Composition

if TYPE_CHECKING:
    import torch

    from pytest_trainloop.checks.batch.edge_batches.runs import Edges, Outcome


@dataclass(frozen=True, slots=True)
class ShortRow:
    """A row of length one, and the run over it."""

    outcome: Outcome
    row: int


def shortest(edges: Edges) -> ShortRow | None:
    """None where no row has length one, where all batches have one width, or where the loop does not go through on
    another row that is cut to its length either."""
    lengths, full = edges.lengths, edges.padded_to
    longer = sorted((n, row) for row, n in enumerate(lengths) if 1 < n < full)
    if not edges.widths_differ or 1 not in lengths or max(lengths) < full or not longer or not edges.one_row.ok:
        return None
    n, other = longer[0]
    if not edges.among_full(f"row {other} alone, cut to {n}", _cut(edges, other, n)).ok:
        return None
    row = lengths.index(1)
    return ShortRow(edges.among_full(f"row {row} alone, of length 1", _cut(edges, row, 1)), row)


def _cut(edges: Edges, row: int, length: int) -> Composition:
    return Composition((row,), change=CutTo(length, edges.padded_to, edges.count))


@dataclass(frozen=True, slots=True)
class CutTo:
    """Everything that is as long as rows are padded to, or one shorter or longer than that, cut to a length."""

    length: int
    padded_to: int
    rows: int

    def __str__(self) -> str:
        return f"all cut to {self.length} position{'' if self.length == 1 else 's'}"

    def apply(self, batch: Any) -> Any:
        memo = {id(t): cut for t in nested.tensors(batch) if (cut := self._shortened(t)) is not None}
        return copy.deepcopy(batch, memo)

    def _shortened(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if (
            tensor.is_nested
            or tensor.dim() < 2
            or tensor.shape[0] != self.rows
            or abs(tensor.shape[1] - self.padded_to) > 1
        ):
            return None
        left = max(1, self.length + tensor.shape[1] - self.padded_to)
        cut = tensor.detach()[:, :left]
        if cut.dim() > 2 and cut.shape[2] == self.padded_to and not cut.is_floating_point():
            cut = cut[:, :, :left]  # a mask over pairs of positions
        return cut.clone()
