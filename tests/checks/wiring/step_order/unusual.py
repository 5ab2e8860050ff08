"""Loops without a backward pass or an optimizer step that train all the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.odd import odd


def rows(count=16):
    x = torch.randn(count, 8)
    return x, x[:, :4].argmax(1)


def evolve(model, batches, *, spread=0.05, rate=0.1, tries=8):
    for x, y in batches:
        for p in model.parameters():
            noise = torch.randn(tries, *p.shape) * spread
            start, scores = p.detach().clone(), []
            for step in noise:
                p.data = start + step
                with torch.no_grad():
                    scores.append(-F.cross_entropy(model(x), y))
            weights = torch.stack(scores).softmax(0)
            p.data = start + rate * torch.einsum("t,t...->...", weights, noise)


@odd(notes="an evolution strategy: no gradient, no backward pass, no optimizer, weights written by hand")
def evolution_strategy_without_gradients() -> TrainLoop:
    model = mlp(8, 16, 4)
    return TrainLoop(model=model, batch=rows(), fit=lambda batches: evolve(model, batches))


class LeastSquares(nn.Module):
    """A linear layer that is solved for, from sums over all batches so far."""

    def __init__(self, features, outputs):
        super().__init__()
        self.linear = nn.Linear(features, outputs, bias=False)
        self.register_buffer("gram", 1e-3 * torch.eye(features))
        self.register_buffer("moment", torch.zeros(features, outputs))

    def forward(self, x):
        return self.linear(x)

    @torch.no_grad()
    def solve(self, x, y):
        self.gram += x.T @ x
        self.moment += x.T @ y
        self.linear.weight.copy_(torch.linalg.solve(self.gram, self.moment).T)


@odd(notes="a closed form: the layer is solved for, batch by batch")
def recursive_least_squares() -> TrainLoop:
    model = LeastSquares(8, 2)
    x, _ = rows()

    def fit(batches):
        for x, y in batches:
            model.solve(x, y)

    return TrainLoop(model=model, batch=(x, x[:, :2] - x[:, 2:4]), fit=fit)


class Codebook(nn.Module):
    """k-means with running averages: the centres are a buffer, the parameter is a scale that stays."""

    def __init__(self, codes, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("centres", torch.randn(codes, width))

    def forward(self, x):
        return torch.cdist(x * self.scale, self.centres).argmin(1)


@odd(notes="k-means: what is learned is a buffer, and the only parameter stays")
def codebook_by_running_means() -> TrainLoop:
    model = Codebook(4, 8)

    def fit(batches):
        for x, _ in batches:
            near = F.one_hot(model(x), 4).to(x.dtype)
            means = near.T @ x / near.sum(0).clamp(min=1.0)[:, None]
            model.centres.lerp_(torch.where(near.sum(0)[:, None] > 0, means, model.centres), 0.1)

    return TrainLoop(model=model, batch=rows(), fit=fit)


@odd(notes="a universal perturbation of a fixed classifier: the tensor that trains is no parameter and no optimizer's")
def perturbation_beside_the_model() -> TrainLoop:
    model = mlp(8, 16, 4)
    delta = torch.zeros(8, requires_grad=True)

    def fit(batches):
        for x, y in batches:
            (-F.cross_entropy(model(x + delta), y)).backward()
            with torch.no_grad():
                delta.sub_(0.1 * delta.grad.sign()).clamp_(-0.5, 0.5)
            delta.grad = None
            model.zero_grad()

    return TrainLoop(model=model, batch=rows(), fit=fit)


@odd(notes="a replay buffer fills for thirty batches before the first update")
def replay_buffer_fills_first() -> TrainLoop:
    model = mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        kept = []
        for x, y in batches:
            kept.append((x, y))
            with torch.no_grad():
                model(x)
            if len(kept) < 30:
                continue
            kept = kept[-30:]
            old, labels = kept[int(torch.randint(len(kept), ()))]
            optimizer.zero_grad()
            F.cross_entropy(model(old), labels).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=rows(), fit=fit)
