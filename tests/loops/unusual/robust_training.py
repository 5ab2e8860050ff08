"""Robust and semi-supervised training: gradients on inputs, reversed gradients, networks that teach each other."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def train_fgsm(model, optimizer, batches, epsilon=0.2):
    for x, y in batches:
        x = x.clone().requires_grad_(True)
        F.cross_entropy(model(x), y).backward()
        attacked = (x + epsilon * x.grad.sign()).detach()
        optimizer.zero_grad()
        F.cross_entropy(model(attacked), y).backward()
        optimizer.step()


@odd(notes="the attack's backward fills the parameters' gradients too; they are wiped before the training backward")
def fgsm_adversarial_training() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        fit=lambda batches: train_fgsm(model, optimizer, batches),
    )


def train_free(model, optimizer, batches, epsilon=0.2, replays=2):
    delta = None
    for x, y in batches:
        if delta is None or delta.shape != x.shape:
            delta = torch.zeros_like(x)
        for _ in range(replays):
            noise = delta.clone().requires_grad_(True)
            loss = F.cross_entropy(model(x + noise), y)
            optimizer.zero_grad()
            loss.backward()
            delta = (delta + epsilon * noise.grad.sign()).clamp(-epsilon, epsilon)
            optimizer.step()


@odd(notes="one backward serves the weights and the attack; every batch is replayed; the attack lives across batches")
def free_adversarial_training() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_free(model, optimizer, batches),
    )


def train_trades(model, optimizer, batches, epsilon=0.2, beta=2.0):
    for x, y in batches:
        model.eval()
        attacked = (x + 0.001 * torch.randn_like(x)).requires_grad_(True)
        with torch.enable_grad():
            inner = F.kl_div(F.log_softmax(model(attacked), 1), F.softmax(model(x), 1), reduction="sum")
        (slope,) = torch.autograd.grad(inner, [attacked])
        attacked = (x + epsilon * slope.sign()).detach()
        model.train()
        optimizer.zero_grad()
        clean = model(x)
        apart = F.kl_div(F.log_softmax(model(attacked), 1), F.softmax(clean, 1), reduction="batchmean")
        (F.cross_entropy(clean, y) + beta * apart).backward()
        optimizer.step()


@odd(notes="softmax stands beside cross_entropy on purpose; a forward in eval mode whose backward never comes")
def trades() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_trades(model, optimizer, batches),
    )


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class DomainNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.label = nn.Linear(16, 4)
        self.domain = relu_mlp(16, 8, 2)

    def forward(self, x, strength=0.0):
        h = self.features(x)
        return self.label(h), self.domain(Reverse.apply(h, strength))


def train_dann(model, optimizer, batches):
    total = len(batches)
    for i, (x, y, other) in enumerate(batches):
        strength = 2.0 / (1.0 + math.exp(-10.0 * i / total)) - 1.0
        labels, source = model(x, strength)
        _, target = model(other, strength)
        loss = F.cross_entropy(labels, y)
        loss = loss + F.cross_entropy(source, torch.zeros(len(x), dtype=torch.long))
        loss = loss + F.cross_entropy(target, torch.ones(len(other), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@odd(notes="the domain branch sends the trunk a gradient of exactly 0 on the first batch and a reversed one after that")
def domain_adversarial_gradient_reversal() -> TrainLoop:
    model = DomainNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(*points(), 0.5 + points()[0]),
        fit=lambda batches: train_dann(model, optimizer, batches),
    )


@torch.no_grad()
def update_teacher(teacher, student, step, decay=0.95):
    decay = min(1 - 1 / (step + 1), decay)
    for kept, live in zip(teacher.parameters(), student.parameters(), strict=True):
        kept.mul_(decay).add_(live, alpha=1 - decay)


def train_mean_teacher(student, teacher, optimizer, batches, ramp=10):
    for step, (x, y, unlabelled) in enumerate(batches):
        loss = F.cross_entropy(student(x), y)
        noisy = unlabelled + 0.1 * torch.randn_like(unlabelled)
        with torch.no_grad():
            aim = teacher(unlabelled).softmax(1)
        weight = min(1.0, step / ramp)
        loss = loss + weight * F.mse_loss(student(noisy).softmax(1), aim)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_teacher(teacher, student, step)


@odd(
    notes="the teacher's parameters move without any optimizer or gradient; "
    "the consistency term is multiplied by 0 at first"
)
def mean_teacher() -> TrainLoop:
    student = relu_mlp(8, 16, 4)
    teacher = copy.deepcopy(student)
    for parameter in teacher.parameters():
        parameter.detach_()
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    return TrainLoop(
        model={"student": student, "teacher": teacher},
        optimizer=optimizer,
        batch=(*points(), points()[0]),
        fit=lambda batches: train_mean_teacher(student, teacher, optimizer, batches),
    )


def train_fixmatch(model, optimizer, batches, threshold=0.95):
    used = 0
    for x, y, unlabelled in batches:
        weak = unlabelled + 0.05 * torch.randn_like(unlabelled)
        strong = unlabelled * (torch.rand_like(unlabelled) > 0.2)
        out_x, out_weak, out_strong = model(torch.cat([x, weak, strong])).split(len(x))
        sure, guess = out_weak.detach().softmax(1).max(1)
        mask = (sure >= threshold).to(x.dtype)
        used += int(mask.sum())
        loss = F.cross_entropy(out_x, y) + (mask * F.cross_entropy(out_strong, guess, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return used


@odd(notes="labels come from the detached output of the same forward; the unlabelled loss is exactly 0 at the start")
def fixmatch_pseudo_labels() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(*points(), points()[0]),
        fit=lambda batches: train_fixmatch(model, optimizer, batches),
    )


def train_co_teaching(first, second, opt_first, opt_second, batches, keep=0.75):
    for x, y in batches:
        n = max(1, int(keep * len(x)))
        each = F.cross_entropy(first(x), y, reduction="none"), F.cross_entropy(second(x), y, reduction="none")
        easy = [losses.detach().argsort()[:n] for losses in each]
        for losses, chosen, optimizer in ((each[0], easy[1], opt_first), (each[1], easy[0], opt_second)):
            optimizer.zero_grad()
            losses[chosen].mean().backward()
            optimizer.step()


@odd(notes="a quarter of each batch is dropped from the loss, chosen by the other network (co-teaching)")
def co_teaching() -> TrainLoop:
    nets = [relu_mlp(8, 16, 4), relu_mlp(8, 16, 4)]
    opts = [torch.optim.Adam(net.parameters(), lr=5e-3) for net in nets]
    return TrainLoop(
        model=nets,
        optimizer=opts,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_co_teaching(*nets, *opts, batches),
    )


def train_mutual(nets, optimizers, batches):
    for x, y in batches:
        outputs = [net(x) for net in nets]
        for i, optimizer in enumerate(optimizers):
            peers = [F.softmax(out.detach(), 1) for j, out in enumerate(outputs) if j != i]
            apart = sum(F.kl_div(F.log_softmax(outputs[i], 1), p, reduction="batchmean") for p in peers)
            loss = F.cross_entropy(outputs[i], y) + apart / len(peers)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@odd(notes="all forwards come before all backwards; each network learns from the others' detached outputs")
def deep_mutual_learning() -> TrainLoop:
    nets = nn.ModuleList([relu_mlp(8, 16, 4), relu_mlp(8, 12, 4)])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    return TrainLoop(
        model=nets,
        optimizer=optimizers,
        batch=points(),
        fit=lambda batches: train_mutual(nets, optimizers, batches),
    )


class MixupTrainer:
    def __init__(self, model, optimizer, alpha=0.4):
        self.model, self.optimizer = model, optimizer
        self.beta = torch.distributions.Beta(alpha, alpha)

    def training_step(self, x, y):
        share = self.beta.sample()
        order = torch.randperm(len(x))
        out = self.model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    def fit(self, batches):
        for x, y in batches:
            loss = self.training_step(x, y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


@odd(notes="inputs and targets are mixed between rows, so the loss never comes near 0 and rows interact")
def mixup() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    trainer = MixupTrainer(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    return TrainLoop(model=model, optimizer=trainer.optimizer, batch=points(), fit=trainer.fit)
