"""Graphs that live on after their step and do not pile up: cycles of references, views, in-place writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


def loop(loss_of, model=None, batch=data.labelled):
    model = model or mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch(), fit=fit)


class Reversed(torch.autograd.Function):
    """Gradient reversal, which hands a view of its input on."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.weight * gradient, None


class Marked(torch.autograd.Function):
    """Writes in place, and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@odd(notes="an autograd function returns a view of its input (gradient reversal)")
def memory_function_that_returns_a_view():
    return loop(lambda model, x, y: F.cross_entropy(model(x), y) + 0.01 * Reversed.apply(model(x), 0.1).square().mean())


@odd(notes="an autograd function writes in place and marks it")
def memory_function_in_place():
    return loop(lambda model, x, y: F.cross_entropy(Marked.apply(model(x) + 0), y))


class Filled(nn.Module):
    """Image features in the places of a token: masked_scatter, as LLaVA has it."""

    def __init__(self):
        super().__init__()
        self.words, self.picture, self.head = nn.Embedding(8, 12), nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x):
        ids = torch.arange(4).expand(len(x), 4)
        embedded = self.words(ids)
        mask = (ids == 2).unsqueeze(-1).expand_as(embedded)
        return self.head(torch.tanh(embedded.masked_scatter(mask, self.picture(x)).mean(1)))


@odd(notes="features are put into the embeddings by masked_scatter (multi-modal language models)")
def memory_masked_scatter():
    return loop(lambda model, x, y: F.cross_entropy(model(x), y), model=Filled())


@odd(notes="the same in place")
def memory_masked_scatter_in_place():
    class InPlace(Filled):
        def forward(self, x):
            ids = torch.arange(4).expand(len(x), 4)
            embedded = self.words(ids)
            mask = (ids == 2).unsqueeze(-1).expand_as(embedded)
            embedded.masked_scatter_(mask, self.picture(x))
            return self.head(torch.tanh(embedded.mean(1)))

    return loop(lambda model, x, y: F.cross_entropy(model(x), y), model=InPlace())
