"""Transforms, compilers and custom functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.calls.kinds import data, grads, kind, net

if TYPE_CHECKING:
    pass


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


@kind
def transforms() -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    x = torch.randn(3, 4)
    func = torch.func
    return (
        *(func.grad(f)(x[0]), func.vmap(func.grad(f))(x), func.jacrev(torch.sin)(x[0]), func.jacfwd(torch.tanh)(x[0])),
        *(func.hessian(f)(x[0]), func.vjp(torch.exp, x)[0], func.jvp(torch.exp, (x,), (x,))),
        func.vmap(lambda row: F.mse_loss(row, row * 2))(x),
    )


@kind
def gradients_of_each_example() -> Any:
    model, (x, y) = net(), data()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)


@kind
def conditions() -> Any:
    x = torch.randn(3, requires_grad=True)
    out = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
    return out, torch.cond(torch.tensor(True), torch.sin, torch.cos, (x.detach(),))


@kind
def own_functions() -> Any:
    x = torch.randn(3, requires_grad=True)
    out = Doubled.apply(x)
    out.sum().backward()
    return out, x.grad, torch.autograd.gradcheck(Doubled.apply, torch.randn(2, dtype=torch.double, requires_grad=True))


@kind
def second_derivatives() -> Any:
    x = torch.randn(3, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first, second, torch.autograd.functional.hessian(lambda x: (x**3).sum(), x.detach())


@kind
def checkpoints() -> Any:
    results: list[Any] = []
    for reentrant in (False, True):
        torch.manual_seed(1)
        model, x = (
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
            torch.randn(3, 4, requires_grad=True),
        )
        out = checkpoint(model, x, use_reentrant=reentrant)
        out.sum().backward()
        results += [out, x.grad, grads(model)]
    return results


@kind
def compiled() -> Any:
    model, (x, y) = net(), data()
    out = torch.compile(model, backend="eager")(x)
    loss = torch.compile(lambda out: F.cross_entropy(out, y), backend="eager")(out)
    loss.backward()
    return out.detach(), loss.detach(), grads(model)


@kind
def traced() -> Any:
    model, (x, _) = net(), data()
    made = torch.jit.trace(model, x)
    return made(x), str(made.inlined_graph).count("\n"), torch.fx.symbolic_trace(model).code


@kind
def scripted() -> Any:
    model, (x, _) = net(), data()
    out = torch.jit.script(model)(x)
    out.sum().backward()
    return out.detach(), grads(model)


@kind
def exported() -> Any:
    model, (x, _) = net(), data()
    program = torch.export.export(model, (x,))
    return program.module()(x), [str(node.target) for node in program.graph.nodes]


@kind
def proxies() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: (x.sin() @ x).softmax(0))(torch.randn(3, 3)).code
