"""Shapes: two sides that are broadcast against each other, where each row was to meet its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_contract.call import both_grow, broadcast_to, column_against_table
from pytest_trainloop.instruments.tracing.tape_queries import made_of, unmoved
from pytest_trainloop.recording.torch_names import CONVOLUTIONS, DISTANCE_LOSSES, PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import LossCall
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.tape import Value

    Findings = Iterator[Finding]

_INSERTS = frozenset({"unsqueeze", "__getitem__", "view", "reshape", "unflatten", "expand"})


def inserted(value: Value | None, most: int = 1) -> bool:
    """Whether an axis was inserted on the way, as on both sides where all pairs are intended."""
    for one in made_of(value, most):
        if one.op in _INSERTS and one.parents and len(one.shape) > len(one.parents[0].shape):
            return True
    return False


def moved_and_inserted(value: Value | None) -> bool:
    while value is not None and value.parents and unmoved(value) is not value:
        if inserted(value):
            return True
        value = value.parents[0]
    return False


def broadcast(call: LossCall) -> Findings:
    """Two sides that both grow when they are compared: (N, 1) against (N,) gives (N, N)."""
    sides = [n for n in ("input", "target", "var") if isinstance(call.given.get(n), torch.Tensor)][:2]
    if len(sides) == 2 and not all(moved_and_inserted(call.values[n]) for n in sides):
        left, right = (tuple(call.given[n].shape) for n in sides)
        out = both_grow(left, right)
        if out is not None:
            yield compared(call, left, right, out, "the shapes of the call")
        elif call.name in DISTANCE_LOSSES:
            yield from _repeated(call)


def _repeated(call: LossCall) -> Findings:
    """Single predictions that meet several targets each."""
    left, right = (tuple(call.given[n].shape) for n in ("input", "target"))
    if _repeats_predictions(call, left, right):
        facts: dict[str, Any] = {"left": left, "right": right, "pairs": math.prod(right), "rows": math.prod(left)}
        facts |= {"times": math.prod(right) // math.prod(left), "how": "the shapes of the call"}
        yield call.finds("broadcast", "predictions", **facts, level="advice")


def _repeats_predictions(call: LossCall, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether single predictions meet several targets each, and no axis was inserted for that."""
    given, target = call.given["input"], call.given.get("target")
    if not isinstance(target, torch.Tensor) or target.requires_grad:
        return False
    grows = broadcast_to(left, right) == right and 1 < math.prod(left) < math.prod(right)
    return grows and bool(given.requires_grad) and not moved_and_inserted(call.values["input"])


def compared(call: LossCall, left: Any, right: Any, out: tuple[int, ...], how: str, variant: str = "") -> Finding:
    sizes: dict[str, Any] = {"pairs": math.prod(out), "rows": max(math.prod(left), math.prod(right))}
    return call.finds("broadcast", variant, left=left, right=right, out=out, **sizes, how=how)


def differences(call: LossCall) -> Findings:
    """(N, 1) against (N,), of which one comes from a layer with one output and the other is data: a fault where every
    pair counts equally. Where the data are the column, and nobody inserted its axis, it is advice otherwise."""
    if call.layer is not None and column_against_table(call.given["input"], call.given["target"]):
        yield from _repeated(call)
    sides = _column_and_row(call)
    if sides is None or call.weights is None:
        return
    column, data = sides
    earlier = [c for c in call.step.calls if c.name == "difference" and c is not call]
    if any(_both_train(c) and any(column is side for side in c.given.values()) for c in call.step.calls):
        return  # an energy distance: pairs with the data less pairs among its own
    table = call.weights.double(), call.out.detach().double()
    others = [
        larger_of(table, (c.weights.double(), c.out.detach().double()))
        for c in earlier
        if c.weights is not None and any(isinstance(s, torch.Tensor) and torch.equal(s, data) for s in c.given.values())
    ]
    left, right, n = tuple(call.given["input"].shape), tuple(call.given["target"].shape), column.shape[0]
    how = "one side is the output of a layer with one feature, the other data, and "
    if any(t is not None and sum_over_pairs(*t) for t in (table, *others)):
        yield compared(call, left, right, (n, n), f"{how}every pair counts", "rows")
    elif column is data:
        found = compared(call, left, right, (n, n), f"{how}no code inserts an axis in either", "rows")
        yield replace(found, level="advice")


def _column_and_row(call: LossCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The side of shape (N, 1), and the one of both that is data, where the other one of (N,) is what a layer with one
    output gave for these rows, or the reverse."""
    for one, other in (("input", "target"), ("target", "input")):
        column, row, value = call.given[one], call.given[other], call.values[one]
        if column.dim() != 2 or column.shape[1] != 1 or row.shape != column.shape[:1]:
            continue
        if column.requires_grad == row.requires_grad:
            continue
        inserted_there = value.op in _INSERTS - {"expand"} if column.requires_grad else moved_and_inserted(value)
        learned = made_of(value if column.requires_grad else call.values[other], 40)
        of_a_layer = any(v.op in PRODUCTS | CONVOLUTIONS | {"addmm"} and v.shape == value.shape for v in learned)
        if of_a_layer and not inserted_there:
            return column, row if column.requires_grad else column
    return None


def _both_train(call: LossCall) -> bool:
    sides = call.given.get("input"), call.given.get("target")
    return call.name == "difference" and all(isinstance(s, torch.Tensor) and s.requires_grad for s in sides)


def larger_of(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The table of which the loss is made where it takes the larger, or everywhere the smaller, of two differences, as
    a clipped value loss does: the gradient at an entry that is not taken is 0."""
    (w, v), (other_w, other_v) = one, other
    if not w.shape == other_w.shape == v.shape == other_v.shape:
        return None
    mine, theirs, gap = w != 0, other_w != 0, v.abs() - other_v.abs()
    equal = gap.abs() <= 4 * torch.finfo(torch.float32).eps * torch.maximum(v.abs(), other_v.abs())
    sign = torch.where(mine, gap, -gap)[~equal].sign()
    one_way = bool((sign == 1).all()) or bool((sign == -1).all())
    if not one_way or not bool((mine | theirs).all()) or bool((mine & theirs & ~equal).any()):
        return None
    return w + other_w, torch.where(mine, v, other_v)


def sum_over_pairs(weights: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the loss is a sum of squares or of absolute values over the pairs: the gradient at each pair is its
    difference, or its sign, times a factor of its row and one of its column. In a kernel over pairs it is not."""
    sizes = weights.abs()
    if weights.shape != values.shape or not bool(sizes.max() > 0):
        return False
    if bool((((sizes - sizes.max()).abs() <= 1e-4 * sizes.max()) | (sizes == 0)).all()):
        return True
    for factors in (sizes / values.abs().clamp(min=1e-30), sizes):
        if factors.dim() == 2 and bool((factors > 0).all()) and bool(torch.isfinite(factors).all()):
            logs = factors.log()
            if bool((logs - logs.mean(0, keepdim=True) - logs.mean(1, keepdim=True) + logs.mean()).abs().max() <= 1e-3):
                return True
    return False


def rows_times_a_column(call: LossCall) -> Findings:
    """(N,) times (N, 1). Where all pairs count equally the sum is the product of the two sums, and what a row is
    multiplied with has no say. Of log-probabilities it is never intended: a row's belong to its own advantage."""
    row, column = sorted((call.given["input"], call.given["target"]), key=lambda side: side.dim())
    if row.dim() != 1 or tuple(column.shape) != (len(row), 1) or call.weights is None:
        return
    if all(inserted(call.values[name]) for name in ("input", "target")):
        return
    equal = all_equal(call.weights)
    logs = {id(c.made) for c in call.step.calls if c.name.endswith(".log_prob")}
    likely = any(id(v) in logs for name in ("input", "target") for v in made_of(call.values[name], 40))
    if equal or likely:
        left, right, n = tuple(call.given["input"].shape), tuple(call.given["target"].shape), len(row)
        what = "log-probabilities" if likely else "values"
        how = "the gradient at all of them is the same: the sum is that of the one times that of the other"
        how = how if equal else "one side comes from log_prob, of one number for each row"
        sizes: dict[str, Any] = {"left": left, "right": right, "out": (n, n), "pairs": n * n, "rows": n}
        yield call.finds("broadcast", "products", **sizes, what=what, how=how, culprit="product")


def all_equal(weights: torch.Tensor | None) -> bool:
    """Whether all entries have one weight in what is backpropagated."""
    flat = None if weights is None else weights.detach().reshape(-1)
    return flat is not None and flat.numel() > 1 and bool(flat[0] != 0) and bool((flat == flat[0]).all())


def asked_value(call: LossCall, name: str) -> Findings:
    """The value of ``log_prob``: of the shape of the batch and the event, or of fewer axes."""
    value, owner = call.given[name], call.known.owner  # type: ignore[union-attr]
    shape, given = (*owner.batch_shape, *owner.event_shape), tuple(value.shape)
    grown = both_grow(given, shape)
    if grown is None or len(given) == len(shape) or math.prod(given) != math.prod(shape):
        return
    intended = any(inserted(v, 12) for n, v in call.values.items() if n == name or n.startswith("parameter "))
    if not intended or all_equal(call.weights):
        how = "all of them count equally" if intended else "no axis was inserted on either side"
        yield compared(call, given, shape, grown, how, "values")
