"""Shapes that are broadcast against each other without a word: rows against rows, weights over the wrong axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call
from pytest_trainloop.recording.torch_names import CLASS_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.tracing.provenance import Node


def broadcast(call: Call) -> Iterator[Breach]:
    """Sides that both grow when they are compared: (N, 1) against (N,) gives (N, N)."""
    named = [name for name in ("input", "target", "var") if isinstance(call.given.get(name), torch.Tensor)]
    shapes = [tuple(call.given[name].shape) for name in named]
    meant = len(named) >= 2 and all(_widened(call.node(name)) for name in named[:2])
    if len(shapes) >= 2 and not meant and (grown := both_grow(shapes[:2])) is not None:
        yield _grown(call, call.name, shapes[0], shapes[1], grown)


def _widened(node: Node | None) -> bool:
    """Whether an axis was put in on the way: both sides of all pairs are."""
    for _ in range(12):
        if node is None or not node.moves or not node.parents:
            return False
        if node.op in ("unsqueeze", "__getitem__", "view", "reshape") and len(node.shape) > len(node.parents[0].shape):
            return True
        node = node.parents[0]
    return False


def both_grow(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape that comes out where each of two is smaller than it."""
    try:
        out = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    sizes = [math.prod(s) for s in shapes]
    return out if min(sizes) > 1 and math.prod(out) > max(sizes) else None


def _grown(call: Call, op: str, left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> Breach:
    return Breach(
        cause="broadcast",
        summary=f"{op} compares {left} with {right}: both are broadcast to {out}, every row with every other",
        measured=f"{math.prod(out)} differences where {max(math.prod(left), math.prod(right))} are meant",
        shown_by="the shapes of the call",
        culprit=op,
        where=str(call.place),
        repair="squeeze(-1) the output, or unsqueeze(-1) the target, so that both have one shape",
    )


def weights(call: Call) -> Iterator[Breach]:
    """Weights that make a loss larger than its input."""
    given = call.tensor("input")
    for name in ("weight", "pos_weight"):
        weight = call.tensor(name)
        if given is None or weight is None or call.name in CLASS_LOSSES or not given.numel():
            continue
        try:
            out = tuple(torch.broadcast_shapes(given.shape, weight.shape))  # type: ignore[no-untyped-call]
        except RuntimeError:
            continue
        if math.prod(out) > given.numel():
            yield Breach(
                cause="weight_shape",
                summary=f"{name} of shape {tuple(weight.shape)} is broadcast against {tuple(given.shape)} to {out}: "
                "each weighs every row",
                measured=f"{math.prod(out)} terms where {given.numel()} are meant",
                shown_by="the shapes of the call",
                culprit=name,
                where=str(call.place),
                repair=f"give {name} the shape of the input, or one entry for each class (its last axis)",
            )
