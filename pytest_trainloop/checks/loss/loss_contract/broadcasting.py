"""Shapes that are broadcast silently: rows against rows, weights over the wrong axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, judges
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES, SIGN_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.tracing.provenance import Node


@judges(*DISTANCE_LOSSES, *SIGN_LOSSES, "kl_div", "gaussian_nll_loss")
def broadcast(call: Call) -> Iterator[Judgement]:
    """Two sides that both grow when they are compared: (N, 1) against (N,) gives (N, N)."""
    named = [name for name in ("input", "target", "var") if isinstance(call.given.get(name), torch.Tensor)][:2]
    if len(named) < 2 or all(_widened(call.node(name)) for name in named):
        return
    left, right = (tuple(call.given[name].shape) for name in named)
    out = both_grow((left, right))
    if out is not None:
        yield call.judged(
            "broadcast",
            f"{call.name} compares {left} with {right}: both are broadcast to {out}, every row with every other",
            measured=f"{math.prod(out)} differences where {max(math.prod(left), math.prod(right))} are meant",
            shown_by="the shapes of the call",
        )


def _widened(node: Node | None) -> bool:
    """Whether an axis was inserted on the way, as on both sides where all pairs are meant."""
    for _ in range(12):
        if node is None or not node.moves or not node.parents:
            return False
        if node.op in ("unsqueeze", "__getitem__", "view", "reshape") and len(node.shape) > len(node.parents[0].shape):
            return True
        node = node.parents[0]
    return False


def both_grow(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The broadcast shape of two, if it is larger than each of them."""
    try:
        out = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    sizes = [math.prod(s) for s in shapes]
    return out if min(sizes) > 1 and math.prod(out) > max(sizes) else None


@judges("binary_cross_entropy", "binary_cross_entropy_with_logits", "multilabel_soft_margin_loss")
def weights(call: Call) -> Iterator[Judgement]:
    """Weights that make a loss larger than its input."""
    given = call.tensor("input")
    for name in ("weight", "pos_weight"):
        weight = call.tensor(name)
        if given is None or weight is None or not given.numel():
            continue
        try:
            out = tuple(torch.broadcast_shapes(given.shape, weight.shape))  # type: ignore[no-untyped-call]
        except RuntimeError:
            continue
        if math.prod(out) > given.numel():
            yield call.judged(
                "weight_shape",
                f"{name} of shape {tuple(weight.shape)} is broadcast against {tuple(given.shape)} to {out}: each entry "
                "weighs every row",
                measured=f"{math.prod(out)} terms where {given.numel()} are meant",
                shown_by="the shapes of the call",
                culprit=name,
                repair=f"give {name} the shape of the input, or one entry for each class (its last axis)",
            )
