"""How the entries of tensors lie in memory: strides, offsets, and storage that several tensors share.

A run of ours must lay out what a project made as the project laid it out. ``reshape`` and ``contiguous`` give a view or
a copy by the layout alone, so that code which writes to their result works in one layout and not in another.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LARGE = 2**20
"""Entries of a storage up to which all of it is copied for one view into it."""


def cast(tensors: Iterable[torch.Tensor], wider: Mapping[torch.dtype, torch.dtype]) -> None:
    """Give tensors their dtype in ``wider`` in place, those of one storage together: they share one afterwards too."""
    chosen = {id(t): t for t in tensors if t.dtype in wider and not torch.nn.parameter.is_lazy(t)}
    users: dict[tuple[int, torch.dtype], int] = {}
    for tensor in chosen.values():
        if _is_strided(tensor):
            users[_memory(tensor)] = users.get(_memory(tensor), 0) + 1
    made: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for tensor in chosen.values():
        if not _is_strided(tensor):
            tensor.data = tensor.data.to(wider[tensor.dtype])
            continue
        memory, whole = _memory(tensor), _entries(tensor)
        if users[memory] == 1 and whole > max(LARGE, 2 * _span(tensor)):
            flat, start = tensor.data.as_strided((_span(tensor),), (1,)), 0
            wide = flat.to(wider[tensor.dtype])
        else:
            start = int(tensor.storage_offset())
            if memory not in made:
                made[memory] = tensor.data.as_strided((whole,), (1,), 0).to(wider[tensor.dtype])
            wide = made[memory]
        tensor.data = wide.as_strided(tensor.size(), tensor.stride(), start)


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor, also into one whose entries share memory (``expand``): equal values then."""
    for axis in range(tensor.dim()) if _is_strided(tensor) else ():
        if tensor.stride(axis) == 0 and tensor.shape[axis] > 1:
            tensor, values = tensor.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
    tensor.copy_(values)


def copied(tensor: torch.Tensor, values: torch.Tensor, memo: dict[int, object]) -> torch.Tensor:
    """A tensor with these values that lies in memory as another one does; those made with one ``memo`` share storage
    where the others do."""
    same_kind = tensor.shape == values.shape and tensor.dtype == values.dtype
    if not same_kind or not _is_strided(tensor) or _entries(tensor) > max(LARGE, 2 * _span(tensor)):
        return laid_out_as(values.clone(), tensor)
    made: torch.Tensor = copy.deepcopy(tensor.detach(), memo)
    write(made, values)
    return made


def laid_out_as(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same values with the axes in the order that they have in the memory of another tensor, and expanded along
    those axes along which that is expanded."""
    if made.dim() != like.dim() or not _is_strided(made) or not _is_strided(like) or like.is_contiguous():
        return made
    spread = [axis for axis, stride in enumerate(like.stride()) if stride == 0 and like.shape[axis] > 1]
    shape = made.shape
    for axis in spread:
        made = made.narrow(axis, 0, min(1, made.shape[axis]))
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda axis: -strides[axis])
    inverse = sorted(range(like.dim()), key=order.__getitem__)
    made = made.permute(order).contiguous().permute(inverse)
    return made.expand(shape) if all(made.shape[axis] for axis in spread) else made


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another layout: contiguous, or with the axes in reverse order where it is that already."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    axes = tuple(range(tensor.dim()))[::-1]
    return tensor.permute(axes).contiguous().permute(axes)


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a memory of its own that can be read: no subclass that keeps others, no sparse one."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _memory(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _entries(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _span(tensor: torch.Tensor) -> int:
    """Entries of the storage from the first of a tensor to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
