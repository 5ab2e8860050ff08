"""Calls that make whole numbers of fractions: an integer division, a cast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.tracing.call_log import Call

_CUTTING = {
    "floor_divide",
    "__floordiv__",
    "floordiv",
    "__rfloordiv__",
    "div",
    "divide",
    "long",
    "int",
    "short",
    "to",
    "type",
}


def cuts(call: Call) -> bool:
    """Whether a call makes 0 of some numbers that are not, by taking their fractions away."""
    given, made = call.inputs[:1], call.outputs[:1]
    if call.name not in _CUTTING or not given or not made or made[0].zeros <= given[0].zeros or not made[0].whole:
        return False
    return "div" in call.name or not (given[0].whole or made[0].floating)


def with_fractions(call: Call) -> Callable[..., Any]:
    """What takes the place of its result: the numbers with their fractions."""
    return _true_division if "div" in call.name else as_given


def as_given(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor as it was given, with its history where one has any."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    return next((t for t in tensors if t.requires_grad), tensors[0])


def _true_division(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    one, other = args[:2] if len(args) > 1 else (args[0], kwargs["other"])
    by_tensor = getattr(func, "__name__", "") == "__rfloordiv__"
    return other / one if by_tensor else torch.true_divide(one, other)
