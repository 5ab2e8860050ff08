"""Losses written out in elementary operations: a log-softmax with gather, the mean of squared differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, PairTable, judges
from pytest_trainloop.checks.loss.loss_contract.class_targets import over_the_wrong_axis
from pytest_trainloop.checks.loss.loss_contract.kl_div import sharpened
from pytest_trainloop.checks.loss.loss_contract.value_tests import logs_of_one, sums_to_one
from pytest_trainloop.recording.torch_names import SOFTMAXES
from pytest_trainloop.tracing.provenance_queries import LAYERS, across_rows, ancestors, behind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.tracing.provenance import Node

_LOGARITHMS = ("log", "log_softmax", "sub", "__sub__")
"""Operations whose result may be a logarithm of probabilities; a difference with a log-sum-exp is."""

_INSERT_AN_AXIS = frozenset({"unsqueeze", "__getitem__", "view", "reshape", "unflatten"})


@judges("gather")
def gathered(call: Call) -> Iterator[Judgement]:
    """Entries gathered from a log-softmax along another axis than its own."""
    found = behind(call.node("input"))
    if found is None:
        return
    source = _softmax_behind(call.node("input")) or found.node
    along = call.given.get("dim")
    if source.op not in SOFTMAXES or source.dim is None or source.dim == along:
        return
    if source.shape == tuple(call.given["input"].shape) and across_rows(source):
        yield over_the_wrong_axis(call, source)


@judges("product")
def products(call: Call) -> Iterator[Judgement]:
    """The logarithm of a softmax times probabilities: a cross entropy written out."""
    for one, other in (("input", "target"), ("target", "input")):
        found, logs, shares = behind(call.node(one)), call.tensor(one), call.tensor(other)
        if found is None or logs is None or shares is None or found.node.op not in _LOGARITHMS:
            continue
        shares = shares if shares.is_floating_point() else shares.double()
        theirs = [d for d in range(shares.dim()) if sums_to_one(shares, d)]
        mine = [d for d in range(logs.dim()) if logs_of_one(logs, d)] if theirs else []
        if mine and not set(mine) & set(theirs):
            yield call.judged(
                "wrong_axis",
                f"logarithms that are normalised over axis {mine[0]} are multiplied by probabilities that are "
                f"normalised over axis {theirs[0]}",
                measured=f"shape {tuple(call.given['input'].shape)}",
                shown_by="the sums along each axis",
                culprit="log_softmax",
                repair="take the softmax over the axis of the classes: dim=1 for (N, C)",
            )
    for left in _terms(call.node("input")):
        for right in _terms(call.node("target")):
            yield from sharpened(call, left, right)


def _terms(node: Node | None) -> list[Node | None]:
    """Both sides of a difference; of any other operation the node alone."""
    found = behind(node)
    if found is not None and found.node.op in ("sub", "__sub__") and len(found.node.parents) == 2:
        return list(found.node.parents)
    return [node]


def _softmax_behind(node: Node | None) -> Node | None:
    """The log-softmax, or the softmax before a logarithm, of which the node is a reshaped or scaled copy."""
    found = behind(node)
    if found is None:
        return None
    source = found.node
    if source.op == "log" and source.parents:
        under = behind(source.parents[0])
        return under.node if under is not None and under.node.op == "softmax" else None
    return source if source.op == "log_softmax" else None


@judges("difference")
def differences(call: Call) -> Iterator[Judgement]:
    """(N, 1) from a layer with one output against (N,) of the data, where every pair counts equally."""
    for one, other in (("input", "target"), ("target", "input")):
        column, row, node = call.given[one], call.given[other], call.node(one)
        if column.dim() == 2 and column.shape[1] == 1 and column.requires_grad:
            break
    else:
        return
    if node is None or row.requires_grad or row.shape != column.shape[:1]:
        return
    if node.op in _INSERT_AN_AXIS or not _of_one_output(node) or call.weights is None:
        return
    if id(column) in call.with_itself:
        return  # an energy distance: pairs with the data less pairs among its own
    table = PairTable(row, call.weights.double(), call.out.detach().double())
    chosen = (_larger_of(table, other) for other in call.pair_tables if torch.equal(other.target, row))
    by_pairs = [t for t in (table, *chosen) if t is not None and _sum_over_pairs(t.weights, t.values)]
    call.pair_tables.append(table)
    if by_pairs:
        rows = column.shape[0]
        left, right = tuple(call.given["input"].shape), tuple(call.given["target"].shape)
        yield call.judged(
            "broadcast",
            f"{left} and {right} are broadcast to ({rows}, {rows}): the loss compares every row with every other",
            measured=f"{rows * rows} pairs where {rows} are meant",
            shown_by="one side is the output of a layer with one feature, the other data, and every pair counts",
        )


@judges("outer")
def rows_times_a_column(call: Call) -> Iterator[Judgement]:
    """(N,) times (N, 1): each row's value is multiplied with that of every other row.

    Where all pairs count alike the sum is the product of the two sums, and what a row is multiplied with has no say.
    Of log-probabilities it is a fault in any case: a row's belong to its own advantage.
    """
    left, right = call.given["input"], call.given["target"]
    row, column = sorted((left, right), key=lambda side: side.dim())
    if row.dim() != 1 or tuple(column.shape) != (len(row), 1) or call.weights is None:
        return
    if all(_inserted(call.node(name)) for name in ("input", "target")):
        return
    flat = call.weights.detach().reshape(-1)
    alike = bool((flat == flat[0]).all()) and bool(flat[0] != 0)
    likely = any(n in call.log_probs for name in ("input", "target") for n in ancestors(call.nodes[name], 40))
    if alike or likely:
        n = len(row)
        what = "log-probabilities are" if likely else "values are"
        yield call.judged(
            "broadcast",
            f"{tuple(left.shape)} and {tuple(right.shape)} are multiplied to ({n}, {n}): each row's {what} multiplied "
            "with those of every other row",
            measured=f"{n * n} products where {n} are meant",
            shown_by="the gradient at all of them is the same: the sum is that of the one times that of the other"
            if alike
            else "one side comes from log_prob, of one number for each row",
            culprit="product",
            repair=f"bring both to one shape: squeeze(-1) what has the shape ({n}, 1)",
        )


def _inserted(node: Node | None) -> bool:
    """Whether an axis was inserted into it just before."""
    return node is not None and node.op in _INSERT_AN_AXIS and len(node.shape) > len(node.parents[0].shape)


def _of_one_output(node: Node) -> bool:
    """Whether a column comes from a layer with one output, directly or through a loss for each row."""
    return any(n.op in LAYERS and n.shape == node.shape for n in ancestors(node, 40))


def _larger_of(one: PairTable, other: PairTable) -> PairTable | None:
    """The table of which the loss is made where it takes the larger, or everywhere the smaller, of two differences, as
    a clipped value loss does; None where it does not.

    The gradient at an entry that is not taken is 0. Where both get one the two are equal but for their rounding.
    """
    if one.weights.shape != other.weights.shape or one.values.shape != one.weights.shape:
        return None
    mine, theirs = one.weights != 0, other.weights != 0
    gap = one.values.abs() - other.values.abs()
    equal = gap.abs() <= _ROUNDING * torch.maximum(one.values.abs(), other.values.abs())
    if not bool((mine | theirs).all()) or bool((mine & theirs & ~equal).any()):
        return None
    sign = torch.where(mine, gap, -gap)[~equal].sign()
    if not bool((sign == 1).all()) and not bool((sign == -1).all()):
        return None
    return PairTable(one.target, one.weights + other.weights, torch.where(mine, one.values, other.values))


_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""How far two sizes are apart at most, in parts of the larger one, whose squares are equal after rounding."""


def _sum_over_pairs(weights: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the loss is a sum of squares or of absolute values over the pairs, weighted or not: the gradient at each
    pair is its difference, or its sign, times a factor of its row and one of its column. In a kernel over pairs it is
    not."""
    if weights.shape != values.shape:
        return False
    sizes = weights.abs()
    one_size = (sizes - sizes.max()).abs() <= 1e-4 * sizes.max()
    if bool((one_size | (sizes == 0)).all()) and bool(sizes.max() > 0):
        return True
    return any(_is_outer_product(sizes / by) for by in (values.abs().clamp(min=1e-30), torch.ones_like(values)))


def _is_outer_product(factors: torch.Tensor) -> bool:
    """Whether a matrix is the product of a column and a row."""
    if factors.dim() != 2 or not bool((factors > 0).all()) or not bool(torch.isfinite(factors).all()):
        return False
    logs = factors.log()
    rest = logs - logs.mean(0, keepdim=True) - logs.mean(1, keepdim=True) + logs.mean()
    return bool(rest.abs().max() <= 1e-3)
