"""What a node of the provenance is a sum of, and what lies below it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CASTS,
    DIVISIONS,
    JOINS,
    MULTIPLICATIONS,
    NEGATIONS,
    ROUNDINGS,
    SUBTRACTIONS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.instruments.tracing.provenance import Node

DERIVATIVE = "grad"
"""The ``op`` of what ``autograd.grad`` gave, or a gradient that was read."""

PARAMETER = "parameter"
"""The ``op`` of a parameter; its only number is that of the parameter in the record."""

LEAF = "leaf"
"""The ``op`` of a tensor that requires a gradient, was computed of nothing that was seen and is no parameter."""

FARTHEST = 2_000
"""Nodes that a sum is followed for."""

_NO_WEIGHT = frozenset({"batch", LEAF, "tensor", "as_tensor", "from_numpy", "scalar_tensor"})
_BOTH = ADDITIONS | SUBTRACTIONS


def below(node: Node, through: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """The node and all that it was made of, as far as the way goes ``through``."""
    seen = {id(node)}
    todo = [node]
    while todo:
        at = todo.pop()
        yield at
        if through(at):
            for parent in at.parents:
                if id(parent) not in seen:
                    seen.add(id(parent))
                    todo.append(parent)


def trains(node: Node) -> bool:
    """Whether its gradient goes to anything but the batch: to a parameter, or to what is not known.

    The gradient of what rounds is zero, and a number that was made a new tensor has none behind it.
    """
    return any(True for _ in trained_below(node))


def trained_below(node: Node) -> Iterator[Node]:
    """What its gradient goes to: parameters, and what is not known."""
    if node.history:
        reached = below(node, through=lambda n: n.history and n.op not in ROUNDINGS)
        yield from (n for n in reached if n.history and not n.parents and n.op not in _NO_WEIGHT)


def stopped_below(node: Node) -> Iterator[tuple[str, bool, frozenset[int]]]:
    """The results without a history that it was computed from: the line of each, whether that detached it, and the
    parameters below it."""
    for n in below(node, through=lambda n: n.history):
        if not n.history and (parameters := parameters_below(n)):
            yield str(n.place or next(ended_below(n), "")), n.op == "detach", parameters


def ended_below(node: Node) -> Iterator[str]:
    """The lines at which what a value without a history was computed of lost it."""
    for n in below(node, through=lambda n: not n.history):
        if not n.history and any(p.history for p in n.parents):
            yield str(n.place or "")


def parameters_below(node: Node, *, trained: bool = False) -> frozenset[int]:
    """The numbers of the parameters that it was made of; ``trained``: of those that require a gradient."""
    return frozenset(int(n.numbers[0]) for n in below(node) if n.op == PARAMETER and (n.history or not trained))


def derivative_below(node: Node, *, detached: bool = True) -> Node | None:
    """A derivative without a graph that a value without a history was made of, behind a ``detach()`` or not."""
    for n in below(node, through=lambda n: n.op != DERIVATIVE and not n.history):
        if n.op == DERIVATIVE and not n.history and n.shape:
            return n
        if n.op == "detach" and not detached:
            return None
    return None


def origin(node: Node) -> Node:
    """What a value was before it was detached, cast, moved or multiplied by a number."""
    while True:
        floats = [p for p in node.parents if p.floating]
        scaled = node.op in NEGATIONS | MULTIPLICATIONS or (node.op in DIVISIONS and node.numbers)
        if len(floats) != 1 or not (node.moves or node.op in CASTS or scaled):
            return node
        node = floats[0]


class Number(NamedTuple):
    """A plain number that an operation adds."""

    value: float
    added: Node


def summands(root: Node) -> Iterator[Node | Number]:
    """What a root is the sum of, each times a number. What trains nothing is not split."""
    todo: list[Node] = [root]
    for _ in range(FARTHEST):
        if not todo:
            return
        node = todo.pop(0)
        following = _summed(node) if trains(node) else None
        if following is None:
            yield node
        else:
            if node.op in _BOTH:
                yield from (Number(value, node) for value in node.numbers if value)
            todo = [*following, *todo]


def _summed(node: Node) -> tuple[Node, ...] | None:
    """What one operation adds up; None where it is no sum."""
    floats = tuple(p for p in node.parents if p.floating)
    if node.moves or node.op in NEGATIONS:
        return floats[:1] or None
    if node.op in _BOTH:
        whole = all(p.shape in (node.shape, ()) for p in floats)
        return floats if floats and whole else None
    if node.op in JOINS or (node.op in ("sum", "mean") and len(floats) == 1):
        return floats or None
    if node.op in MULTIPLICATIONS | DIVISIONS:
        trained = [p for p in floats if trains(p)]
        others = [p for p in node.parents if p not in trained]
        factor = len(trained) == 1 and all(math.prod(p.shape) == 1 for p in others)
        return tuple(trained) if factor and (node.op in MULTIPLICATIONS or floats[0] is trained[0]) else None
    return None


def sides(node: Node) -> tuple[frozenset[int], ...]:
    """The parameters below both sides of the comparison that a value was reduced of; empty where there is none."""
    for _ in range(40):
        large = [p for p in node.parents if p.floating and p.op != PARAMETER and math.prod(p.shape) > 1]
        if len(large) == 2:
            return tuple(parameters_below(p) for p in large)
        if len(large) != 1:
            return ()
        node = large[0]
    return ()
