"""Ways back through what a tensor was computed by."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

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
    RECIPROCALS,
    SUBTRACTIONS,
    TRANSPOSES,
)
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.tracing.provenance import Node

FARTHEST = 200
"""Nodes that a way back is followed for."""

_PLUS = ADDITIONS | (SUBTRACTIONS - {"rsub", "__rsub__"})
"""The first operand keeps its sign: ``rsub`` turns it."""

_INVERSE = RECIPROCALS | DIVISIONS
_SAME_SHAPE = MULTIPLICATIONS | DIVISIONS | _PLUS | CLAMPS | MASKING | NEGATIONS | {"dropout"}
LAYERS = CONVOLUTIONS | PRODUCTS | {"addmm"}


@dataclass(frozen=True, slots=True)
class Found:
    """What stands behind a tensor: the first node that does more than move, scale or drop entries. ``scale`` is the
    product of the numbers on the way (NaN where one is not known), ``learned`` tells that one of them trains,
    ``dropped`` is the dropout last passed, ``low`` and ``high`` are the bounds of the clamps, ``multiplied`` tells that
    a number above 1 was multiplied with."""

    node: Node
    scale: float = 1.0
    shifted: bool = False
    dropped: Node | None = None
    low: float = -math.inf
    high: float = math.inf
    multiplied: bool = False
    learned: bool = False

    @property
    def clamped(self) -> bool:
        return math.isfinite(self.low) or math.isfinite(self.high)


def behind(node: Node | None) -> Found | None:
    """Follow moves, casts, dropout, clamps, and constants that scale or shift."""
    if node is None:
        return None
    found = Found(node)
    for _ in range(FARTHEST):
        node = found.node
        parent = inner(node)
        if parent is None:
            return found
        if node.moves or (node.op in MASKING and parent.shape == node.shape and parent.history):
            found = replace(found, node=parent)
        elif node.op == "dropout":
            dropped = node if node.numbers and node.numbers[0] > 0 else found.dropped
            found = replace(found, node=parent, dropped=dropped)
        elif node.op in CLAMPS:
            low, high = (
                b if not math.isnan(b) else e for b, e in zip(node.numbers, (-math.inf, math.inf), strict=True)
            )
            found = replace(found, node=parent, low=max(low, found.low), high=min(high, found.high))
        elif node.op in MULTIPLICATIONS | DIVISIONS | _PLUS and (constant := _constant(node)) is not None:
            found = _scaled(found, node, *constant)
        else:
            return found
    return found


def _constant(node: Node) -> tuple[Node, float, bool] | None:
    """The tensor and the number of an operation between the two, and whether the number trains."""
    big = [p for p in node.parents if p.floating and math.isnan(p.value)]
    small = [p for p in node.parents if p not in big]
    if len(big) != 1 or len(small) > 1:
        return None
    if small:
        return big[0], small[0].value, small[0].history
    return big[0], node.numbers[0] if node.numbers else math.nan, False


def _scaled(found: Found, node: Node, parent: Node, number: float, learned: bool) -> Found:
    if node.op in _PLUS:
        return replace(found, node=parent, shifted=True)
    factor = number if node.op in MULTIPLICATIONS else 1 / number if number else math.nan
    times = found.multiplied or (node.op in MULTIPLICATIONS and number > 1)
    return replace(found, node=parent, scale=found.scale * factor, multiplied=times, learned=found.learned or learned)


def is_sigmoid(node: Node) -> bool:
    """A sigmoid, called by name or written out as 1 / (1 + exp(-x))."""
    if node.op == "sigmoid":
        return True
    if node.op not in _INVERSE or not _only_parent(node):
        return False
    total = node.parents[0]
    if total.op not in _PLUS or not _only_parent(total) or (1.0 not in total.numbers):
        return False
    power = total.parents[0]
    return power.op == "exp" and bool(power.parents) and power.parents[0].op in NEGATIONS | {"mul", "rmul"}


def _only_parent(node: Node) -> bool:
    return len(node.parents) == 1


def inner(node: Node) -> Node | None:
    """The first floating tensor that the node was made of."""
    return next((p for p in node.parents if p.floating), None)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the entries of a tensor come from in what a layer gave: of each the feature, and the position on all other
    axes of the layer's output, flat. ``picked`` tells of an index on the way, ``moved`` of a transposition."""

    layer: Node
    position: torch.Tensor
    feature: torch.Tensor
    picked: bool
    moved: bool

    @property
    def features(self) -> int:
        return self.layer.shape[_axis(self.layer)]

    @property
    def leading(self) -> tuple[int, ...]:
        """The sizes of all axes but that of the features."""
        axis = _axis(self.layer)
        return self.layer.shape[:axis] + self.layer.shape[axis + 1 :]

    def coordinates(self, position: torch.Tensor) -> list[torch.Tensor]:
        """Flat positions as one coordinate for each leading axis."""
        sizes = self.leading
        return [(position // math.prod(sizes[d + 1 :])) % size for d, size in enumerate(sizes)]


def _axis(layer: Node) -> int:
    return 1 if layer.op in CONVOLUTIONS else len(layer.shape) - 1


def layout(node: Node | None) -> Layout | None:
    """How the entries lie in the output of the layer that made them; None where no one layer did."""
    moves: list[Node] = []
    for _ in range(FARTHEST):
        if node is None:
            return None
        if node.op in LAYERS:
            break
        if node.replay is not None:
            moves.append(node)
        following = same_shaped(node)
        if following is None:
            return None
        node = following
    if node is None or node.op not in LAYERS or len(node.shape) < 2:
        return None
    if node.op in CONVOLUTIONS and not any(len(p.shape) == len(node.shape) for p in node.parents):
        return None
    axis, size = _axis(node), math.prod(node.shape)
    count = node.shape[axis]
    rest = node.shape[:axis] + node.shape[axis + 1 :]
    beside = [1] * len(node.shape)
    beside[axis] = count
    position = torch.arange(size // max(count, 1)).reshape(rest).unsqueeze(axis).expand(node.shape)
    feature = torch.arange(count).reshape(beside).expand(node.shape)
    for move in reversed(moves):
        if move.replay is None or position.shape != move.parents[0].shape:
            return None
        try:
            position, feature = move.replay(position), move.replay(feature)
        except (RuntimeError, TypeError) as error:  # a move that numbers cannot make, as to another dtype
            reraise_raised(error)
            return None
    return Layout(node, position, feature, any(m.picks for m in moves), any(m.op in TRANSPOSES for m in moves))


def constant(values: torch.Tensor, axis: int) -> bool:
    """Whether the entries are the same all along an axis."""
    return values.stride(axis) == 0 or bool((values == values.narrow(axis, 0, 1)).all())


def same_shaped(node: Node) -> Node | None:
    """The parent that the entries of this node come from, one by one."""
    if node.moves:
        return node.parents[0] if node.parents else None
    if node.op in _SAME_SHAPE or node.op in ACTIVATIONS:
        same = [p for p in node.parents if p.floating and p.shape == node.shape]
        with_history = [p for p in same if p.history and not p.parameter] or same
        return with_history[0] if len(with_history) == 1 else None
    return None


def across_rows(node: Node) -> bool:
    """Whether a softmax over what a layer with weights gave runs over its rows, each feature by itself."""
    axis, at = node.dim, layout(node.parents[0]) if node.parents else None
    if axis is None or at is None or at.layer.op != "linear" or at.picked or at.feature.shape != node.shape:
        return False
    if at.features < 2 or not any(p.parameter for p in at.layer.parents) or node.shape[axis] < 2:
        return False
    return constant(at.feature, axis)


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


def by_weights(layer: Node) -> bool:
    """Whether the layer multiplies with weights: a product of two results has no axis of features."""
    return layer.op in CONVOLUTIONS or any(p.parameter or _made_of_parameters(p) for p in layer.parents)


def _made_of_parameters(node: Node) -> bool:
    leaves = [n for n in ancestors(node) if not n.parents]
    return node.history and bool(leaves) and all(n.parameter or not n.shape for n in leaves)
