"""Evaluations that leave other weights, gradients or modes behind."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp, relu_mlp
from tests.loops.pairs import pair

CHECK = "evaluation_is_pure"


def train(model, optimizer, batches, after=lambda: None):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after()


def accuracy(model, held_out):
    x, y = held_out
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


# An average of the weights, swapped in for validation by hand, as in many copies of one class.


class EMA:
    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.backup = {}

    @torch.no_grad()
    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p, 1 - self.decay)

    def apply_shadow(self):
        for name, p in self.model.named_parameters():
            self.backup[name] = p.data
            p.data = self.shadow[name].clone()

    def restore(self):
        for name, p in self.model.named_parameters():
            p.data = self.backup[name]
        self.backup = {}


def averaged(restoring):
    def make():
        model = relu_mlp(6, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ema = EMA(model)
        held_out = data.labelled(seed=5)

        def evaluate():
            ema.apply_shadow()
            score = accuracy(model, held_out)
            if restoring:
                ema.restore()
            return score

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(model, optimizer, batches, after=ema.update),
            evaluate=evaluate,
        )

    return make


pair(
    "average_swapped_in_for_good",
    CHECK,
    "weights_left",
    culprits=("model.0.weight",),
    where="p.data = self.shadow[name].clone()",
    faulty=averaged(restoring=False),
    fixed=averaged(restoring=True),
    quick=True,
)


# Test-time adaptation: the entropy of predictions is minimised on the test batch.


def adapted(apart):
    def make():
        model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = data.labelled(seed=5)

        def evaluate():
            net = copy.deepcopy(model) if apart else model
            adapting = torch.optim.SGD(net[1].parameters(), lr=0.05)
            for _ in range(2):
                probabilities = net(x).softmax(1)
                entropy = -(probabilities * probabilities.log()).sum(1).mean()
                adapting.zero_grad()
                entropy.backward()
                adapting.step()
            return accuracy(net, (x, y))

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(model, optimizer, batches),
            evaluate=evaluate,
        )

    return make


pair(
    "adapted_at_test_time_in_place",
    CHECK,
    "evaluation_trains",
    culprits=("model.1.weight", "model.1.bias"),
    where="adapting.step()",
    faulty=adapted(apart=False),
    fixed=adapted(apart=True),
    quick=True,
)


# One routine for both phases: `train=False` is not asked before the step.


class Runner:
    def __init__(self, asking):
        self.net = mlp(6, 24, 3)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        self.asking = asking

    def epoch(self, batches, training):
        total = 0.0
        for x, y in batches:
            loss = F.cross_entropy(self.net(x), y)
            if training or not self.asking:
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            total += loss.item()
        return total


def shared_epoch(asking):
    def make():
        runner = Runner(asking)
        held_out = [data.labelled(seed=n) for n in (5, 6)]
        return TrainLoop(
            model=runner.net,
            optimizer=runner.optimizer,
            batch=data.labelled(),
            fit=lambda batches: runner.epoch(batches, training=True),
            evaluate=lambda: runner.epoch(held_out, training=False),
        )

    return make


pair(
    "validation_takes_steps",
    CHECK,
    "evaluation_trains",
    where="self.optimizer.step()",
    faulty=shared_epoch(asking=False),
    fixed=shared_epoch(asking=True),
)


# A robust accuracy under FGSM; gradients are cleared after the step, as in most loops over micro-batches.


def attacked(by_grad):
    def make():
        model = relu_mlp(6, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = data.labelled(seed=5)

        def fit(batches):
            for inputs, labels in batches:
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()

        def robust_accuracy():
            clean = x.clone().requires_grad_()
            loss = F.cross_entropy(model(clean), y)
            if by_grad:
                (slope,) = torch.autograd.grad(loss, clean)
            else:
                loss.backward()
                slope = clean.grad
            return accuracy(model, (x + 0.1 * slope.sign(), y))

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, evaluate=robust_accuracy)

    return make


pair(
    "attack_leaves_gradients",
    CHECK,
    "gradients_left",
    culprits=("model.0.weight",),
    where="loss.backward()",
    faulty=attacked(by_grad=False),
    fixed=attacked(by_grad=True),
    quick=True,
)


# `eval()` and no `train()`: the training loop relies on how it found the model.


def left_in_eval(restoring):
    def make():
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held_out = data.labelled(seed=5)

        def evaluate():
            was = model.training
            model.eval()
            score = accuracy(model, held_out)
            if restoring:
                model.train(was)
            return score

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(model, optimizer, batches),
            evaluate=evaluate,
        )

    return make


pair(
    "eval_mode_left_by_evaluate",
    CHECK,
    "mode_left",
    culprits=("model.1",),
    where="model.eval()",
    faulty=left_in_eval(restoring=False),
    fixed=left_in_eval(restoring=True),
    quick=True,
)


# The part that was frozen for fine-tuning comes out of evaluation in training mode.


def mode_of_a_part(restoring):
    def make():
        model = nn.Sequential(
            nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU()), nn.Dropout(0.2), nn.Linear(16, 3)
        )
        model[0].eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        held_out = data.labelled(seed=5)

        def evaluate():
            modes = {module: module.training for module in model.modules()}
            model.eval()
            score = accuracy(model, held_out)
            model.train()
            if restoring:
                for module, mode in modes.items():
                    module.training = mode
            return score

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(model, optimizer, batches),
            evaluate=evaluate,
        )

    return make


pair(
    "train_mode_left_on_a_frozen_norm",
    CHECK,
    "mode_left",
    culprits=("model.0.1",),
    faulty=mode_of_a_part(restoring=False),
    fixed=mode_of_a_part(restoring=True),
)


# The size of what will be deployed is measured by casting the model itself: its weights come back rounded, by less
# than the rounding that is allowed between two runs.


def deployed(of):
    def make():
        model = relu_mlp(6, 16, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        held_out = data.labelled(seed=5)

        def validate():
            small = of(model)
            small.half()
            size = sum(p.numel() * p.element_size() for p in small.parameters())
            small.float()
            return accuracy(small, held_out), size

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(model, optimizer, batches),
            evaluate=validate,
        )

    return make


pair(
    "cast_to_half_precision_and_back",
    CHECK,
    "weights_left",
    culprits=("model.0.weight",),
    where="small.half()",
    faulty=deployed(of=lambda model: model),
    fixed=deployed(of=copy.deepcopy),
)
