"""Ways back through what a tensor was computed by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.recording.torch_names import (
    ACTIVATIONS,
    ADDITIONS,
    CLAMPS,
    CONVOLUTIONS,
    DIVISIONS,
    MASKING,
    MULTIPLICATIONS,
    NEGATIONS,
    PRODUCTS,
    SUBTRACTIONS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.instruments.tracing.provenance import Node

FARTHEST = 200
"""Nodes that a way back is followed for."""

_SAME_SHAPE = (
    MULTIPLICATIONS | DIVISIONS | ADDITIONS | CLAMPS | MASKING | NEGATIONS | {"dropout"}
    | (SUBTRACTIONS - {"rsub", "__rsub__"})
)  # fmt: skip
_LAYERS = CONVOLUTIONS | PRODUCTS | {"addmm"}


class Layout(NamedTuple):
    """Where the entries of a tensor come from in what a layer gave: of each the position on all axes of the layer's
    output but that of the features, flat; ``leading`` are the sizes of these axes."""

    position: torch.Tensor
    leading: tuple[int, ...]

    def coordinates(self, position: torch.Tensor) -> list[torch.Tensor]:
        """Flat positions as one coordinate for each leading axis."""
        sizes = self.leading
        return [(position // math.prod(sizes[d + 1 :])) % size for d, size in enumerate(sizes)]


def layout(node: Node | None) -> Layout | None:
    """How the entries lie in the output of the layer that made them; None where no one layer did."""
    moves: list[Node] = []
    for _ in range(FARTHEST):
        if node is None:
            return None
        if node.op in _LAYERS:
            break
        if node.replay is not None:
            moves.append(node)
        node = same_shaped(node)
    if node is None or node.op not in _LAYERS or len(node.shape) < 2:
        return None
    if node.op in CONVOLUTIONS and not any(len(p.shape) == len(node.shape) for p in node.parents):
        return None
    axis = 1 if node.op in CONVOLUTIONS else len(node.shape) - 1
    leading = node.shape[:axis] + node.shape[axis + 1 :]
    position = torch.arange(math.prod(leading)).reshape(leading).unsqueeze(axis).expand(node.shape)
    for move in reversed(moves):
        if move.replay is None or position.shape != move.parents[0].shape:
            return None
        try:
            position = move.replay(position)
        except (RuntimeError, TypeError) as error:  # a move that numbers cannot make, as to another dtype
            reraise_raised(error)
            return None
    return Layout(position, leading)


def same_shaped(node: Node) -> Node | None:
    """The parent that the entries of this node come from, one by one."""
    if node.moves:
        return node.parents[0] if node.parents else None
    if node.op in _SAME_SHAPE or node.op in ACTIVATIONS:
        same = [p for p in node.parents if p.floating and p.shape == node.shape]
        with_history = [p for p in same if p.history and not p.parameter] or same
        return with_history[0] if len(with_history) == 1 else None
    return None


def ancestors(node: Node, most: int = 400) -> Iterator[Node]:
    """The node and what it was made of, nearest first."""
    seen: set[int] = set()
    todo = [node]
    while todo and len(seen) < most:
        at = todo.pop(0)
        if id(at) not in seen:
            seen.add(id(at))
            yield at
            todo.extend(at.parents)
