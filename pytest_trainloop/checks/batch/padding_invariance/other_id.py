"""The id that a model takes for padding, where another one fills the rows.

With the model's own id in the padding the gradient is that without padding: the mask that the model makes of it is
right, and the batch is filled with another one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members, nested
from pytest_trainloop.batches.grids import Leaf, leaves
from pytest_trainloop.batches.padding import padding_ids
from pytest_trainloop.batches.padding_hints import is_label
from pytest_trainloop.batches.values import constant, plain

if TYPE_CHECKING:
    from pytest_trainloop.batches.padding import PaddingMask
    from pytest_trainloop.checks.batch.padding_invariance.comparison import Comparison
    from pytest_trainloop.checks.batch.padding_invariance.runs import PaddingRuns
    from pytest_trainloop.checks.batch.padding_invariance.slices import BatchSlice
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.nested import Path

MOST = 3
"""Ids that are tried, at most."""


def taken_for_padding(loop: TrainLoop) -> tuple[int, ...]:
    """The ids that models take for padding: ``padding_idx`` of embeddings, ``config.pad_token_id``."""
    configs = (getattr(m, "config", None) for module in loop.modules.values() for m in members.modules(module))
    named = [i for config in configs if isinstance(i := getattr(config, "pad_token_id", None), int)]
    return tuple(dict.fromkeys((*padding_ids(loop.modules.values()), *named)))


def other_id(runs: PaddingRuns, found: Comparison) -> tuple[int, float] | None:
    """The id with which both gradients agree, and the one that stands in the padding; None where there is none."""
    if not runs.pad_ids or not runs.of_ids or found.full.uneven or found.statistics:
        return None
    filled = fill(runs.batch, runs.padded)
    for candidate in runs.pad_ids[:MOST]:
        if filled is None or candidate == filled:
            continue
        if runs.agrees_with(found, functools.partial(with_id, pad_id=candidate)):
            return candidate, filled
    return None


def fill(batch: Any, padded: PaddingMask) -> float | None:
    """The one value that stands in the padding of ids."""
    found = [leaf.under(padded.grid) for leaf in leaves(batch) if leaf.path in padded.of and _is_ids(leaf)]
    values = {constant(leaf.at(padded.mask)) for leaf in found if leaf.time is not None}
    return values.pop() if len(values) == 1 else None


def with_id(batch: Any, padded: PaddingMask, chosen: BatchSlice, *, pad_id: int) -> Any:
    """A slice of the batch with this id in its padding."""
    ids = {leaf.path for leaf in leaves(batch) if leaf.path in padded.of and _is_ids(leaf)}
    span = chosen.span

    def filled(path: Path, value: torch.Tensor) -> torch.Tensor:
        if path not in ids or span.total not in value.shape:
            return value
        out = value.detach().clone()
        cells = out if padded.grid.batch_dim == 0 else out.mT
        cells[:, : span.start] = pad_id
        cells[:, span.stop :] = pad_id
        return out

    return nested.mapped(nested.copy(batch), filled, lambda value: isinstance(value, torch.Tensor) and plain(value))


def _is_ids(leaf: Leaf) -> bool:
    return leaf.whole and leaf.tensor.dim() == 2 and not leaf.two_valued and not is_label(leaf, None)
