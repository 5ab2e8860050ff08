"""What the operations that a function mode sees are given and write to."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.recording.samples import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def floats(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The dense floating ones that hold entries which can be read and computed with."""
    return [t for t in tensors if t.dtype in _COMPUTED and is_dense(t) and t.numel() and readable(t)]


_COMPUTED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Torch has hardly any function for the floating dtypes of 8 bits and fewer."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an entry at each place: no sparse, nested or jagged one."""
    return tensor.layout is torch.strided and not tensor.is_nested


def in_place(name: str) -> bool:
    """Whether an operation of this name writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def _signature(func: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(func)
    except (TypeError, ValueError):
        return None


def bound_arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults included."""
    signature = _signature(func)
    if signature is None:
        return dict(zip(("input", "target"), args, strict=False)) | kwargs
    try:
        given = signature.bind(*args, **kwargs)
    except TypeError:
        return {}
    given.apply_defaults()
    return dict(given.arguments)


def takes_data(module: nn.Module, args: Any) -> bool:
    """Whether this is a layer where data may come in."""
    own = any(True for _ in members.parameters(module, recurse=False))
    return bool(own and args and not any(True for _ in members.children(module)))


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a module is called with, by the names of its ``forward``'s parameters; by number where these are not
    known."""
    try:
        signature = inspect.signature(module.forward)
        given = dict(signature.bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {str(number): value for number, value in enumerate(args)} | kwargs
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given
