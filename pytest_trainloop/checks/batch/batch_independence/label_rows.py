"""Whether outputs are compared with the labels of their own rows.

Both are followed to the batch: a target through views, casts and picks back to the rows of the tensor that it was
taken from; an output by its gradient, exactly 0 at all rows but those that it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_trainloop import nested
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import BINARY_LOSSES, CLASS_LOSSES, DISTANCE_LOSSES
from pytest_trainloop.tracing.arguments import bound_arguments
from pytest_trainloop.tracing.forward_pass import Entry, Pass, slopes, weighed
from pytest_trainloop.tracing.provenance_queries import same_shaped

if TYPE_CHECKING:
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.provenance import Node

ASKED = 8
"""Outputs of a loss call that are followed."""

FARTHEST = 64
"""Operations that are gone back over."""

_ALIKE = DISTANCE_LOSSES | BINARY_LOSSES


@dataclass(slots=True)
class Partners:
    """The pass behind it. ``pairs`` are rows of the batch, that of a target and the one that its output depends on."""

    evidence: Evidence
    pairs: list[tuple[int, int]] = field(default_factory=list)
    loss: str = ""
    where: str = ""
    rows: int = 0

    def strangers(self) -> list[tuple[int, int]]:
        """Pairs of different rows, if labels and outputs are out of order. Where all differ by the same number of rows,
        they are moved against each other on purpose (the next row, another's negative)."""
        for opens in (True, False):
            seen = Pass(at_loss=self._look, opens=opens, draws=frozenset({"randperm"}))
            record = self.evidence.rerun(
                seen.plan(self.evidence.plan(), before_item=lambda n, item, seen=seen: self._handed(seen, n, item))
            )
            if self.pairs or record.raised is None:
                break
        apart = [(label, row) for label, row in self.pairs if label != row]
        by = {(label - row) % max(self.rows, 1) for label, row in self.pairs}
        return apart if len(by) > 1 else []

    def _handed(self, seen: Pass, number: int, item: Any) -> None:
        """Number the rows of the first batch's tensors, unless another axis is as long."""
        if number:
            return
        self.rows = nested.rows(item)
        for tensor in nested.tensors(item):
            plain = tensor.layout is torch.strided and not tensor.is_nested
            if plain and tensor.dim() and list(tensor.shape).count(self.rows) == 1 and len(tensor) == self.rows:
                seen.lineage.adopt(tensor)

    def _look(self, seen: Pass, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.pairs or name not in CLASS_LOSSES | _ALIKE:
            return
        given = bound_arguments(getattr(F, name), args, kwargs)
        scores, target = given.get("input"), given.get("target")
        if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor) or not scores.requires_grad:
            return
        labels = _row_numbers(seen.lineage.of(target))
        each = _one_by_one(name, scores, target)
        if labels is None or each is None or labels.shape != target.shape:
            return
        kept = (target != given.get("ignore_index", -100)).flatten() if name in CLASS_LOSSES else None
        known = [(e, rows) for e in seen.entries if (rows := _entered(e)) is not None]
        try:
            self._follow(seen, each, labels.flatten(), kept, known)
        except RuntimeError:
            self.pairs.clear()  # a re-entrant checkpoint refuses it
        if self.pairs:
            self.loss, self.where = name, str(here(4)[0])

    def _follow(
        self,
        seen: Pass,
        each: torch.Tensor,
        labels: torch.Tensor,
        kept: torch.Tensor | None,
        known: list[tuple[Entry, torch.Tensor]],
    ) -> None:
        asked = range(len(labels)) if kept is None else kept.nonzero().flatten().tolist()
        unknown = [e for e in seen.entries if all(e is not k for k, _ in known)]
        for at in list(asked)[:: max(1, len(asked) // ASKED)]:
            total = weighed(each[at])
            if any(s is not None and bool((s != 0).any()) for s in slopes(total, [e.leaf for e in unknown])):
                continue
            felt: set[int] = set()
            for (_, rows), slope in zip(known, slopes(total, [e.leaf for e, _ in known]), strict=True):
                if slope is not None:
                    there = (slope != 0).reshape(*rows.shape, -1).any(-1)
                    felt |= set(rows[there.cpu()].tolist())
            if len(felt) == 1:
                self.pairs.append((int(labels[at]), felt.pop()))


def _one_by_one(name: str, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """The scores that belong to each target, in the order of the flattened targets."""
    if name in CLASS_LOSSES:
        if target.is_floating_point() or scores.dim() != target.dim() + 1 or scores.dim() < 2:
            return None
        return scores.movedim(1, -1).reshape(-1, scores.shape[1])
    return scores.reshape(-1, 1) if scores.shape == target.shape else None


def _entered(entry: Entry) -> torch.Tensor | None:
    rows = _row_numbers(entry.source)
    return rows if rows is not None and entry.leaf.shape[: rows.dim()] == rows.shape else None


def _row_numbers(node: Node | None) -> torch.Tensor | None:
    """The number of the row in the batch that each entry was taken from; None where it was not only moved."""
    moves: list[Node] = []
    for _ in range(FARTHEST):
        if node is None or node.op == "batch":
            break
        if node.replay is not None:
            moves.append(node)
        node = same_shaped(node)
    if node is None or node.op != "batch":
        return None
    rows = torch.arange(node.shape[0]).reshape(-1, *[1] * (len(node.shape) - 1)).expand(node.shape)
    for move in reversed(moves):
        if move.replay is None or rows.shape != move.parents[0].shape:
            return None
        try:
            rows = move.replay(rows)
        except (RuntimeError, TypeError):
            return None
    return rows
