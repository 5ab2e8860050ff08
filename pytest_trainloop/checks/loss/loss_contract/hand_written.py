"""Losses written out: a log-softmax that is gathered from, differences that are squared and averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call
from pytest_trainloop.checks.loss.loss_contract.class_targets import over_the_wrong_axis
from pytest_trainloop.checks.loss.loss_contract.kl_div import hot
from pytest_trainloop.checks.loss.loss_contract.value_tests import logs_of_one, sums_to_one
from pytest_trainloop.recording.torch_names import SOFTMAXES
from pytest_trainloop.tracing.provenance_queries import LAYERS, across_rows, ancestors, behind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.tracing.provenance import Node


_BETWEEN = frozenset({"unsqueeze", "__getitem__", "view", "reshape", "unflatten"})


def gathered(call: Call) -> Iterator[Breach]:
    """Entries of a log-softmax picked along another axis than it was taken over."""
    found = behind(call.node("input"))
    if found is None:
        return
    source = _softmax_behind(call.node("input")) or found.node
    along = call.given.get("dim")
    if source.op not in SOFTMAXES or source.dim is None or source.dim == along:
        return
    if source.shape == tuple(call.given["input"].shape) and across_rows(source):
        yield over_the_wrong_axis(call, source)


def products(call: Call) -> Iterator[Breach]:
    """The logarithm of a softmax times probabilities: a cross entropy written out."""
    sides = [(call.node("input"), call.tensor("input"), call.tensor("target")),
             (call.node("target"), call.tensor("target"), call.tensor("input"))]  # fmt: skip
    for node, logs, other in sides:
        if node is None or logs is None or other is None or not _is_logarithm(node):
            continue
        shares = other.double() if not other.is_floating_point() else other
        theirs = [d for d in range(shares.dim()) if sums_to_one(shares, d)]
        mine = [d for d in range(logs.dim()) if logs_of_one(logs, d)] if theirs else []
        if mine and not set(mine) & set(theirs):
            yield _crossed(call, mine, theirs)
    left, right = call.node("input"), call.node("target")
    for one in _terms(left):
        for other_one in _terms(right):
            yield from hot(call, one, other_one)


def _is_logarithm(node: Node) -> bool:
    found = behind(node)
    return found is not None and found.node.op in ("log", "log_softmax", "sub", "__sub__")


def _terms(node: Node | None) -> list[Node | None]:
    """A node, or both sides of the difference that it is."""
    found = behind(node)
    if found is not None and found.node.op in ("sub", "__sub__") and len(found.node.parents) == 2:
        return list(found.node.parents)
    return [node]


def _crossed(call: Call, mine: list[int], theirs: list[int]) -> Breach:
    return Breach(
        cause="wrong_axis",
        summary=f"logarithms that are normalised over axis {mine[0]} are multiplied by probabilities that are "
        f"normalised over axis {theirs[0]}",
        measured=f"shape {tuple(call.given['input'].shape)}",
        shown_by="the sums along each axis",
        culprit="log_softmax",
        where=str(call.place),
        repair="take the softmax over the axis of the classes: dim=1 for (N, C)",
    )


def _softmax_behind(node: Node | None) -> Node | None:
    """A log-softmax, or a softmax whose logarithm was taken, that the node was moved or scaled from."""
    found = behind(node)
    if found is None:
        return None
    source = found.node
    if source.op == "log" and source.parents:
        under = behind(source.parents[0])
        return under.node if under is not None and under.node.op == "softmax" else None
    return source if source.op == "log_softmax" else None


def differences(call: Call) -> Iterator[Breach]:
    """(N, 1) from a layer of one output against (N,) of the data, where every pair counts alike."""
    left, right = call.given["input"], call.given["target"]
    sides = [(left, right, call.node("input")), (right, left, call.node("target"))]
    column = next((s for s in sides if s[0].dim() == 2 and s[0].shape[1] == 1 and s[0].requires_grad), None)
    if column is None or column[2] is None or column[1].requires_grad or column[1].shape != column[0].shape[:1]:
        return
    if column[2].op in _BETWEEN or not _of_one_output(column[2]) or call.weights is None:
        return
    if _each_for_itself(call.weights.double(), call.out.detach().double()):
        rows = column[0].shape[0]
        yield Breach(
            cause="broadcast",
            summary=f"{tuple(left.shape)} and {tuple(right.shape)} are broadcast to ({rows}, {rows}): the loss "
            "compares every row with every other",
            measured=f"{rows * rows} pairs where {rows} are meant",
            shown_by="one side is the output of a layer of one feature, the other data, and every pair counts",
            culprit=call.name,
            where=str(call.place),
            repair="squeeze(-1) the output, or unsqueeze(-1) the target, so that both have one shape",
        )


def _of_one_output(node: Node) -> bool:
    """Whether a column comes from a layer of one output: by itself, or by way of a loss for each row."""
    return any(n.op in LAYERS and n.shape == node.shape for n in ancestors(node, 40))


def _each_for_itself(weights: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the gradient at each pair is its difference, or its sign, times a factor of its row and one of its
    column: a sum of squares or of absolute values, weighted or not. A kernel over pairs is nothing of the kind."""
    if weights.shape != values.shape:
        return False
    sizes = weights.abs()
    one_size = (sizes - sizes.max()).abs() <= 1e-4 * sizes.max()
    if bool((one_size | (sizes == 0)).all()) and bool(sizes.max() > 0):
        return True
    return any(_outer(sizes / by) for by in (values.abs().clamp(min=1e-30), torch.ones_like(values)))


def _outer(factors: torch.Tensor) -> bool:
    """Whether a matrix is a column times a row."""
    if factors.dim() != 2 or not bool((factors > 0).all()) or not bool(torch.isfinite(factors).all()):
        return False
    logs = factors.log()
    rest = logs - logs.mean(0, keepdim=True) - logs.mean(1, keepdim=True) + logs.mean()
    return bool(rest.abs().max() <= 1e-3)
