"""Loops around loops: meta-learning, federated rounds, replicas kept in step by hand."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.plain import cross_entropy, loop
from tests.loops.random_data import fresh, points


def tasks(count=2, rows=5):
    """Sine regression as in the MAML paper: support and query sets of several tasks."""
    amplitude, phase = 0.5 + torch.rand(count, 1, 1), 3.0 * torch.rand(count, 1, 1)
    x = 4.0 * torch.rand(2, count, rows, 1) - 2.0
    y = amplitude * torch.sin(x + phase)
    return {"support": (x[0], y[0]), "query": (x[1], y[1])}


class MAML:
    def __init__(self, model, inner_lr=0.1, inner_steps=1, first_order=False):
        self.model, self.inner_lr, self.inner_steps, self.first_order = model, inner_lr, inner_steps, first_order
        self.optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def adapted(self, x, y):
        weights = dict(self.model.named_parameters())
        for _ in range(self.inner_steps):
            loss = F.mse_loss(functional_call(self.model, weights, (x,)), y)
            slopes = torch.autograd.grad(loss, weights.values(), create_graph=not self.first_order)
            weights = {n: w - self.inner_lr * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
        return weights

    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            pairs = list(zip(*batch["support"], *batch["query"], strict=True))
            for x, y, x_query, y_query in pairs:
                weights = self.adapted(x, y)
                (F.mse_loss(functional_call(self.model, weights, (x_query,)), y_query) / len(pairs)).backward()
            self.optimizer.step()


@odd(
    notes="inner steps on functional weights: second derivatives, one backward per task, the model is only "
    "called functionally"
)
def maml_second_order() -> TrainLoop:
    maml = MAML(mlp(1, 12, 1, activation=nn.Tanh))
    return TrainLoop(model=maml.model, optimizer=maml.optimizer, batch=tasks(), batches=fresh(tasks), fit=maml.fit)


@odd(notes="the inner gradients carry no graph: half of the chain rule is left out on purpose (first-order MAML)")
def maml_first_order() -> TrainLoop:
    maml = MAML(mlp(1, 12, 1, activation=nn.Tanh), first_order=True)
    return TrainLoop(model=maml.model, optimizer=maml.optimizer, batch=tasks(), fit=maml.fit)


def local_update(model, x, y, lr=0.1, epochs=2):
    client = copy.deepcopy(model)
    optimizer = torch.optim.SGD(client.parameters(), lr=lr)
    for _ in range(epochs):
        optimizer.zero_grad()
        F.cross_entropy(client(x), y).backward()
        optimizer.step()
    return client.state_dict()


def train_fedavg(model, batches, clients=2):
    for x, y in batches:
        states = [local_update(model, x[i::clients], y[i::clients]) for i in range(clients)]
        model.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]})


@odd(
    notes="the declared model has no optimizer and no gradient: copies of it train, their average is loaded "
    "back (FedAvg)"
)
def federated_averaging() -> TrainLoop:
    model = relu_mlp(8, 12, 4)
    return TrainLoop(model=model, batch=points(), fit=lambda batches: train_fedavg(model, batches))


class DiLoCo:
    """Workers run AdamW for a few steps; their mean displacement is the outer gradient."""

    def __init__(self, model, workers=2, inner_steps=3):
        self.model, self.inner_steps = model, inner_steps
        self.workers = [copy.deepcopy(model) for _ in range(workers)]
        self.inner = [torch.optim.AdamW(w.parameters(), lr=1e-2, weight_decay=0.0) for w in self.workers]
        self.outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.6, nesterov=True)

    def synchronise(self):
        for p, *copies in zip(self.model.parameters(), *(w.parameters() for w in self.workers), strict=True):
            p.grad = p.detach() - torch.stack([c.detach() for c in copies]).mean(0)
        self.outer.step()
        self.outer.zero_grad()
        for worker in self.workers:
            worker.load_state_dict(self.model.state_dict())

    def fit(self, batches):
        for step, (x, y) in enumerate(batches, 1):
            for i, (worker, optimizer) in enumerate(zip(self.workers, self.inner, strict=True)):
                optimizer.zero_grad()
                F.cross_entropy(worker(x[i::2]), y[i::2]).backward()
                optimizer.step()
            if step % self.inner_steps == 0:
                self.synchronise()


@odd(notes="the outer optimizer's gradient is a difference of weights; no backward reaches the declared model (DiLoCo)")
def diloco_outer_gradient() -> TrainLoop:
    method = DiLoCo(relu_mlp(8, 16, 4))
    return TrainLoop(model=method.model, optimizer=method.outer, batch=points(), batches=fresh(points), fit=method.fit)


class ScatterGather(nn.Module):
    """DataParallel without devices: splits rows, runs the module on each part, joins the outputs."""

    def __init__(self, module, parts=2):
        super().__init__()
        self.module, self.parts = module, parts

    def forward(self, x):
        return torch.cat([self.module(part) for part in x.chunk(self.parts)])


@odd(notes="the optimizer was built over the inner module, the loop runs the wrapper; every module runs twice per step")
def wrapped_like_data_parallel() -> TrainLoop:
    inner = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(inner.parameters(), lr=5e-3)
    model = ScatterGather(inner)
    return loop(model, points(), cross_entropy, optimizer, batches=fresh(points))


class HyperGradient:
    """The learning rate itself is trained, by the product of two gradients that follow each other."""

    def __init__(self, model, lr=0.05, hyper_lr=1e-3):
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.model, self.hyper_lr, self.earlier = model, hyper_lr, None

    def fit(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            now = torch.cat([p.grad.flatten() for p in self.model.parameters()])
            if self.earlier is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] += self.hyper_lr * float(now @ self.earlier)
            self.earlier = now
            self.optimizer.step()


@odd(notes="the rate changes at every step by what the gradients say, without any scheduler (hypergradient descent)")
def hypergradient_learning_rate() -> TrainLoop:
    method = HyperGradient(relu_mlp(8, 16, 4))
    return TrainLoop(model=method.model, optimizer=method.optimizer, batch=points(), fit=method.fit)


def train_darts(model, alpha, opt_model, opt_alpha, batches):
    """Bilevel, first order: even rows train the weights, odd rows the architecture."""
    for x, y in batches:
        for rows, optimizer in ((slice(1, None, 2), opt_alpha), (slice(0, None, 2), opt_model)):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows], alpha.softmax(0)), y[rows]).backward()
            optimizer.step()


class MixedOp(nn.Module):
    def __init__(self):
        super().__init__()
        self.ops = nn.ModuleList([nn.Linear(8, 12), nn.Sequential(nn.Linear(8, 12), nn.Tanh()), relu_mlp(8, 6, 12)])
        self.head = nn.Linear(12, 4)

    def forward(self, x, weights):
        return self.head(sum(w * op(x) for w, op in zip(weights, self.ops, strict=True)))


@odd(
    notes="architecture weights in a plain tensor, stepped by their own optimizer on other rows; "
    "each backward also fills the other side"
)
def darts_bilevel_architecture_search() -> TrainLoop:
    model, alpha = MixedOp(), torch.zeros(3, requires_grad=True)
    opt_model = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    opt_alpha = torch.optim.Adam([alpha], lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=[opt_model, opt_alpha],
        batch=points(rows=16),
        batches=fresh(lambda: points(rows=16)),
        fit=lambda batches: train_darts(model, alpha, opt_model, opt_alpha, batches),
    )
