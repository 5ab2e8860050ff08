"""What is known of the padding of a loop's batches: where it stands, whether it is declared, how lengths vary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_trainloop import members, nested
from pytest_trainloop.batches.episodes import read_episodes
from pytest_trainloop.batches.grids import leaves, time_axes
from pytest_trainloop.batches.groups import padded_groups
from pytest_trainloop.batches.padding import PaddingMask, padding_ids
from pytest_trainloop.batches.segments import read as read_segments
from pytest_trainloop.batches.values import plain
from pytest_trainloop.errors import CannotDecide, DoesNotApply

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_trainloop.loop import TrainLoop


def read(loop: TrainLoop, batch: Any) -> list[PaddingMask]:
    """The padding of a batch, by groups of tensors that are padded alike."""
    declared, time_first = loop.padding, loop.padding is not None and loop.padding.dim == 0
    axis = loop.batch_dim if isinstance(loop.batch_dim, int) else int(time_first)
    pad_ids = padding_ids(loop.modules.values())
    found = padded_groups(batch, batch_dim=axis, declared=declared, pad_ids=pad_ids)
    if found or loop.batch_dim is not None or declared is not None:
        return found
    return [p for p in padded_groups(batch, batch_dim=1) if p.source == "lengths"]  # time comes first


def is_declared(loop: TrainLoop, batch: Any, padded: PaddingMask) -> bool:
    """Whether ``padding=`` is about this padding: where ids of the batch are padded with the declared id, the padding
    of anything else (regions of a picture, frames) is not."""
    declared = () if loop.padding is None else loop.padding.all
    if any(p.of or p.pad_id is None for p in declared):
        return True
    ids = [p.pad_id for p in declared if p.pad_id is not None]
    about = [p.of for p in read(loop, batch) if any(_stands_there(i, batch, p) for i in ids)]
    return bool(declared) and (not about or any(padded.of & of for of in about))


def is_configured(loop: TrainLoop, batch: Any, padded: PaddingMask) -> bool:
    """Whether a model's configuration names the id that stands there (``config.pad_token_id``, as in transformers).

    As sure as a mask of the batch: models with such a configuration take a mask, and are not to attend to padding.
    """
    configs = (getattr(m, "config", None) for module in loop.modules.values() for m in members.modules(module))
    ids = {i for config in configs if isinstance(i := getattr(config, "pad_token_id", None), int)}
    return any(_stands_there(i, batch, padded) for i in ids)


def _stands_there(pad_id: int, batch: Any, padded: PaddingMask) -> bool:
    """Whether ids of the batch are padded with this one."""
    found = (leaf.under(padded.grid) for leaf in leaves(batch))
    return any(
        bool((leaf.at(padded.mask) == pad_id).all())
        for leaf in found
        if leaf.path in padded.of and leaf.time is not None and leaf.whole and not leaf.two_valued
    )


def lengths(given: list[Any], batch: Any, padded: PaddingMask) -> frozenset[int]:
    """How long batches are where this one is padded."""
    grid = padded.grid
    for number, tensor in enumerate(_plain(batch)):
        axes = time_axes(tensor, grid.batch_dim, grid.rows, grid.length, grid.time_dim)
        if axes:
            same = [t for other in given for t in _plain(other)[number : number + 1] if t.dim() == tensor.dim()]
            return frozenset(t.shape[axes[0]] for t in same)
    return frozenset()


def _plain(batch: Any) -> list[torch.Tensor]:
    return [t for t in nested.tensors(batch) if plain(t)]


def looks_up(loop: TrainLoop) -> bool:
    """Whether a model looks up ids."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    return any(isinstance(part, tables) for module in loop.modules.values() for part in members.modules(module))


def nothing_padded(loop: TrainLoop, batches: Sequence[Any]) -> CannotDecide:
    """Why there is no padding to vary. Batches of floats alone have rows of one size: images, tables."""
    if loop.padding is not None and loop.padding.pad_id is not None:
        return CannotDecide(
            f"no row of the batch ends or begins with the declared pad_id {loop.padding.pad_id} where nothing else "
            "stands: give a batch with rows of unequal lengths",
            needs="a batch with rows of unequal lengths",
        )
    if loop.padding is None and not looks_up(loop) and any(read_segments(b) or read_episodes(b) for b in batches):
        return DoesNotApply(
            "no padding is known in the batch, whose segments lie behind each other, and no ids are read"
        )
    if loop.padding is None and not any(
        t.dim() > 1 and not t.is_floating_point() for batch in batches for t in nested.tensors(batch)
    ):
        return DoesNotApply("no padding is known in the batch, and it holds no ids, masks or labels by position")
    return CannotDecide(
        "no padding is known in the batch: give one with rows of unequal lengths and pass padding=Padding(pad_id=...)",
        needs="padding=",
    )
