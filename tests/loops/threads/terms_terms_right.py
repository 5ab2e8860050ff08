"""Terms, weights and targets that are right although they look odd."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def mlp(dim, out, width=24):
    return nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, out))


@right(
    "terms",
    "first-order MAML: the gradient at adapted copies of the weights is assigned to the weights themselves",
    thread="katerakelly/pytorch-maml#11",
)
def first_order_maml():
    net = mlp(1, 1, 32)
    meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def tasks(n, rows=4, shots=6):
        g = torch.Generator().manual_seed(121)
        out = []
        for _ in range(n):
            amp = torch.rand(rows, 1, 1, generator=g) * 2 + 0.5
            phase = torch.rand(rows, 1, 1, generator=g) * math.pi
            xs, xq = (torch.rand(rows, shots, 1, generator=g) * 6 - 3 for _ in range(2))
            out.append({"xs": xs, "ys": amp * (xs + phase).sin(), "xq": xq, "yq": amp * (xq + phase).sin()})
        return out

    def fit(batches, inner_lr=0.02, steps=2):
        for b in batches:
            meta_opt.zero_grad()
            grads = [torch.zeros_like(p) for p in net.parameters()]
            rows = len(b["xs"])
            for i in range(rows):
                fast = copy.deepcopy(net)
                for _ in range(steps):
                    loss = F.mse_loss(fast(b["xs"][i]), b["ys"][i])
                    inner = torch.autograd.grad(loss, list(fast.parameters()))
                    with torch.no_grad():
                        for p, g in zip(fast.parameters(), inner, strict=True):
                            p.sub_(inner_lr * g)
                outer = torch.autograd.grad(F.mse_loss(fast(b["xq"][i]), b["yq"][i]), list(fast.parameters()))
                for total, g in zip(grads, outer, strict=True):
                    total.add_(g / rows)
            for p, g in zip(net.parameters(), grads, strict=True):
                p.grad = g
            meta_opt.step()

    return TrainLoop(model=net, optimizer=meta_opt, batches=tasks, fit=fit)
