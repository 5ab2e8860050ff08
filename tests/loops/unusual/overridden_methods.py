"""Models that give the methods of ``nn.Module`` for parameters and submodules another meaning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import points


class Learner(nn.Module):
    """MAML: the weights are in a list of parameters, and the network can be called with others."""

    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.randn(4, 8) / 3), nn.Parameter(torch.zeros(4))])

    def forward(self, x, vars=None):
        weight, bias = self.vars if vars is None else vars
        return F.linear(x, weight, bias)

    def parameters(self):
        """Override this function since initial parameters will return with a generator."""
        return self.vars


@odd(notes="parameters() is overridden, takes no recurse and returns a ParameterList (MAML-Pytorch)")
def parameters_overridden_without_recurse() -> TrainLoop:
    net = Learner()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            grads = torch.autograd.grad(F.cross_entropy(net(x), y), net.parameters())
            fast = [p - 0.1 * g for g, p in zip(grads, net.parameters(), strict=True)]
            loss = F.cross_entropy(net(x, fast), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=points(), fit=fit)


class LayersAsModules(nn.Module):
    """A plain list under the name ``modules``; the layers themselves are registered in a ``ModuleList``."""

    def __init__(self):
        super().__init__()
        self.modules = [nn.Linear(8, 16), nn.Linear(16, 4)]
        self.layers = nn.ModuleList(self.modules)

    def forward(self, x):
        first, second = self.modules
        return second(first(x).relu())


@odd(notes="an attribute named modules hides the method: a list of the layers")
def layers_in_an_attribute_modules() -> TrainLoop:
    return _classifier(LayersAsModules())


class Adapted(nn.Module):
    """Only the adapter's parameters are given by ``named_parameters``; the body below it is frozen."""

    def __init__(self):
        super().__init__()
        self.body, self.adapter = nn.Linear(8, 16).requires_grad_(False), nn.Linear(16, 4)

    def forward(self, x):
        return self.adapter(self.body(x).relu())

    def named_parameters(self):
        return [(f"adapter.{name}", p) for name, p in self.adapter.named_parameters()]

    def parameters(self):
        return [p for _, p in self.named_parameters()]

    def children(self):
        return {"body": self.body, "adapter": self.adapter}.items()


@odd(notes="named_parameters() and children() are overridden with other arguments and other results")
def named_parameters_of_the_adapter_only() -> TrainLoop:
    return _classifier(Adapted())


def _classifier(model: nn.Module) -> TrainLoop:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)
