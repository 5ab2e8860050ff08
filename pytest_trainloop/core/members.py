"""The parameters, buffers and submodules that are registered in a module. Without torch.

The methods of ``nn.Module`` for this belong to the project, which overrides them: ``parameters(self)`` that takes no
``recurse``, ``self.modules = [...]``, ``children()`` with another meaning. What is read here is what torch has
registered. The order and the names are those of the methods of ``nn.Module``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn


def named_modules(
    module: nn.Module, prefix: str = "", *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """The module and all below it, by their paths; a module that is registered twice by its first one."""
    return _walk(module, prefix, set() if remove_duplicate else None)


def _walk(module: nn.Module, path: str, met: set[int] | None) -> Iterator[tuple[str, nn.Module]]:
    if met is not None:
        if id(module) in met:
            return
        met.add(id(module))
    yield path, module
    for name, child in tuple(module._modules.items()):
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name, met)


def modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all below it, each once."""
    return (found for _, found in named_modules(module))


def named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules directly below this one, each once."""
    met: set[int] = set()
    for name, child in tuple(module._modules.items()):
        if child is not None and id(child) not in met:
            met.add(id(child))
            yield name, child


def children(module: nn.Module) -> Iterator[nn.Module]:
    """The modules directly below this one, each once."""
    return (child for _, child in named_children(module))


def named_parameters(
    module: nn.Module, prefix: str = "", *, recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their paths; a tied one by its first path, unless duplicates are asked for."""
    return _tensors(module, prefix, recurse, remove_duplicate, "_parameters")


def parameters(module: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Parameters, each once."""
    return (parameter for _, parameter in named_parameters(module, recurse=recurse))


def named_buffers(
    module: nn.Module, prefix: str = "", *, recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers by their paths; one that is registered twice by its first path, unless duplicates are asked for."""
    return _tensors(module, prefix, recurse, remove_duplicate, "_buffers")


def buffers(module: nn.Module, *, recurse: bool = True) -> Iterator[torch.Tensor]:
    """Buffers, each once."""
    return (buffer for _, buffer in named_buffers(module, recurse=recurse))


def _tensors(
    module: nn.Module, prefix: str, recurse: bool, remove_duplicate: bool, kind: str
) -> Iterator[tuple[str, nn.Parameter]]:
    met: set[int] = set()
    inside = named_modules(module, prefix, remove_duplicate=remove_duplicate) if recurse else iter(((prefix, module),))
    for path, part in inside:
        for name, tensor in tuple(getattr(part, kind).items()):
            if tensor is None or (remove_duplicate and id(tensor) in met):
                continue
            met.add(id(tensor))
            yield f"{path}.{name}" if path else name, tensor
