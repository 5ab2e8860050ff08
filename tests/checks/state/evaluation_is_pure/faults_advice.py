"""Evaluations that change what training may be meant to notice: advice."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import relu_mlp
from tests.loops.pairs import pair

CHECK = "evaluation_is_pure"


def looped(model, optimizer, evaluate, **fields):
    def fit(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, evaluate=evaluate, **fields)


def normed():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


# Statistics of the norms are estimated on the target domain, in the model that trains.


def adapted(apart):
    def make():
        model = normed()
        x, y = data.labelled(seed=5)

        @torch.no_grad()
        def evaluate():
            net = copy.deepcopy(model) if apart else model
            net.train()
            for _ in range(3):
                net(x + 1.0)
            net.eval()
            score = (net(x + 1.0).argmax(1) == y).float().mean().item()
            net.train()
            return score

        return looped(model, torch.optim.SGD(model.parameters(), lr=0.1), evaluate)

    return make


pair(
    "statistics_of_another_domain",
    CHECK,
    "norm_statistics_moved",
    level="advice",
    where="net(x + 1.0)",
    culprits=("model.1.running_mean",),
    faulty=adapted(apart=False),
    fixed=adapted(apart=True),
    quick=True,
)


# A hook for the features of one layer, registered in each evaluation.


def hooked(removing):
    def make():
        model = relu_mlp(6, 16, 3)
        x, _ = data.labelled(seed=5)

        @torch.no_grad()
        def features():
            seen = []
            handle = model[1].register_forward_hook(lambda _m, _args, out: seen.append(out.mean().item()))
            model(x)
            if removing:
                handle.remove()
            return seen[0]

        return looped(model, torch.optim.SGD(model.parameters(), lr=0.1), features)

    return make


pair(
    "features_hooked_again_and_again",
    CHECK,
    "hooks_left",
    level="advice",
    culprits=("model.1",),
    where="register_forward_hook",
    faulty=hooked(removing=False),
    fixed=hooked(removing=True),
    quick=True,
)


# The schedule moves on with every validation, whatever its score.


def scheduled(in_evaluation):
    def make():
        model = relu_mlp(6, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        x, y = data.labelled(seed=5)

        @torch.no_grad()
        def evaluate():
            score = F.cross_entropy(model(x), y).item()
            if in_evaluation:
                schedule.step()
            return score

        return looped(model, optimizer, evaluate, scheduler=schedule)

    return make


pair(
    "rate_decays_with_each_validation",
    CHECK,
    "feedback",
    level="advice",
    where="schedule.step()",
    faulty=scheduled(in_evaluation=True),
    fixed=scheduled(in_evaluation=False),
    quick=True,
)


# Evaluation mode is left on; `fit` happens to begin with train().


def left_on(restoring):
    def make():
        model = normed()
        x, y = data.labelled(seed=5)

        def evaluate():
            model.eval()
            with torch.no_grad():
                score = (model(x).argmax(1) == y).float().mean().item()
            if restoring:
                model.train()
            return score

        return looped(model, torch.optim.SGD(model.parameters(), lr=0.1), evaluate)

    return make


pair(
    "eval_mode_left_to_the_next_epoch",
    CHECK,
    "matters_inside_fit",
    level="advice",
    culprits=("model.1",),
    where="model.eval()",
    faulty=left_on(restoring=False),
    fixed=left_on(restoring=True),
    quick=True,
)


# An average that the first training step makes.


def made_late(at_once):
    def make():
        model = relu_mlp(6, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = data.labelled(seed=5)
        average = {"net": copy.deepcopy(model) if at_once else None}

        def fit(batches):
            for inputs, labels in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                if average["net"] is None:
                    average["net"] = copy.deepcopy(model)

        @torch.no_grad()
        def evaluate():
            return F.cross_entropy(average["net"](x), y).item()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, evaluate=evaluate)

    return make


pair(
    "average_made_by_the_first_step",
    CHECK,
    "raises_before_first_step",
    level="advice",
    where='average["net"](x)',
    faulty=made_late(at_once=False),
    fixed=made_late(at_once=True),
    quick=True,
)
