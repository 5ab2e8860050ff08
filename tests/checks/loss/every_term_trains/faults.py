"""Terms of a loss that train nothing: added by their value, off the graph, between frozen results, or not added."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

CHECK = "every_term_trains"


def loop(loss_of, model=lambda: mlp(6, 24, 3), batch=data.labelled, rate=5e-3):
    """``loss_of(model, x, y)`` is trained with Adam."""

    def make():
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=rate)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                loss_of(net, x, y).backward()
                optimizer.step()

        return TrainLoop(model=net, optimizer=optimizer, batch=batch(), fit=fit)

    return make


# A penalty on the slope of a critic or an energy.


def smooth_regression(create_graph):
    def loss_of(model, x, y):
        x = x.clone().requires_grad_()
        output = model(x)
        slope = torch.autograd.grad(output.sum(), x, retain_graph=True, create_graph=create_graph)[0]
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return F.mse_loss(output, y) + 0.1 * penalty

    return loop(loss_of, lambda: mlp(6, 24, 1), data.table)


pair(
    "gradient_penalty_without_create_graph",
    CHECK,
    "penalty_off_graph",
    culprits=("grad",),
    where="slope = torch.autograd.grad(",
    change="slope = torch.autograd.grad(",
    quick=True,
    faulty=smooth_regression(False),
    fixed=smooth_regression(True),
)


def energies_and_forces(create_graph):
    def loss_of(model, x, y):
        x = x.clone().requires_grad_()
        energy = model(x)
        forces = -torch.autograd.grad(energy.sum(), x, retain_graph=True, create_graph=create_graph)[0]
        return ((energy - y) ** 2).mean() + ((forces + torch.cos(x.detach())) ** 2).mean()

    return loop(loss_of, lambda: mlp(6, 24, 1), data.table)


pair(
    "forces_without_a_graph",
    CHECK,
    "penalty_off_graph",
    culprits=("grad",),
    where="forces = -torch.autograd.grad(",
    faulty=energies_and_forces(False),
    fixed=energies_and_forces(True),
)


def pendulum(create_graph):
    def loss_of(model, x, y):
        t = x[:, :1].clone().requires_grad_()
        u = model(t)
        slope = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=create_graph, retain_graph=True)[0]
        residual = slope + u
        return (residual**2).mean() + (model(torch.zeros(1, 1)) - 1).square().mean()

    return loop(loss_of, lambda: mlp(1, 24, 1), data.table)


pair(
    "slope_in_a_residual_without_create_graph",
    CHECK,
    "derivative_off_graph",
    level="advice",
    culprits=("grad",),
    where="slope = torch.autograd.grad(",
    quick=True,
    faulty=pendulum(False),
    fixed=pendulum(True),
)


# Added by its value alone.


def confident(term_of):
    def loss_of(model, x, y):
        scores = model(x)
        shares = scores.softmax(-1)
        entropy = -(shares * shares.clamp(min=1e-8).log()).sum(-1).mean()
        return F.cross_entropy(scores, y) + 0.1 * term_of(entropy)

    return loop(loss_of)


pair(
    "entropy_added_as_a_number",
    CHECK,
    "term_detached",
    where="term_of(entropy)",
    quick=True,
    faulty=confident(lambda entropy: entropy.item()),
    fixed=confident(lambda entropy: entropy),
)


def overlap(shares, y):
    hit = (shares * F.one_hot(y, 3)).sum()
    return 1 - 2 * hit / (shares.sum() + len(y))


def segmentation(shares_of):
    def loss_of(model, x, y):
        scores = model(x)
        dice = overlap(shares_of(scores), y)
        return F.cross_entropy(scores, y) + dice

    return loop(loss_of)


pair(
    "dice_of_the_predicted_classes",
    CHECK,
    "term_detached",
    faulty=segmentation(lambda scores: F.one_hot(scores.argmax(-1), 3).float()),
    fixed=segmentation(lambda scores: scores.softmax(-1)),
)


# Between two results of a teacher.


def distilled(of_student):
    def make():
        student = mlp(6, 24, 3)
        teacher = copy.deepcopy(student).requires_grad_(False)
        optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)

        def fit(batches):
            for x, y in batches:
                scores = student(x)
                with torch.no_grad():
                    wanted, other = teacher(x), teacher(x + 0.1)
                agreement = ((scores if of_student else other) - wanted).square().mean()
                loss = F.cross_entropy(scores, y) + agreement
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(
            model={"student": student, "teacher": teacher}, optimizer=optimizer, batch=data.labelled(), fit=fit
        )

    return make


pair(
    "teacher_compared_with_itself",
    CHECK,
    "term_between_frozen",
    culprits=("agreement",),
    where="agreement = (",
    quick=True,
    faulty=distilled(False),
    fixed=distilled(True),
)


# Computed, and in no loss.


def penalised_fit(model, optimizer, batches):
    for x, y in batches:
        scores = model(x)
        penalty = 0.01 * scores.square().mean()
        loss = F.cross_entropy(scores, y) + penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def forgetful_fit(model, optimizer, batches):
    for x, y in batches:
        scores = model(x)
        penalty = 0.01 * scores.square().mean()  # noqa: F841
        loss = F.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fitted(fit, model=lambda: mlp(6, 24, 3), batch=data.labelled):
    def make():
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
        return TrainLoop(model=net, optimizer=optimizer, batch=batch(), fit=lambda b: fit(net, optimizer, b))

    return make


pair(
    "penalty_that_nothing_reads",
    CHECK,
    "term_left_out",
    culprits=("penalty",),
    where="penalty = 0.01",
    quick=True,
    faulty=fitted(forgetful_fit),
    fixed=fitted(penalised_fit),
)


class Quantised(nn.Module):
    """An encoder whose codes come from a table, by a straight-through estimate."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.codes = mlp(6, 24, 4), mlp(4, 24, 6), nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        code = self.encoder(x)
        nearest = self.codes[torch.cdist(code, self.codes).argmin(-1)]
        distance = (nearest - code.detach()).square().mean()
        return self.decoder(code + (nearest - code).detach()), distance


def quantised(whole):
    def fit(model, optimizer, batches):
        log = []
        for x, _ in batches:
            rebuilt, distance = model(x)
            log.append(distance.item())
            loss = F.mse_loss(rebuilt, x)
            optimizer.zero_grad()
            (loss + distance if whole else loss).backward()
            optimizer.step()

    return fitted(fit, Quantised)


pair(
    "codebook_loss_logged_and_not_added",
    CHECK,
    "term_left_out",
    culprits=("codes",),
    where="distance = (nearest",
    faulty=quantised(False),
    fixed=quantised(True),
)


# Only the last of a loop.


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = mlp(6, 24, 12)
        self.heads = nn.ModuleList(nn.Linear(12, 1) for _ in range(3))

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return [head(hidden) for head in self.heads]


def fit_of_the_last_head(model, optimizer, batches):
    for x, _ in batches:
        for number, output in enumerate(model(x)):
            loss = (output - x[:, number : number + 1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fit_of_all_heads(model, optimizer, batches):
    for x, _ in batches:
        loss = 0.0
        for number, output in enumerate(model(x)):
            loss = loss + (output - x[:, number : number + 1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


pair(
    "only_the_last_head_is_backpropagated",
    CHECK,
    "term_overwritten",
    culprits=("loss",),
    where="loss = (output",
    quick=True,
    faulty=fitted(fit_of_the_last_head, Heads),
    fixed=fitted(fit_of_all_heads, Heads),
)


def errors_of_a_head(output, target):
    squares = (output - target).square()
    return squares.mean(), squares.sum()


def fit_of_the_last_pair(model, optimizer, batches):
    for x, _ in batches:
        loss = 0.0
        for number, output in enumerate(model(x)):
            mean, _total = errors_of_a_head(output, x[:, number : number + 1])
            loss = mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fit_of_all_pairs(model, optimizer, batches):
    for x, _ in batches:
        loss = 0.0
        for number, output in enumerate(model(x)):
            mean, _total = errors_of_a_head(output, x[:, number : number + 1])
            loss = loss + mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


pair(
    "only_the_last_of_several_results_of_a_function_is_backpropagated",
    CHECK,
    "term_overwritten",
    culprits=("loss",),
    where="return squares.mean(), squares.sum()",
    faulty=fitted(fit_of_the_last_pair, Heads),
    fixed=fitted(fit_of_all_pairs, Heads),
)
