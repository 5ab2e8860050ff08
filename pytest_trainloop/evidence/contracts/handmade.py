"""Losses written out: a log-softmax that is gathered from, differences that are squared and averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.evidence.contracts.call import Breach, Call
from pytest_trainloop.evidence.contracts.classes import over_the_wrong_axis
from pytest_trainloop.evidence.contracts.walks import across_rows, behind, layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_BETWEEN = frozenset({"unsqueeze", "__getitem__", "view", "reshape", "unflatten"})


def gathered(call: Call) -> Iterator[Breach]:
    """Entries of a log-softmax picked along another axis than it was taken over."""
    found = behind(call.node("input"))
    if found is None:
        return
    source = found.node
    if source.op == "log" and source.parents:
        under = behind(source.parents[0])
        source = under.node if under is not None else source
    along = call.given.get("dim")
    if source.op not in ("softmax", "log_softmax") or source.dim is None or source.dim == along:
        return
    if source.shape == tuple(call.given["input"].shape) and across_rows(source):
        yield over_the_wrong_axis(call, source)


def differences(call: Call) -> Iterator[Breach]:
    """(N, 1) from a layer of one output against (N,) of the data, where every pair counts alike."""
    left, right = call.given["input"], call.given["target"]
    sides = [(left, right, call.node("input")), (right, left, call.node("target"))]
    column = next((s for s in sides if s[0].dim() == 2 and s[0].shape[1] == 1 and s[0].requires_grad), None)
    if column is None or column[2] is None or column[1].requires_grad or column[1].shape != column[0].shape[:1]:
        return
    at = layout(column[2])
    if column[2].op in _BETWEEN or at is None or at.layer.shape[at.axis] != 1 or call.weights is None:
        return
    if _alike(call.weights.double(), call.out.detach().double()):
        rows = column[0].shape[0]
        yield Breach(
            cause="broadcast",
            summary=f"{tuple(left.shape)} and {tuple(right.shape)} are broadcast to ({rows}, {rows}): the loss "
            "compares every row with every other",
            measured=f"{rows * rows} differences where {rows} are meant",
            shown_by="one side is the output of a layer of one feature, the other data, and all pairs weigh the same",
            culprit=call.name,
            where=str(call.place),
            repair="squeeze(-1) the output, or unsqueeze(-1) the target, so that both have one shape",
        )


def _alike(weights: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the gradient at each entry is one and the same multiple of it (a mean of squares), or of one size (a mean
    of absolute values, or of products), or nothing (cut off by a hinge)."""
    if weights.shape != values.shape:
        return False
    sizes = weights.abs()
    one_size = (sizes - sizes.max()).abs() <= 1e-4 * sizes.max()
    if bool((one_size | (sizes == 0)).all()) and bool(sizes.max() > 0):
        return True
    kept = values.abs() > 1e-3 * values.abs().max()
    ratio = weights[kept] / values[kept]
    return bool(ratio.numel()) and bool((ratio - ratio[0]).abs().max() <= 1e-3 * ratio[0].abs())
