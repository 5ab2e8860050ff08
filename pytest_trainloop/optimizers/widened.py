"""What a copy of an optimizer computes in low precision, computed in float32 instead.

Not float64: code that rounds by itself works on the bits of float32 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.torch_internals import DispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HALVES = (torch.bfloat16, torch.float16)


class NoHalves(DispatchMode):  # type: ignore[no-untyped-call]
    """Every half-precision dtype that an operation is asked for becomes float32."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(_dtype, args), **{name: _dtype(value) for name, value in (kwargs or {}).items()})


def _dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in HALVES else value


def widen(root: Any) -> None:
    """Every half-precision tensor that is reached through containers and attributes becomes float32, in place."""
    for tensor in reached(root):
        if tensor.dtype in HALVES:
            tensor.data = tensor.data.float()


def reached(root: Any) -> Iterator[torch.Tensor]:
    """Every tensor that is reached through containers and attributes, once."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, ModuleType)):
            waiting.append(vars(value))
