"""Whether outputs are compared with the labels of their own rows.

Both are followed to the batch: a target through views, casts and picks back to the rows of the tensor that it was
taken from; an output by its gradient, which is exactly 0 at all rows but those that it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from pytest_trainloop import nested
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import BINARY_LOSSES, CLASS_LOSSES, DISTANCE_LOSSES
from pytest_trainloop.tracing.arguments import bound_arguments
from pytest_trainloop.tracing.forward_pass import DataInput, ForwardPass, grads, weighted_sum
from pytest_trainloop.tracing.provenance_queries import ancestors, same_shaped
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.provenance import Node

ASKED = 8
"""Outputs of a loss call that are followed to the batch, at most."""

FARTHEST = 64
"""Operations that a target is followed back through."""

_ELEMENTWISE = DISTANCE_LOSSES | BINARY_LOSSES


@dataclass(slots=True)
class LabelRows:
    """Which rows of the batch meet at the first loss call that could be followed."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    """The row of a target, and the one that the output compared with it depends on."""
    loss: str = ""
    where: str = ""
    rows: int = 0
    reordered: tuple[str, ...] = ()
    """Lines between the batch and the outputs that put rows into another order by an index."""

    @classmethod
    def of(cls, evidence: Evidence) -> LabelRows:
        found = cls()
        for open_inputs in (True, False):
            seen = ForwardPass(at_loss=found._look, open_inputs=open_inputs, draws=frozenset({"randperm"}))
            plan = seen.plan(evidence.plan(), before_item=lambda n, item, seen=seen: found._number(seen, n, item))
            record = evidence.rerun(plan)
            if found.pairs or record.raised is None:
                return found
        evidence.require_returned(plan, record)
        return found

    @property
    def mismatched(self) -> list[tuple[int, int]]:
        """The pairs of different rows. None where all differ by one number of rows: outputs and targets are then
        shifted against each other on purpose (the next row, another row's negative)."""
        shifts = {(label - row) % max(self.rows, 1) for label, row in self.pairs}
        return [(label, row) for label, row in self.pairs if label != row] if len(shifts) > 1 else []

    @property
    def order(self) -> Literal["permuted", "swapped", "unknown"]:
        """How rows meet: "permuted" where each row's label meets the output of one row, and no two that of the same;
        "swapped", as by axes in another order, where the labels of a row meet outputs of several."""
        labels, rows = {label for label, _ in self.pairs}, {row for _, row in self.pairs}
        if len(set(self.pairs)) > len(labels):
            return "swapped"
        return "permuted" if len(labels) == len(rows) else "unknown"

    def _number(self, seen: ForwardPass, number: int, item: Any) -> None:
        """Number the rows of the first batch's tensors, unless another axis is as long."""
        if number:
            return
        self.rows = nested.rows(item)
        for tensor in nested.tensors(item):
            plain = tensor.layout is torch.strided and not tensor.is_nested
            if plain and tensor.dim() and list(tensor.shape).count(self.rows) == 1 and len(tensor) == self.rows:
                seen.lineage.adopt(tensor)

    def _look(self, seen: ForwardPass, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.pairs or name not in CLASS_LOSSES | _ELEMENTWISE:
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
        known = [(e, rows) for e in seen.data_inputs if (rows := _rows_of(e)) is not None]
        try:
            self._follow(seen, each, labels.flatten(), kept, known)
        except RuntimeError as error:
            reraise_raised(error)
            self.pairs.clear()  # a re-entrant checkpoint refuses it
        if self.pairs:
            self.loss, self.where = name, str(here()[0])
            sources = (seen.lineage.of(scores), *(e.source for e in seen.data_inputs if e.source is not None))
            self.reordered = tuple(dict.fromkeys(_reorderings(sources, self.rows)))

    def _follow(
        self,
        seen: ForwardPass,
        each: torch.Tensor,
        labels: torch.Tensor,
        kept: torch.Tensor | None,
        known: list[tuple[DataInput, torch.Tensor]],
    ) -> None:
        asked = range(len(labels)) if kept is None else kept.nonzero().flatten().tolist()
        unknown = [e for e in seen.data_inputs if all(e is not k for k, _ in known)]
        apart = max(2, 2 * len(asked) // ASKED)
        for at in [at for n, at in enumerate(asked) if n % apart < 2]:  # neighbours: of one row, if it has several
            total = weighted_sum(each[at])
            if any(s is not None and bool((s != 0).any()) for s in grads(total, [e.leaf for e in unknown])):
                continue
            reached: set[int] = set()
            for (_, rows), gradient in zip(known, grads(total, [e.leaf for e, _ in known]), strict=True):
                if gradient is not None:
                    there = (gradient != 0).reshape(*rows.shape, -1).any(-1)
                    reached |= set(rows[there.cpu()].tolist())
            if len(reached) == 1:
                self.pairs.append((int(labels[at]), reached.pop()))


def _one_by_one(name: str, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """The scores that belong to each target, in the order of the flattened targets."""
    if name in CLASS_LOSSES:
        if target.is_floating_point() or scores.dim() != target.dim() + 1 or scores.dim() < 2:
            return None
        return scores.movedim(1, -1).reshape(-1, scores.shape[1])
    return scores.reshape(-1, 1) if scores.shape == target.shape else None


def _reorderings(sources: Iterable[Node], rows: int) -> Iterator[str]:
    """The lines of indices that put as many rows into another order, each one whole."""
    for node in (n for source in sources for n in ancestors(source)):
        if not node.picks or node.replay is None or node.parents[0].shape[:1] != (rows,) or node.shape[:1] != (rows,):
            continue
        shape = node.parents[0].shape
        try:
            moved = node.replay(torch.arange(rows).reshape(-1, *[1] * (len(shape) - 1)).expand(shape))
        except (RuntimeError, TypeError, IndexError) as error:
            reraise_raised(error)
            continue
        order = moved.reshape(rows, -1)
        if bool((order == order[:, :1]).all()) and sorted(first := order[:, 0].tolist()) == list(range(rows)) != first:
            yield str(node.place)


def _rows_of(entry: DataInput) -> torch.Tensor | None:
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
        except (RuntimeError, TypeError) as error:
            reraise_raised(error)
            return None
    return rows
