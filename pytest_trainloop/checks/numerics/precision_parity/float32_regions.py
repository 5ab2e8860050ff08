"""Counterfactuals: one region of the loop in float32, or the loss scaled."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.precision_parity.replay import LOW
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import apply_of, tree_map
from pytest_trainloop.recording.torch_names import ATTRIBUTES
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.numerics.precision_parity.op_log import Operation
    from pytest_trainloop.recording.watch import Watch


class InFloat32(WatchingMode):
    """Computes in float32, without autocast, what the module of an operation computes (outside of modules: what its
    line computes), whatever dtype is asked for. ``met`` is true once it computed something."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation = operation
        self.met = False

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with super().watching(watch), patched(torch.autograd.Function, "apply", self._patched):
            yield

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ATTRIBUTES | {"backward"} or not self._within():
            return passed_on(func, args, kwargs)
        self.met = True
        with _no_autocast():
            return _in_float32(func, args, kwargs)

    def _within(self) -> bool:
        operation = self._operation
        if operation.custom:
            return False
        return self.watch.module_path() == operation.module if operation.module else here()[0] == operation.place

    def _patched(self, original: Callable[..., Any]) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._operation.custom or cls.__name__ != self._operation.name:
                return passed_on(apply_of(cls, original), args, kwargs)
            self.met = True
            with _no_autocast(), _NoHalves():
                return passed_on(apply_of(cls, original), tree_map(_wide, args), kwargs)

        return classmethod(apply)


class _NoHalves(FunctionMode):
    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _in_float32(func, args, kwargs)


def _in_float32(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call with low-precision operands and dtypes as float32."""
    if func in (torch.Tensor.half, torch.Tensor.bfloat16):
        return args[0].float()
    return passed_on(func, tree_map(_wide, args), tree_map(_wide, kwargs))


class ScaledLoss(FunctionMode):
    """Multiplies every root by ``scale`` before it is backpropagated."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.Tensor.backward and args[0].numel() == 1 and len(args) == 1:
            return func(args[0] * self._scale, **kwargs)
        return passed_on(func, args, kwargs)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False):
        if not torch.cuda.is_available():
            yield
            return
        with torch.autocast("cuda", enabled=False):
            yield


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float32 if value in LOW else value
    if isinstance(value, torch.Tensor) and value.dtype in LOW:
        return value.float()
    return value
