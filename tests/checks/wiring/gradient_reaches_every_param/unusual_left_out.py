"""Correct loops in which a mask is zero, a choice leaves positions out, or copies are made for each batch."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.wiring.gradient_reaches_every_param.faults_left_out import train
from tests.loops.nets import mlp
from tests.loops.odd import odd


class Denoiser(nn.Module):
    """A token stands in for what is dropped; the loss is over all positions."""

    def __init__(self):
        super().__init__()
        self.embed, self.mask_token = nn.Linear(12, 24), nn.Parameter(0.02 * torch.randn(24))
        self.mixer, self.decoder = nn.GRU(24, 24, batch_first=True), nn.Linear(24, 12)

    def forward(self, patches):
        keep = torch.rand(patches.shape[:2]) < 0.6
        return self.decoder(self.mixer(torch.where(keep[..., None], self.embed(patches), self.mask_token))[0]), keep


@odd(notes="the loss is over kept positions only, and the token of the others reaches it through a recurrent layer")
def token_of_what_is_dropped_is_mixed_into_the_rest() -> TrainLoop:
    def loss_of(model, patches):
        predicted, keep = model(patches)
        return F.mse_loss(predicted[keep], patches[keep])

    return train(Denoiser(), loss_of, lambda: torch.randn(8, 10, 12))


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = mlp(8, 24, 24), nn.ModuleList([nn.Linear(24, 1), nn.Linear(24, 1)])

    def forward(self, x):
        return torch.cat([head(self.body(x)) for head in self.heads], 1)


@odd(notes="each row has the label of one task: the mask of the other is 0 there, and each task has rows in some batch")
def labels_of_one_task_a_batch() -> TrainLoop:
    turns = iter(range(1 << 30))

    def draw():
        has = torch.zeros(12, 2)
        has[:, next(turns) % 2] = 1
        return torch.randn(12, 8), torch.randn(12, 2), has

    def loss_of(model, batch):
        x, y, has = batch
        return ((model(x) - y).square() * has).sum() / has.sum()

    return train(Tasks(), loss_of, draw)


@odd(notes="Reptile: each task trains a copy, and the model moves towards it by gradients that are assigned")
def copies_give_their_weights_back() -> TrainLoop:
    model = mlp(1, 24, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def draw():
        x = torch.rand(16, 1) * 4 - 2
        return x, torch.sin(x)

    def fit(batches):
        for x, y in batches:
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), lr=0.05)
            for _ in range(3):
                inner.zero_grad()
                F.mse_loss(learner(x), y).backward()
                inner.step()
            for weight, moved in zip(model.parameters(), learner.parameters(), strict=True):
                weight.grad = weight.detach() - moved.detach()
            optimizer.step()

    batches = lambda n: (draw() for _ in range(n))  # noqa: E731
    return TrainLoop(model=model, optimizer=optimizer, batch=draw(), batches=batches, fit=fit)


@odd(notes="an auxiliary head has its loss from later on: its weight is 0 until then")
def auxiliary_head_that_warms_up() -> TrainLoop:
    model = Tasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            out = model(x)
            weight = min(1.0, number / 8)
            optimizer.zero_grad()
            (F.mse_loss(out[:, 0], y[:, 0]) + weight * F.mse_loss(out[:, 1], y[:, 1])).backward()
            optimizer.step()

    batches = lambda n: ((torch.randn(12, 8), torch.randn(12, 2)) for _ in range(n))  # noqa: E731
    return TrainLoop(model=model, optimizer=optimizer, batch=next(iter(batches(1))), batches=batches, fit=fit)
