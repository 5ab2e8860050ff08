"""Operations that losses are written with, under the names by which they are judged."""

from __future__ import annotations

from typing import Any

import torch

from pytest_trainloop.checks.loss.loss_contract import broadcasting

OPERATIONS = frozenset("log_softmax logsumexp log_sigmoid log log1p softplus gather sub rsub __sub__ mul div".split())
"""Operations that losses are written with."""


def operation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """An operation that losses are written with, under the name by which it is judged, and its arguments.

    "product" is a product of two tensors of one shape; "difference" and "outer" are a difference and a product (or a
    quotient) in which both sides are broadcast. Other sums and products are not judged, and have no arguments.
    """
    given = args[0] if args else kwargs.get("input")
    if not isinstance(given, torch.Tensor):
        return name, {}
    if name in ("sub", "rsub", "mul", "div", "__sub__"):
        other = args[1] if len(args) > 1 else kwargs.get("other")
        if not isinstance(other, torch.Tensor):
            return name, {}
        sides = {"input": given, "target": other}
        if name == "mul" and given.shape == other.shape and given.dim() > 1:
            return "product", sides
        if not broadcasting.both_grow((tuple(given.shape), tuple(other.shape))):
            return name, {}
        return "outer" if name in ("mul", "div") else "difference", sides
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(dim, int):
        dim = dim % max(given.dim(), 1)
    if name == "gather":
        return name, {"input": given, "dim": dim, "index": args[2] if len(args) > 2 else kwargs.get("index")}
    if name in ("log_softmax", "logsumexp"):
        dim = given.dim() - 1
    return name, {"input": given, "dim": dim}
