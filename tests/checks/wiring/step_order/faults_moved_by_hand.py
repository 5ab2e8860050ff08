"""Weights that are moved by hand around a step: sharpness-aware steps, averages and target networks."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# Sharpness-aware minimisation written into the loop.


@torch.no_grad()
def climb(model, rho):
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    moves = [p.grad * (rho / (norm + 1e-12)) for p in model.parameters()]
    for p, move in zip(model.parameters(), moves, strict=True):
        p.add_(move)
    return moves


@torch.no_grad()
def descend(model, moves):
    for p, move in zip(model.parameters(), moves, strict=True):
        p.sub_(move)


def train_sharpness_aware(model, optimizer, batches, *, zero_between, rho=0.05):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        moves = climb(model, rho)
        if zero_between:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.0).backward()
        descend(model, moves)
        optimizer.step()


def sharpness_aware(**how):
    def make():
        model = mlp(6, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train_sharpness_aware(model, optimizer, batches, **how),
        )

    return make


pair(
    "sharpness_aware_without_zeroing",
    "step_order",
    "first_gradient_kept",
    level="advice",
    where="F.cross_entropy(model(x), y, label_smoothing=0.0).backward()",
    quick=True,
    faulty=sharpness_aware(zero_between=False),
    fixed=sharpness_aware(zero_between=True),
)


# A moving average, updated the wrong way round: the weights follow it.


class Averaged:
    def __init__(self, decay, *, reversed_sides):
        self.model = mlp(6, 16, 3)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.decay = decay
        self.reversed = reversed_sides

    @torch.no_grad()
    def follow(self):
        for p, a in zip(self.model.parameters(), self.average.parameters(), strict=True):
            if self.reversed:
                p.data.mul_(1 - self.decay).add_(a.data, alpha=self.decay)
            else:
                a.data.mul_(self.decay).add_(p.data, alpha=1 - self.decay)

    def fit(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.follow()


def averaged(decay, **how):
    def make():
        trainer = Averaged(decay, **how)
        return TrainLoop(
            model={"model": trainer.model, "average": trainer.average},
            optimizer=trainer.optimizer,
            frozen=("average",),
            batch=data.labelled(),
            fit=trainer.fit,
        )

    return make


pair(
    "weights_follow_their_average",
    "step_order",
    "step_taken_back",
    where="p.data.mul_(1 - self.decay).add_(a.data, alpha=self.decay)",
    culprits=("model.0.weight",),
    quick=True,
    faulty=averaged(0.99, reversed_sides=True),
    fixed=averaged(0.99, reversed_sides=False),
)


# A target network in soft steps: the online network is pulled towards it, 5 % a step.


def soft_target(*, reversed_sides):
    def make():
        online = mlp(4, 16, 3)
        target = copy.deepcopy(online)
        optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)

        def fit(batches, tau=0.05):
            for states, actions, returns in batches:
                with torch.no_grad():
                    goal = returns + 0.5 * target(states.roll(1, 0)).amax(1)
                optimizer.zero_grad()
                F.smooth_l1_loss(online(states).gather(1, actions[:, None]).squeeze(1), goal).backward()
                optimizer.step()
                source, copied = (target, online) if reversed_sides else (online, target)
                with torch.no_grad():
                    for p, q in zip(source.parameters(), copied.parameters(), strict=True):
                        q.copy_(tau * p + (1 - tau) * q)

        return TrainLoop(
            model={"online": online, "target": target},
            optimizer=optimizer,
            batch=data.episode(),
            fit=fit,
        )

    return make


pair(
    "online_network_pulled_to_its_target",
    "step_order",
    "step_taken_back",
    level="advice",
    where="q.copy_(tau * p + (1 - tau) * q)",
    culprits=("online.0.weight",),
    faulty=soft_target(reversed_sides=True),
    fixed=soft_target(reversed_sides=False),
)
