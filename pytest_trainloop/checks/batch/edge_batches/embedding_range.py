"""Whether the table that looks ids up has a row for the declared padding."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop import nested
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pytest_trainloop.checks.batch.edge_batches.runs import Edges, Outcome
    from pytest_trainloop.recording.events import Place


@dataclass(frozen=True, slots=True)
class LookUp:
    """One look-up in a table."""

    ids: torch.Tensor
    rows: int
    """Of the table."""
    module: str
    place: Place


class LookUps(WatchingMode):
    """The look-ups of the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[LookUp] = []

    def active(self) -> bool:
        """In all of the first step: a look-up in its closure, or in a checkpoint, is the same."""
        return not (self.watch.is_suspended or self.watch.record.steps)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self.watch
        if name == "embedding":
            ids, weight = (*args, kwargs.get("input"), kwargs.get("weight"))[:2]
            with watch.suspended():
                self.found.append(LookUp(ids.detach().clone(), len(weight), watch.module_path(), here()[0]))
        return passed_on(func, args, kwargs)


@dataclass(frozen=True, slots=True)
class BeyondTable:
    """A run that ended at a table which has no row for the declared padding."""

    outcome: Outcome
    look_up: LookUp
    pad_id: int


def beyond_table(edges: Edges) -> BeyondTable | None:
    """Whether the loop raises on a row that ends in the declared padding, which no row of the batch has."""
    pad = None if edges.padding is None else edges.padding.pad_id
    leaves = [t for t in nested.tensors(edges.batch) if _are_ids(t, edges.count)]
    if pad is None or any(bool((leaf == pad).any()) for leaf in leaves):
        return None
    look_ups = LookUps()
    edges.outcome("whole", Composition(tuple(range(edges.count))), look_ups.contexts)
    for look_up in look_ups.found:
        leaf = next((n for n, t in enumerate(leaves) if _looked_up(t, look_up.ids)), None)
        if leaf is not None and not 0 <= pad < look_up.rows:
            made = _ending_in(edges, leaf, pad)
            outcome = edges.outcome(f"row 0 ends in the declared padding, {pad}", lambda _loop, made=made: made)  # type: ignore[misc]
            return BeyondTable(outcome, look_up, pad) if outcome.raised.startswith("IndexError") else None
    return None


def _are_ids(tensor: torch.Tensor, count: int) -> bool:
    plain = not tensor.is_nested and not tensor.is_floating_point() and not tensor.is_complex()
    return plain and tensor.dim() == 2 and tensor.shape[0] == count and tensor.shape[1] > 3


def _looked_up(leaf: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether these are the ids, or all but the last of them."""
    return any(ids.shape == part.shape and bool((ids == part).all()) for part in (leaf, leaf[:, :-1]))


def _ending_in(edges: Edges, leaf: int, pad: int) -> Any:
    """The batch with its first row two shorter: padding at its end, in ids, labels, masks and lengths."""
    batch = edges.batch
    ids = [t for t in nested.tensors(batch) if _are_ids(t, edges.count)]
    ignored = edges.padding.ignore_index if edges.padding else None
    memo: dict[int, Any] = {}
    for tensor in nested.tensors(batch):
        other = tensor.detach().clone()
        if tensor is ids[leaf]:
            other[0, -2:] = pad
        elif tensor.shape == ids[leaf].shape and bool((tensor == 1).all()):
            other[0, -2:] = 0
        elif tensor.shape == ids[leaf].shape and not tensor.is_floating_point() and ignored is not None:
            other[0, -2:] = ignored
        elif tensor.shape == (edges.count,) and bool((tensor == ids[leaf].shape[1]).all()):
            other[0] -= 2
        else:
            continue
        memo[id(tensor)] = other
    return copy.deepcopy(batch, memo)
