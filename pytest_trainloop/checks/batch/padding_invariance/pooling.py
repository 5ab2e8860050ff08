"""Pooling over real positions only: means, sums and maxima over time, what is read at the end, and recurrent nets that
stop where a row ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_trainloop.batches.values import two_valued
from pytest_trainloop.recording.torch_names import POOLS_1D, RECURRENT, REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.batch.padding_invariance.slices import Span

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_REDUCTIONS = REDUCTIONS - {"vector_norm", "std_mean", "var_mean"}
READS = frozenset({"__getitem__", "select"})

SEVERAL = 3
"""Axes that what is pooled has at least: rows, positions and features. With less it is a loss of each position."""


def pooled(name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> Any:
    """What the call returns over real positions only; None where it has no padded ones."""
    if name in RECURRENT:
        return _recurrent(call, args, kwargs, span)
    given = args[0] if args else kwargs.get("input")
    if not isinstance(given, torch.Tensor):
        return None
    if name == "embedding_bag":
        real = span.of(given.shape[1]) if given.dim() == 2 and kwargs.get("per_sample_weights") is None else None
        return None if real is None else call((_narrowed(given, 1, real), *args[1:]), kwargs)
    if not given.is_floating_point() or not given.requires_grad:
        return None
    if name in _REDUCTIONS and given.dim() >= SEVERAL:
        return _reduced(call, given, args, kwargs, span)
    if name in POOLS_1D:
        return _pooled(name, given, args, kwargs, span)
    if name in READS:
        return _read(name, given, args, span)
    return None


def averaged(name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> Any:
    """What a mean of losses by position gives over real positions only, where padded ones are exactly zero already: the
    same sum with another divisor; also without a gradient, as of a reference model. None for any other call."""
    given = args[0] if args else kwargs.get("input")
    if name != "mean" or not isinstance(given, torch.Tensor) or given.dim() >= SEVERAL:
        return None
    if not given.is_floating_point() or (not given.requires_grad and two_valued(given)):
        return None  # a mask
    real = next((r for size in given.shape[1:] if (r := span.of(size)) is not None), None)
    if real is None or bool(given.detach()[:, : real[0]].any() or given.detach()[:, real[1] :].any()):
        return None
    return _reduced(call, given, args, kwargs, span)


def _narrowed(tensor: torch.Tensor, axis: int, real: tuple[int, int]) -> torch.Tensor:
    return tensor.narrow(axis, real[0], real[1] - real[0])


def _reduced(call: Call, given: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> Any:
    dims = next((kwargs[k] for k in ("dim", "axis") if k in kwargs), args[1] if len(args) > 1 else None)
    chosen = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, (tuple, list)) else []
    if len(chosen) > 1 and any(dim % given.dim() == 0 for dim in chosen):
        return None  # over rows too: a statistic of the batch
    for dim in chosen:
        if (real := span.of(given.shape[dim])) is not None:
            return call((_narrowed(given, dim, real), *args[1:]), {k: v for k, v in kwargs.items() if k != "input"})
    return None


def _pooled(name: str, given: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> Any:
    """Pools that make one of all positions."""
    size, real = args[1] if len(args) > 1 else None, span.of(given.shape[-1])
    size = next((kwargs[k] for k in ("output_size", "kernel_size") if k in kwargs), size)
    size = size[0] if isinstance(size, (tuple, list)) and len(size) == 1 else size
    adaptive = name.startswith("adaptive")
    if real is None or size != (1 if adaptive else given.shape[-1]):
        return None
    pool = getattr(F, name)
    return pool(_narrowed(given, -1, real), 1 if adaptive else real[1] - real[0])


def _read(name: str, given: torch.Tensor, args: tuple[Any, ...], span: Span) -> Any:
    """The first or the last position, read from where the padding stands."""
    index = _index(name, given, args)
    for number, axis in _axes(given, index):
        real = span.of(given.shape[axis])
        other = _at_the_end(index[number], given.shape[axis], real) if real is not None else None
        if real is not None and other is not None:
            inside = (*index[:number], other, *index[number + 1 :])
            return _narrowed(given, axis, real)[inside]
    return None


def _index(name: str, given: torch.Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if name == "select":
        plain = len(args) == 3 and all(isinstance(a, int) for a in args[1:])
        return (*[slice(None)] * (args[1] % given.dim()), args[2]) if plain else ()
    return args[1] if isinstance(args[1], tuple) else (args[1],)


def _axes(given: torch.Tensor, index: tuple[Any, ...]) -> Iterator[tuple[int, int]]:
    """The place of each item of an index and the axis that it picks from, up to the first tensor."""
    axis = 0
    for number, item in enumerate(index):
        if item is Ellipsis:
            axis = given.dim() - sum(i is not None for i in index[number + 1 :])
        elif isinstance(item, torch.Tensor) or axis >= given.dim():
            return
        elif item is not None:
            yield number, axis
            axis += 1


def _at_the_end(item: Any, size: int, real: tuple[int, int]) -> Any:
    """The same end among the real positions, where an index reads one that is padding."""
    if (
        isinstance(item, slice)
        and item.step in (None, 1)
        and item.stop in (None, size)
        and item.start in (-1, size - 1)
    ):
        return slice(-1, None) if real[1] < size else None
    if not isinstance(item, int) or isinstance(item, bool):
        return None
    if item in (-1, size - 1) and real[1] < size:
        return -1
    return 0 if item in (0, -size) and real[0] > 0 else None


def _recurrent(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> Any:
    """The net over the real positions, and zeros beyond, as unpacking leaves them."""
    given = args[0]
    packed = len(args) < 2 or (isinstance(args[1], torch.Tensor) and not args[1].is_floating_point())
    if packed or given.dim() != 3:
        return None
    axis = 1 if args[-1] else 0
    real = span.of(given.shape[axis])
    if real is None:
        return None
    out, *states = call((_narrowed(given, axis, real), *args[1:]), kwargs)
    before, after = real[0], given.shape[axis] - real[1]
    sides = (0, 0, before, after) if axis == 1 else (0, 0, 0, 0, before, after)
    return (F.pad(out, sides), *states)
