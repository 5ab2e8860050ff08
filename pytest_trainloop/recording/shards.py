"""What this process holds of a tensor that is spread over ranks (DTensor: FSDP2, tensor parallelism)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.recording.torch_internals import has_values, writes_in_place

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = (torch.Tensor, nn.Parameter)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a ``DTensor``. The package that defines it takes a second to import: without it there are
    none."""
    if type(tensor) in _PLAIN:
        return False
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a ``DTensor`` that this process holds, without communication; any other tensor as it is."""
    if not is_distributed(tensor):
        return tensor
    spread: Any = tensor
    with torch.no_grad():
        part: torch.Tensor = spread.to_local()
    return part


def address(tensor: torch.Tensor) -> int:
    """The address of a tensor's first entry in this process (of a ``DTensor`` that of the local part). 0 for a tensor
    without memory of its own: sparse, nested, lazy, on the meta device, empty, or inside a transform of functorch."""
    if nn.parameter.is_lazy(tensor) or not has_values(tensor):
        return 0
    part = local(tensor)
    if part.layout is not torch.strided or part.is_nested or part.numel() == 0:
        return 0
    try:
        return part.data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper of a library's own, without a storage
        return 0


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether this process holds all of the tensor's value: no shard, and no term of a sum over ranks."""
    if not is_distributed(tensor):
        return True
    spread: Any = tensor
    return spread.device_mesh.size() == 1 or all(placement.is_replicate() for placement in spread.placements)


class GradientsByHand:
    """Gradients that a backward pass brings to ``DTensor`` parameters past autograd's hooks on them.

    FSDP2 trains gathered copies of its shards: their gradients are reduced, and written to the shards' ``.grad``.
    """

    def __init__(self, parameters: list[torch.Tensor], elsewhere: frozenset[int] = frozenset()) -> None:
        self._before = {
            i: _present(p.grad)
            for i, p in enumerate(parameters)
            if is_distributed(p) and p.requires_grad and i not in elsewhere
        }

    def arrived(self, parameters: list[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """The index of each parameter that got one, what came, and what ``.grad`` held before: this process' part."""
        for index, before in self._before.items():
            grad = parameters[index].grad
            if grad is None:
                continue
            now = local(grad)
            if before is not None and (id(now), writes_in_place(now)) == before[:2]:
                continue
            residual = None if before is None else before[2]
            added = now if residual is None or residual.shape != now.shape else now - residual
            yield index, added, residual


def _present(grad: torch.Tensor | None) -> tuple[int, int, torch.Tensor] | None:
    if grad is None:
        return None
    now = local(grad)
    return id(now), writes_in_place(now), now.detach().clone()
