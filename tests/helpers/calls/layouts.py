"""Sparse, nested, meta, fake and quantized tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from tests.helpers.calls.kinds import grads, kind, net

if TYPE_CHECKING:
    pass


class SparseProduct(torch.autograd.Function):
    """As pyGAT has it: the sparse matrix is made inside."""

    @staticmethod
    def forward(ctx: Any, indices: Any, values: Any, shape: Any, b: Any) -> torch.Tensor:
        a = torch.sparse_coo_tensor(indices, values, shape)
        ctx.save_for_backward(a, b)
        ctx.n = shape[0]
        return torch.matmul(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        dense = gradient.matmul(b.t())
        edges = a._indices()[0, :] * ctx.n + a._indices()[1, :]
        return None, dense.view(-1)[edges], None, a.t().matmul(gradient)


def _adjacency() -> torch.Tensor:
    return torch.randn(5, 5).relu()


@kind
def sparse_coo() -> Any:
    dense = _adjacency()
    a, w = dense.to_sparse(), torch.randn(5, 3, requires_grad=True)
    loose = torch.sparse_coo_tensor(torch.tensor([[0, 0, 1], [1, 1, 2]]), torch.tensor([1.0, 2.0, 3.0]), (3, 3))
    out = torch.sparse.mm(a, w)
    out.sum().backward()
    return (
        *(
            a,
            out,
            w.grad,
            torch.spmm(a, w),
            a @ w.detach(),
            loose,
            loose.coalesce(),
            loose + loose,
            loose.t(),
            loose * 2,
        ),
        *(
            torch.sparse.sum(a),
            torch.sparse.sum(a, 0),
            torch.sparse.softmax(a, 1),
            a.to_dense(),
            a.is_coalesced(),
            a._nnz(),
        ),
    )


@kind
def sparse_rows_and_columns() -> Any:
    dense, w = _adjacency(), torch.randn(5, 2)
    made = [dense.to_sparse_csr(), dense.to_sparse_csc(), torch.randn(4, 4).relu().to_sparse_bsr((2, 2))]
    products = [made[0] @ w, torch.mv(made[0], w[:, 0]), made[2] @ torch.randn(4, 2), torch.sparse.mm(made[0], w)]
    return made, products, [m.to_dense() for m in made], made[0].values(), made[0].crow_indices(), made[0] * 2


@kind
def sparse_that_trains() -> Any:
    a = _adjacency().to_sparse().requires_grad_()
    b = torch.randn(5, 2, requires_grad=True)
    torch.sparse.mm(a, b).pow(2).sum().backward()
    return a, a.grad, b.grad


@kind
def graph_convolution() -> Any:
    """As pygcn has it."""
    adjacency, w = _adjacency().to_sparse(), nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.Adam([w], lr=0.01, weight_decay=5e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        hidden = torch.spmm(adjacency, torch.randn(5, 4) @ w)
        losses.append(F.nll_loss(F.log_softmax(hidden, 1), torch.arange(5) % 3))
        losses[-1].backward()
        optimizer.step()
    return losses, w


@kind
def graph_attention() -> Any:
    """As pyGAT has it."""
    edges = _adjacency().nonzero().t()
    values, h = torch.rand(edges.shape[1], requires_grad=True), torch.randn(5, 3, requires_grad=True)
    rows = SparseProduct.apply(edges, values, torch.Size([5, 5]), torch.ones(5, 1))
    out = SparseProduct.apply(edges, values, torch.Size([5, 5]), h) / (rows + 1)
    out.sum().backward()
    return out, rows, values.grad, h.grad


@kind
def sparse_embeddings() -> Any:
    table = nn.Embedding(10, 3, sparse=True)
    bag = nn.EmbeddingBag(10, 3, mode="sum", sparse=True)
    optimizers = [torch.optim.SparseAdam(table.parameters()), torch.optim.SGD(bag.parameters(), lr=0.1)]
    losses = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ids = torch.randint(0, 10, (4, 2))
        losses.append((table(ids).sum(1) - bag(ids)).pow(2).mean())
        losses[-1].backward()
        for optimizer in optimizers:
            optimizer.step()
    return losses, table.weight, bag.weight, table.weight.grad, bag.weight.grad


@kind
def nested_strided() -> Any:
    x = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], requires_grad=True)
    model = nn.Linear(4, 2)
    out = model(x)
    padded = torch.nested.to_padded_tensor(out, 0.0)
    padded.sum().backward()
    return x, out, padded, grads(model), list(out.unbind()), x.is_nested, out.softmax(-1)


@kind
def nested_jagged() -> Any:
    x = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged, requires_grad=True)
    model = nn.Linear(4, 2)
    out = model(x).relu() * 2
    out.values().sum().backward()
    return (
        out.values(),
        out.offsets(),
        grads(model),
        list(out.unbind()),
        x.size(0),
        torch.nested.to_padded_tensor(x, 0.0),
    )


@kind
def without_values() -> Any:
    with torch.device("meta"):
        model, x = net(), torch.randn(6, 4)
    out = model(x)
    out.sum().backward()
    return out, grads(model), x.t(), x @ x.t(), model[0].weight, x.to(torch.half), torch.empty_like(x)


@kind
def fake_tensors() -> Any:
    with FakeTensorMode() as mode:
        model, x = net(), torch.randn(6, 4)
        out = model(x)
        out.sum().backward()
        return [mode.from_tensor(torch.ones(2)), out, x.t(), out.softmax(-1), *grads(model)]


@kind
def quantized() -> Any:
    x = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 10, torch.quint8)
    y = torch.quantize_per_channel(torch.randn(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8)
    return x, y, x.dequantize(), x.int_repr(), x.reshape(-1), x[0], x.relu(), x.q_scale(), y.dequantize(), x.clone()
