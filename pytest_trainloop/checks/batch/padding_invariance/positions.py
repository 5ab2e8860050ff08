"""Positions that are counted from the first real one: tables of positions, looked up or cut to length."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pytest_trainloop.checks.batch.padding_invariance.slices import Span

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def counted_from_first(name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> Any:
    """What a table of positions gives where padding on the left has none of its own; None for any other call."""
    if name == "embedding":
        ids = args[0] if args else kwargs.get("input")
        moved = _moved(ids, span)
        if moved is None:
            return None
        return call((moved, *args[1:]), kwargs) if args else call((), {**kwargs, "input": moved})
    if name == "__getitem__" and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return _of_table(call, args[0], args[1], span)
    return None


def entries(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of entries of the table that a call reads."""
    if name == "embedding":
        return len(args[1] if len(args) > 1 else kwargs["weight"])
    shape: tuple[int, ...] = args[0].shape
    return max(shape[:-1])


def _moved(ids: Any, span: Span) -> torch.Tensor | None:
    """Positions that count up by one in every row alike, counted from the first real one."""
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dim() < 1 or ids.dtype is torch.bool:
        return None
    real = span.of(ids.shape[-1])
    flat = ids.reshape(-1, ids.shape[-1])
    if real is None or not real[0] or not bool((flat.diff(dim=1) == 1).all()) or not bool((flat == flat[:1]).all()):
        return None
    return (ids - real[0]).clamp(min=int(ids.min()))


def _of_table(call: Call, table: torch.Tensor, index: Any, span: Span) -> torch.Tensor | None:
    if table.grad_fn is not None or table.dim() < 2:
        return None
    items = index if isinstance(index, tuple) else (index,)
    for number, item in enumerate(items):
        if isinstance(item, torch.Tensor) and (moved := _moved(item, span)) is not None:
            found = call((table, (*items[:number], moved, *items[number + 1 :])), {})
            return found if isinstance(found, torch.Tensor) else None
    from_first = [i for i in items if isinstance(i, slice) and i.start in (None, 0) and isinstance(i.stop, int)]
    out: torch.Tensor = call((table, index), {})
    for item in from_first:
        real = span.of(item.stop)
        axis = next((a for a in range(out.dim()) if out.shape[a] == item.stop), None)
        if real is not None and real[0] and axis is not None:
            return out.roll(real[0], axis)
    return None
