"""Runs in float64 by construction (docs/how-it-decides.md#float64-by-construction).

The default dtype is float64 before the user's function runs; a dispatch mode turns every lower floating ``dtype=`` of
building and ``fit`` into float64 and widens lower operands that meet float64 ones; gradient scalers are switched off
(their factor is 1). The mode names the operations that gave a lower precision all the same.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler

from pytest_trainloop.core import members
from pytest_trainloop.declare import memory_layout, nested
from pytest_trainloop.recording.function_mode import OperationMode, tensors_in
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_internals import REBUILDS, aliased_arguments, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.declare.loop import TrainLoop

WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
"""What a run in float64 computes in, in place of a lower precision."""


class _Promote(OperationMode):  # type: ignore[no-untyped-call]
    """Turns floating ``dtype=`` arguments into float64, and lower operands of operations whose result is no view.

    ``lower`` names the first operations that gave a lower precision all the same, ``asked`` the dtypes below float32
    that were asked for and turned into float64.
    """

    changes = True
    supports_higher_order_operators = False

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[torch.dtype] = set()
        self.lower: dict[str, None] = {}
        self.copying = 0

    def halves(self) -> tuple[str, ...]:
        """The dtypes of 16 bits and fewer among those that were asked for, by name."""
        return tuple(
            sorted(str(t).removeprefix("torch.") for t in self.asked if t.is_floating_point and t.itemsize < 4)
        )

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.copying:
            return passed_on(func, args, kwargs)
        if not _any_to_widen(args) and not (kwargs and _any_to_widen(kwargs.values())):
            out = passed_on(func, args, kwargs)
            if isinstance(out, torch.Tensor) and out.dtype not in WIDER:
                return out
            return self._noted(func, out)
        return self._widened(func, args, kwargs)

    def _widened(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.asked.update(value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype))
        args = tuple(map(_wide_dtype, args))
        kwargs = {name: _wide_dtype(value) for name, value in kwargs.items()}
        aliased, written = aliased_arguments(func)
        if func is torch.ops.aten.copy_.default:
            return passed_on(func, args, kwargs)  # it converts by itself
        if any(t.dtype in WIDER for t in tensors_in(args)) and (not aliased or _mixed(args)):
            args = tuple(a if i in written or i in aliased else tree_map(_wide, a) for i, a in enumerate(args))
        out = passed_on(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default and not aliased:
            out = tree_map(_wide, out)
        return self._noted(func, out)

    def _noted(self, func: Any, out: Any) -> Any:
        """The result, after a look whether it is of a lower precision."""
        if not aliased_arguments(func)[0]:
            for tensor in tensors_in(out):
                if tensor.dtype in WIDER and len(self.lower) < MOST_NAMED:
                    self.lower[f"{func} gave {str(tensor.dtype).removeprefix('torch.')}"] = None
        return out


MOST_NAMED = 8
"""Operations that are named at most."""


def _wide_dtype(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _wide(value: Any) -> Any:
    return value.to(WIDER[value.dtype]) if isinstance(value, torch.Tensor) and value.dtype in WIDER else value


def _any_to_widen(args: Iterable[Any]) -> bool:
    """Whether a tensor of a lower dtype is among the arguments, or a dtype: seldom, and this is asked of each call."""
    for value in args:
        if isinstance(value, torch.Tensor):
            if value.dtype in WIDER:
                return True
        elif isinstance(value, (list, tuple)):
            if _any_to_widen(value):
                return True
        elif isinstance(value, torch.dtype):
            return True
    return False


def _mixed(args: Iterable[Any]) -> bool:
    dtypes = {t.dtype for t in tensors_in(args)}
    return bool(dtypes & set(WIDER)) and bool(dtypes & {torch.float64, torch.complex128})


@contextlib.contextmanager
def double_precision() -> Iterator[_Promote]:
    """Build and run in float64 inside; the caller preserves the default dtype."""
    with double_by_default(), promoting() as mode:
        yield mode


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    """Float64 is the default dtype, and gradient scalers are switched off; no mode is on, so that what is compiled in
    here is compiled as ever. The caller preserves the default dtype."""
    with patched(GradScaler, "__init__", _switched_off):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def promoting() -> Iterator[_Promote]:
    """The mode that turns what asks for a lower precision into float64."""
    with _Promote() as mode:
        as_it_is = functools.partial(_made_as_it_is, mode)
        with patched(torch.Tensor, "__deepcopy__", as_it_is), patched(*REBUILDS, as_it_is):
            yield mode


def _made_as_it_is(mode: _Promote, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Deep copies, and tensors that are read from a file, are an empty tensor of a dtype that is laid over a storage:
    neither may be widened alone."""

    def made(*args: Any) -> torch.Tensor:
        mode.copying += 1
        try:
            return original(*args)
        finally:
            mode.copying -= 1

    made.__name__ = "deepcopy"  # modes know it by this name
    return made


def _switched_off(original: Callable[..., None]) -> Callable[..., None]:
    def init(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args[:5], **{**kwargs, "enabled": False})

    return init


def widen(loop: TrainLoop) -> None:
    """Widen parameters and buffers that were built in a lower precision all the same (from numpy, from a file)."""
    held: list[torch.Tensor] = []
    for module in loop.modules.values():
        held += (*members.parameters(module), *members.buffers(module))
    memory_layout.cast(held, WIDER)


def widen_batch(batch: Any) -> Any:
    """The same batch with its floating tensors in float64."""
    if isinstance(batch, torch.Tensor):
        return _wide(batch)
    memory_layout.cast(nested.tensors(batch), WIDER)
    return batch
