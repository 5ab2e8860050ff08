"""Rows in which nothing counts, rows of length one, and padding that the table of ids does not have."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.batch.edge_batches.causes import found
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from pytest_trainloop.checks.batch.edge_batches.runs import Edges, Outcome
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import Place


def nan_when_all_ignored(edges: Edges) -> Iterator[Finding]:
    """A row in which nothing counts, after which weights are NaN; a row in which something does leaves them finite."""
    if not edges.empty_rows or not edges.one_row.ok:
        return
    (row, entries), several = next(iter(edges.empty_rows.items())), 4 * len(edges.empty_rows) >= edges.count
    comes = edges.ending.leaves_any or (edges.windows is not None and several)
    windows = None if edges.ending.leaves_any else edges.windows  # the second of two micro-batches
    alone = "alone" if windows is None else "as one of two micro-batches"
    counting = f"0 of its {entries} entries count" if entries > 1 else "it has no label"
    empty = edges.among_full(f"row {row} {alone}: {counting}", Composition((row,)), windows)
    if empty.nonfinite or (empty.nonfinite_loss and comes):
        level = "fault" if comes and empty.nonfinite else "advice"
        facts = {"empty": len(edges.empty_rows), "rows": edges.count, "level": level}
        yield _nan("nan_when_all_ignored", empty, facts)


def nan_at_length_one(edges: Edges) -> Iterator[Finding]:
    """A row of length one, cut to it, as a collate function that pads to the longest row gives it."""
    lengths, full = edges.lengths, edges.padded_to
    longer = sorted((n, row) for row, n in enumerate(lengths) if 1 < n < full)
    if not edges.widths_differ or 1 not in lengths or max(lengths) < full or not longer or not edges.one_row.ok:
        return
    (length, other), row = longer[0], lengths.index(1)
    cut = Composition((other,), change=CutTo(length, full, edges.count))
    if edges.among_full(f"row {other} alone, cut to {length}", cut).ok:
        cut = Composition((row,), change=CutTo(1, full, edges.count))
        short = edges.among_full(f"row {row} alone, of length 1", cut)
        if short.nonfinite:
            facts = {"row": row, "level": "fault" if edges.ending.leaves_any else "advice"}
            yield _nan("nan_at_length_one", short, facts)


def _nan(cause: str, outcome: Outcome, facts: dict[str, Any]) -> Finding:
    """A row that makes NaN where another one does not; the operation at which it begins is the culprit."""
    op = outcome.origin.op if outcome.origin else "step"
    facts |= {"op": op, "weights": len(outcome.nonfinite), "smallest": outcome.words}
    composition = outcome.composition.as_data() if outcome.composition else None
    return found(cause, outcome.where, (op,), composition=composition, **facts)


@dataclass(frozen=True, slots=True)
class CutTo:
    """Everything that is as long as rows are padded to, or one shorter or longer than that, cut to a length."""

    length: int
    padded_to: int
    rows: int

    def __str__(self) -> str:
        return f"all cut to {self.length} position{'' if self.length == 1 else 's'}"

    def apply(self, batch: Any) -> Any:
        memo: dict[int, Any] = {}
        for tensor in nested.tensors(batch):
            if not tensor.is_nested and tensor.dim() > 1 and tensor.shape[0] == self.rows:
                longer = tensor.shape[1] - self.padded_to
                cut = tensor.detach()[:, : max(1, self.length + longer)]
                if cut.dim() > 2 and cut.shape[2] == self.padded_to and not cut.is_floating_point():
                    cut = cut[:, :, : cut.shape[1]]  # a mask over pairs of positions
                if abs(longer) <= 1:
                    memo[id(tensor)] = cut.clone()
        return copy.deepcopy(batch, memo)


class LookUps(WatchingMode):
    """The look-ups of the first step: the ids, the rows of the table, its module, and the place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Tensor, int, str, Place]] = []

    def active(self) -> bool:
        """In all of the first step: a look-up in its closure, or in a checkpoint, is the same."""
        return not (self.watch.is_suspended or self.watch.record.steps)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "embedding":
            ids, weight = (*args, kwargs.get("input"), kwargs.get("weight"))[:2]
            with self.watch.suspended():
                self.found.append((ids.detach().clone(), len(weight), self.watch.module_path(), here()[0]))
        return passed_on(func, args, kwargs)


def index_out_of_table(edges: Edges) -> Iterator[Finding]:
    """The loop raises ``IndexError`` on a row that ends in the declared padding, which no row of the batch has."""
    pad = edges.padding.pad_id if edges.padding else None
    given = [t for t in nested.tensors(edges.batch) if not (t.is_nested or t.is_floating_point() or t.is_complex())]
    ids = [t for t in given if t.dim() == 2 and t.shape[0] == edges.count and t.shape[1] > 3]
    if pad is None or edges.padding is None or any(bool((tensor == pad).any()) for tensor in ids):
        return
    seen = LookUps()
    edges.outcome("whole", edges.whole, seen.contexts)
    for looked_up, rows, module, place in seen.found:
        parts = [(tensor, part) for tensor in ids for part in (tensor, tensor[:, :-1])]
        read = next((t for t, part in parts if part.shape == looked_up.shape and bool((part == looked_up).all())), None)
        if read is None or 0 <= pad < rows:
            continue
        batch = _ending_in_padding(edges, read, pad, edges.padding.ignore_index)
        ended = edges.outcome(f"row 0 ends in the declared padding, {pad}", lambda _loop, batch=batch: batch)  # type: ignore[misc]
        if ended.raised.startswith("IndexError"):
            facts = {"pad": pad, "rows": rows, "raised": ended.raised, "words": ended.words, "smallest": ended.words}
            facts["repair"] = (
                f"give the table {max(pad, rows) + 1} rows (resize_token_embeddings), or pad with an id it has"
            )
            yield found("index_out_of_table", place, (module or "embedding",), table=module or "the table", **facts)
        return


def _ending_in_padding(edges: Edges, ids: torch.Tensor, pad: int, ignored: int | None) -> Any:
    """The batch with its first row two shorter: padding at its end, in ids, labels, masks and lengths."""
    memo: dict[int, Any] = {}
    for tensor in nested.tensors(edges.batch):
        like, other = tensor.shape == ids.shape, tensor.detach().clone()
        if tensor is ids:
            other[0, -2:] = pad
        elif like and bool((tensor == 1).all()):
            other[0, -2:] = 0
        elif like and not tensor.is_floating_point() and ignored is not None:
            other[0, -2:] = ignored
        elif tensor.shape == (edges.count,) and bool((tensor == ids.shape[1]).all()):
            other[0] -= 2
        else:
            continue
        memo[id(tensor)] = other
    return copy.deepcopy(edges.batch, memo)
