"""Runs in float64 by construction (RULINGS R3).

The default dtype is float64 before the user's function runs; a dispatch mode turns every lower floating ``dtype=`` of
building and ``fit`` into float64
and widens lower operands that meet float64 ones; gradient scalers are switched off (their factor is 1). Whether every
result was float64 is told.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from pytest_trainloop import batch as nests
from pytest_trainloop.observe.taps import Taps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.loop import TrainLoop

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


class _Promote(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every floating dtype that an operation is asked for becomes float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lower_seen = False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(_wide_dtype, (args, kwargs or {}))
        if _mixed(args):
            written = {
                i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
            }
            args = tuple(a if i in written else tree_map(_wide, a) for i, a in enumerate(args))
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.dtype in _WIDER:
            self.lower_seen = True
        return out


def _wide_dtype(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _wide(value: Any) -> Any:
    return value.to(_WIDER[value.dtype]) if isinstance(value, torch.Tensor) and value.dtype in _WIDER else value


def _mixed(args: Iterable[Any]) -> bool:
    dtypes = {
        t.dtype for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, torch.Tensor)
    }
    return bool(dtypes & set(_WIDER)) and bool(dtypes & {torch.float64, torch.complex128})


@contextlib.contextmanager
def double_precision() -> Iterator[_Promote]:
    """Build and run in float64 inside; the caller preserves the default dtype."""
    taps = Taps()
    taps.put(GradScaler, "__init__", _switched_off)
    torch.set_default_dtype(torch.float64)
    try:
        with _Promote() as mode:
            yield mode
    finally:
        taps.remove()
        torch.set_default_dtype(torch.float32)


def _switched_off(original: Callable[..., None]) -> Callable[..., None]:
    def init(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args[:5], **{**kwargs, "enabled": False})

    return init


def widen(loop: TrainLoop) -> None:
    """Parameters and buffers that were made in a lower precision all the same (from numpy, from a file)."""
    for module in loop.modules.values():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dtype in _WIDER and not torch.nn.parameter.is_lazy(tensor):
                tensor.data = tensor.data.to(_WIDER[tensor.dtype])


def widen_batch(batch: Any) -> Any:
    """The same batch with its floating tensors in float64."""
    if isinstance(batch, torch.Tensor):
        return _wide(batch)
    for tensor in nests.tensors(batch):
        if tensor.dtype in _WIDER:
            tensor.data = tensor.data.to(_WIDER[tensor.dtype])
    return batch
