"""Subclasses of a project's own and of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.calls.kinds import grads, kind, net

if TYPE_CHECKING:
    pass


class Named(torch.Tensor):
    """A subclass of a project's own that sees calls by ``__torch_function__``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """A wrapper of a project's own around a tensor that it holds, by ``__torch_dispatch__``."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device, requires_grad=held.requires_grad
        )
        made.held = held.detach()
        return made

    def __repr__(self, **_options: Any) -> str:
        return f"Wrapped({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in str(func) or "aminmax" in str(func):
            raise NotImplementedError(f"{func} is not for this tensor")
        plain = torch.utils._pytree.tree_map(lambda a: a.held if isinstance(a, Wrapped) else a, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return torch.utils._pytree.tree_map(lambda o: Wrapped(o) if isinstance(o, torch.Tensor) else o, out)


@kind
def a_subclass_that_sees_calls() -> Any:
    x, model = torch.randn(3, 4).as_subclass(Named), net()
    out = model(x)
    loss = F.cross_entropy(out, torch.tensor([0, 1, 2]))
    loss.backward()
    return x, out, loss, grads(model), x[0], x.sum(), x + 1, x.t(), repr(x), type(x @ x.t()).__name__, x.tolist()


@kind
def a_wrapper_subclass() -> Any:
    x = Wrapped(torch.randn(3, 4))
    weight = torch.randn(4, 2, requires_grad=True)
    out = torch.relu(x @ weight.detach())
    return (
        x,
        out,
        x + 1,
        x.sum(),
        x.t(),
        x.exp().mean(),
        repr(x),
        torch.cat([x, x]),
        x[0],
        x.softmax(-1),
        F.mse_loss(x, x + 1),
    )


@kind
def a_wrapper_that_refuses() -> Any:
    x = Wrapped(torch.randn(3, 4))
    try:
        return x.norm()
    except NotImplementedError as error:
        return error


@kind
def distributed_tensors() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
    w = nn.Parameter(distribute_tensor(torch.randn(4, 2), mesh, [Replicate()]))
    optimizer = torch.optim.AdamW([w], lr=0.1)
    out = (x @ w).relu()
    loss = out.to_local().pow(2).sum()
    loss.backward()
    optimizer.step()
    whole = DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).full_tensor()
    return x.to_local(), out.to_local(), loss, x.grad.to_local(), w.grad.to_local(), w.to_local(), whole, out.placements


@kind
def masked_tensors() -> Any:
    from torch.masked import masked_tensor

    x = masked_tensor(torch.randn(3, 4), torch.rand(3, 4) > 0.5)
    return x, x + x, x.sum(1), x * 2, x.get_data(), x.get_mask(), x.to_tensor(0.0), x.exp(), x.amax(1)


@kind
def parameters_of_a_subclass() -> Any:
    weight = nn.Parameter(torch.randn(4, 2).as_subclass(Named))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        (torch.ones(3, 4) @ weight).pow(2).mean().backward()
        optimizer.step()
    return weight, weight.grad, optimizer.state_dict()["state"]
