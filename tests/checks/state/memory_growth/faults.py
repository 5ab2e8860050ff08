"""Loops that keep the graph of every step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import CharLSTM, mlp
from tests.loops.pairs import pair
from tests.loops.plain import cross_entropy, loop

# A trainer that adds up its losses for the progress bar.


class Trainer:
    def __init__(self, detached):
        self.model = mlp(6, 24, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.detached = detached
        self.total_loss = 0.0

    def train_epoch(self, loader):
        self.total_loss = 0.0
        for i, (x, y) in enumerate(loader, start=1):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            if self.detached:
                self.total_loss += loss.item()
            else:
                self.total_loss += loss
            self.shown = f"loss {self.total_loss / i:.3f}"


def trainer(detached):
    def make():
        made = Trainer(detached)
        return TrainLoop(model=made.model, optimizer=made.optimizer, batch=data.labelled(), fit=made.train_epoch)

    return make


pair(
    "total_loss_with_graph",
    "memory_growth",
    "running_sum",
    culprits=("Trainer.total_loss",),
    where="self.total_loss += loss",
    faulty=trainer(detached=False),
    fixed=trainer(detached=True),
    quick=True,
)


# A feature average that a module keeps for later.


class WithAverage(nn.Module):
    def __init__(self, detached):
        super().__init__()
        self.body, self.head = mlp(6, 16), nn.Linear(16, 3)
        self.detached = detached
        self.average = torch.zeros(16)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        seen = features.detach() if self.detached else features
        self.average = 0.9 * self.average + 0.1 * seen.mean(0)
        return self.head(features)


def averaged(detached):
    def make():
        model = WithAverage(detached)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return loop(model, data.labelled(), cross_entropy, optimizer)

    return make


pair(
    "feature_average_with_graph",
    "memory_growth",
    "running_sum",
    culprits=("WithAverage.average",),
    where="self.average = 0.9",
    faulty=averaged(detached=False),
    fixed=averaged(detached=True),
)


# Losses collected for the mean of the epoch.


def collected(detached):
    def make():
        model = mlp(6, 24, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        epochs = []

        def fit(batches):
            losses = []
            for x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach() if detached else loss)
            epochs.append(torch.stack(losses).mean().item())

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "list_of_losses_with_graph",
    "memory_growth",
    "kept_tensors",
    culprits=("losses",),
    where="losses.append(",
    faulty=collected(detached=False),
    fixed=collected(detached=True),
    quick=True,
)


# A hook on a weight that every step adds, and none takes out.


def hooked_weight(removed):
    def make():
        model = mlp(6, 24, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                scores = model(x)
                handle = model[0].weight.register_hook(lambda grad, scores=scores: grad / max(1, len(scores) // 16))
                F.cross_entropy(scores, y).backward()
                if removed:
                    handle.remove()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "gradient_hook_added_each_step",
    "memory_growth",
    "kept_tensors",
    culprits=("0.weight._backward_hooks",),
    faulty=hooked_weight(removed=False),
    fixed=hooked_weight(removed=True),
)


# The hidden state of a language model goes on from batch to batch.


class Stateful(CharLSTM):
    def forward(self, ids, state=None):
        hidden, state = self.lstm(self.embed(ids), state)
        return self.head(hidden), state


def stateful(detached):
    def make():
        model = Stateful()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def fit(batches):
            state = None
            for ids, targets in batches:
                if detached and state is not None:
                    state = tuple(s.detach() for s in state)
                optimizer.zero_grad()
                scores, state = model(ids, state)
                F.cross_entropy(scores.transpose(1, 2), targets).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.tokens(), fit=fit)

    return make


pair(
    "hidden_state_carried_over",
    "memory_growth",
    "carried_graph",
    culprits=("state",),
    where="self.lstm(self.embed(ids), state)",
    raises="backward through the graph a second time",
    faulty=stateful(detached=False),
    fixed=stateful(detached=True),
    quick=True,
)


# A running baseline of rewards or losses that the loss itself uses.


def baseline(detached):
    def make():
        model = mlp(6, 24, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

        def fit(batches):
            level = torch.zeros(1)
            for x, y in batches:
                optimizer.zero_grad()
                out = model(x)
                level = 0.9 * level + 0.1 * (out.detach() if detached else out).mean(0)
                (F.mse_loss(out, y) + 0.1 * (out.mean(0) - level).square().sum()).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "running_level_in_the_loss",
    "memory_growth",
    "carried_graph",
    culprits=("level",),
    where="level = 0.9 * level",
    raises="backward through the graph a second time",
    faulty=baseline(detached=False),
    fixed=baseline(detached=True),
)


# Results handed to futures, which keep them in C++.


def published(detached):
    def make():
        model = mlp(6, 16, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        published = []

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                out = model(x)
                loss = F.mse_loss(out, y)
                loss.backward()
                optimizer.step()
                future = torch.futures.Future()
                future.set_result(loss.detach() if detached else loss)
                published.append(future)

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "futures_with_graphs",
    "memory_growth",
    "held_outside_python",
    faulty=published(detached=False),
    fixed=published(detached=True),
    quick=True,
)
