"""Losses with terms that have no gradient on purpose, and numbers with a gradient that are in no loss."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


def trained(loss_of, model=None, batch=None, rate=5e-3):
    net = model or mlp(6, 24, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss_of(net, x, y, number).backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=batch or data.labelled(), fit=fit)


@odd(notes="the value of the loss is that of the error rate, its gradient that of the cross entropy")
def value_of_the_error_rate_and_slope_of_the_entropy() -> TrainLoop:
    def loss_of(model, x, y, _):
        scores = model(x)
        surrogate = F.cross_entropy(scores, y)
        errors = (scores.argmax(-1) != y).float().mean()
        return surrogate + (errors - surrogate).detach()

    return trained(loss_of)


@odd(notes="a term is added and taken away again: it trains and is not in the reported value")
def auxiliary_term_with_a_gradient_and_no_value() -> TrainLoop:
    def loss_of(model, x, y, _):
        scores = model(x)
        auxiliary = 0.01 * (scores**2).mean()
        return F.cross_entropy(scores, y) + auxiliary - auxiliary.detach()

    return trained(loss_of)


@odd(notes="self-paced learning: which examples count is chosen by a threshold, and the count is part of the objective")
def examples_chosen_by_their_loss() -> TrainLoop:
    def loss_of(model, x, y, number):
        losses = F.cross_entropy(model(x), y, reduction="none")
        threshold = 1.2 + 0.2 * number
        chosen = (losses < threshold).float()
        return (chosen * losses).mean() - threshold * chosen.mean()

    return trained(loss_of)


def gan(frozen):
    generator, critic = mlp(4, 24, 2), mlp(2, 24, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def value(real, fake):
        return F.logsigmoid(critic(real)).mean() + F.logsigmoid(-critic(fake)).mean()

    def fit(batches):
        for real in batches:
            fake = generator(torch.randn(len(real), 4))
            of_critic.zero_grad()
            (-value(real, fake.detach())).backward()
            of_critic.step()
            critic.requires_grad_(not frozen)
            of_generator.zero_grad()
            value(real, fake).backward()
            of_generator.step()
            critic.requires_grad_(True)

    models = {"generator": generator, "critic": critic}
    return TrainLoop(model=models, optimizer=[of_generator, of_critic], batch=data.ring(), fit=fit)


@odd(notes="the generator is given the whole value of the game, of which the real half is no function of it")
def generator_is_given_the_whole_value() -> TrainLoop:
    return gan(frozen=True)


@odd(notes="every parameter is added times zero, so that a distributed wrapper finds them all in use")
def all_parameters_times_zero() -> TrainLoop:
    def loss_of(model, x, y, _):
        return F.cross_entropy(model(x), y) + 0.0 * sum(p.sum() for p in model.parameters())

    return trained(loss_of)


@odd(notes="a penalty is computed in each step to be watched, and added from the third on")
def penalty_that_begins_later() -> TrainLoop:
    log = []

    def loss_of(model, x, y, number):
        scores = model(x)
        penalty = 0.01 * (scores**2).mean()
        log.append(penalty.item())
        loss = F.cross_entropy(scores, y)
        return loss + penalty if number >= 3 else loss

    return trained(loss_of)


class Refiner(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = mlp(7, 24, 1)

    def forward(self, x, y):
        return y + self.step(torch.cat([x, y], dim=-1))


@odd(notes="an estimate is refined three times, each compared with the target, and the last comparison trains")
def only_the_last_refinement_trains() -> TrainLoop:
    def loss_of(model, x, y, _):
        estimate = torch.zeros_like(y)
        for _turn in range(3):
            estimate = model(x, estimate)
            loss = (estimate - y).square().mean()
        return loss

    return trained(loss_of, Refiner(), data.table())


@odd(notes="points are weighted by the slope of the model there, which is no part of what is minimised")
def points_weighted_by_their_slope() -> TrainLoop:
    def loss_of(model, x, y, _):
        near = x.clone().requires_grad_()
        output = model(near)
        slope = torch.autograd.grad(output.sum(), near, retain_graph=True)[0]
        weight = 1 + slope.norm(dim=1, keepdim=True)
        return (weight * (model(x) - y).square()).mean()

    return trained(loss_of, mlp(6, 24, 1), data.table())


@odd(notes="the approximate divergence from the old policy is computed and only stops the epoch")
def divergence_that_stops_an_epoch() -> TrainLoop:
    policy = mlp(4, 24, 3)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

    def fit(batches):
        for states, actions, returns in batches:
            with torch.no_grad():
                old = policy(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]
            for _ in range(2):
                new = policy(states).log_softmax(-1)
                chosen = new.gather(1, actions[:, None])[:, 0]
                ratio, advantage = (chosen - old).exp(), returns - returns.mean()
                kl = (old - chosen).mean().item()
                if kl > 1.0:
                    break
                loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return TrainLoop(model=policy, optimizer=optimizer, batch=data.episode(), fit=fit)


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.heads = mlp(6, 24, 12), nn.ModuleList([nn.Linear(12, 3), nn.Linear(12, 3)])

    def forward(self, x, task):
        return self.heads[task](self.trunk(x).tanh())


@odd(notes="norms of all weights are logged with a gradient, and one head belongs to a task that is not trained here")
def norms_of_all_weights_logged() -> TrainLoop:
    log = []

    def loss_of(model, x, y, _):
        log.append({name: p.norm().item() for name, p in model.named_parameters()})
        return F.cross_entropy(model(x, 0), y)

    return trained(loss_of, TwoTasks())


@odd(notes="terms and weights are dicts, and two terms have no weight: they are looked at only")
def terms_without_a_weight_are_looked_at_only() -> TrainLoop:
    weights = {"ce": 1.0, "size": 0.01, "size_end": 0.1}

    def loss_of(model, x, y, _):
        scores = model(x)
        terms = {"ce": F.cross_entropy(scores, y), "size": (scores**2).mean(), "margin": scores.amax(-1).mean()}
        return sum(weights[name] * terms[name] for name in ("ce", "size"))

    return trained(loss_of)


@odd(notes="a penalty is switched off by its weight, from the configuration")
def penalty_that_is_switched_off() -> TrainLoop:
    weight = 0.0

    def loss_of(model, x, y, _):
        scores = model(x)
        penalty = (scores**2).mean()
        return F.cross_entropy(scores, y) + weight * penalty

    return trained(loss_of)


@odd(notes="two numbers of the loss are constants of the formula, one of them of the data")
def constants_of_a_likelihood() -> TrainLoop:
    def loss_of(model, x, y, _):
        rates, counts = model(x).clamp(-4, 4), y.abs().round()
        return (rates.exp() - counts * rates + torch.lgamma(counts + 1)).mean() + 0.5 * math.log(2 * math.pi)

    return trained(loss_of, mlp(6, 24, 1), data.table())


@odd(notes="the teacher is a moving average, and compared with the student")
def student_of_its_own_average() -> TrainLoop:
    student = mlp(6, 24, 3)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)

    def fit(batches):
        for x, y in batches:
            scores = student(x)
            agreement = (scores - teacher(x)).square().mean()
            optimizer.zero_grad()
            (F.cross_entropy(scores, y) + agreement).backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)

    return TrainLoop(model=student, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="an auxiliary loss has a backward pass of its own, and its value is shown in the total")
def auxiliary_loss_with_a_pass_of_its_own() -> TrainLoop:
    net = mlp(6, 24, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)

    def fit(batches):
        for x, y in batches:
            scores = net(x)
            auxiliary = 0.01 * (scores**2).mean()
            optimizer.zero_grad()
            auxiliary.backward(retain_graph=True)
            total = F.cross_entropy(scores, y) + auxiliary.detach()
            total.backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="after the step the loss is copied to the CPU for the log: loss_value = loss.cpu().detach().numpy()")
def loss_copied_for_the_log() -> TrainLoop:
    net = mlp(6, 24, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = -(net(x).log_softmax(-1) * F.one_hot(y, 3)).sum(-1).mean()
            loss.backward()
            optimizer.step()
            loss_value = loss.cpu().detach().numpy()
            perplexity_loss = loss.exp().detach()
            assert -1 < loss_value < perplexity_loss.item()

    return TrainLoop(model=net, optimizer=optimizer, batch=data.labelled(), fit=fit)


def likelihood(log_p, logdet, size):
    return -((logdet + log_p) / size).mean(), (log_p / size).mean(), (logdet / size).mean()


@odd(notes="beside the loss a function returns the means of its two parts, for a progress bar (Glow)")
def parts_of_the_loss_for_a_progress_bar() -> TrainLoop:
    flow = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(6)), "scale": nn.Parameter(torch.zeros(6))})

    def loss_of(model, x, _y, _number):
        z = (x + model["shift"]) * model["scale"].exp()
        loss, prior_loss, volume_loss = likelihood(-0.5 * z.pow(2).sum(1), model["scale"].sum(), 6)
        assert prior_loss.item() + volume_loss.item() < 1e6
        return loss

    return trained(loss_of, model=flow)
