"""Right loops whose groups have keys that look like options, or that edit what ``state_dict()`` gives."""

from __future__ import annotations

import copy
import io
import operator
from collections import ChainMap

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from pytest_trainloop import TrainLoop
from tests.checks.learning.schedule.unusual import sgd, trained
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


def layers(model, **head):
    """Two groups; the second has these keys besides."""
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), **head}]


def write_rates(groups, rate):
    for group in groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)


@odd(notes="the schedule goes through the list of groups that the optimizer was given, which are its own")
def groups_kept_by_the_project():
    model = mlp(6, 32, 3)
    groups = layers(model, lr_mult=2.0)
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    steps = [0]

    def after(loss):
        steps[0] += 1
        write_rates(groups, 0.05 * 0.99 ** steps[0])

    return trained(optimizer, after, model=model)


@odd(notes="each group's lambda is made from its multiple before the first step; the schedule is torch's")
def lambdas_made_from_the_multiples():
    model = mlp(6, 32, 3)
    groups = layers(model, lr_mult=2.0)
    groups[0]["lr_mult"] = 1.0
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    schedule = lr_scheduler.LambdaLR(optimizer, [lambda s, m=g["lr_mult"]: m * 0.99**s for g in groups])
    return trained(optimizer, lambda loss: schedule.step(), model=model)


@odd(notes="the multiple was applied before the optimizer was built, and is kept for the log")
def multiple_applied_while_building():
    model = mlp(6, 32, 3)
    groups = layers(model, lr_scale=2.0, name="head")
    for group in groups:
        group["lr"] = 0.05 * group.get("lr_scale", 1.0)
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.99)
    return trained(optimizer, lambda loss: schedule.step(), model=model)


@odd(notes="the groups keep the rates that a schedule goes from and to, under names with lr in them")
def rates_of_a_schedule_kept_in_the_group():
    model = mlp(6, 32, 3)
    keys = {"initial_lr": 0.05, "target_lr": 0.01, "start_lr": 0.1, "base_rate": 0.2, "lr_final": 1e-4, "id": 3}
    optimizer = torch.optim.SGD(layers(model, **keys), lr=0.05, momentum=0.9)
    return trained(optimizer, lambda loss: None, model=model)


class Lars(torch.optim.SGD):
    """Trust ratios, with decay in the ratio, except in groups that are left out."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and not group.get("lars_exclude"):
                        p.grad.add_(p, alpha=group.get("weight_decay_rate", 0.0))
        return super().step(closure)


@odd(notes="an optimizer class of the project's own reads its own option beside torch's")
def option_of_an_own_optimizer_class():
    model = mlp(6, 32, 3)
    optimizer = Lars(layers(model, lars_exclude=True, weight_decay_rate=0.05, apply_decay=False), lr=0.05, momentum=0.9)
    return trained(optimizer, lambda loss: None, model=model)


@odd(notes="a group gives its rate, and the one that it had in the paper for the log")
def rate_of_the_paper_beside_the_own():
    model = mlp(6, 32, 3)
    optimizer = torch.optim.SGD(layers(model, lr=0.05, learning_rate=0.4), lr=0.1, momentum=0.9)
    return trained(optimizer, lambda loss: None, model=model)


@odd(notes="the multiples are read from copies of the groups, by items, by a getter and through keywords")
def multiples_read_from_copies():
    model = mlp(6, 32, 3)
    head = {"lr_mult": 2.0, "lr_scale": 1.5, "lr_factor": 1.25, "lr_ratio": 0.9, "lr_multiplier": 1.1}
    optimizer = torch.optim.SGD(layers(model, **head), lr=0.02, momentum=0.9)
    base = {"lr_mult": 1.0, "lr_scale": 1.0, "lr_factor": 1.0, "lr_ratio": 1.0, "lr_multiplier": 1.0}
    ratio = operator.itemgetter("lr_ratio")

    def factor_of(lr_factor=1.0, **_rest):
        return lr_factor

    def after(loss):
        for group in optimizer.param_groups:
            scale = next((v for k, v in group.items() if k == "lr_scale"), 1.0)
            rate = 0.02 * scale * copy.copy(group).get("lr_mult", 1.0) * factor_of(**group)
            more = ratio({**base, **group}) * ChainMap(group, base)["lr_multiplier"]
            group["lr"] = rate * more

    return trained(optimizer, after, model=model)


@odd(notes="the groups come back from a file in each epoch, and their multiples are read after that")
def multiples_that_come_back_from_a_file():
    model = mlp(6, 32, 3)
    optimizer = torch.optim.SGD(layers(model, lr_mult=2.0), lr=0.05, momentum=0.9)

    def reload():
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))
        write_rates(optimizer.param_groups, 0.04)

    return trained(optimizer, lambda loss: None, model=model, between=reload, epochs=2)


@odd(notes="what state_dict() gives is edited and loaded again: that is how the rate is set")
def state_dict_edited_and_loaded():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    steps = [0]

    def after(loss):
        steps[0] += 1
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group["lr"] = 0.1 * 0.99 ** steps[0]
        optimizer.load_state_dict(state)

    return trained(optimizer, after, model=model)


@odd(notes="a second optimizer is given the state of the first, with a rate of its own")
def state_handed_to_another_optimizer():
    model, shadow = mlp(6, 32, 3), mlp(6, 32, 3)
    optimizer, other = sgd(model), sgd(shadow)

    def between():
        state = copy.deepcopy(optimizer.state_dict())
        for group in state["param_groups"]:
            group["lr"] = 0.01
        other.load_state_dict(state)

    def fit(batches):
        for _ in range(3):
            for x, y in batches:
                for net, stepped in ((model, optimizer), (shadow, other)):
                    stepped.zero_grad()
                    F.cross_entropy(net(x), y).backward()
                    stepped.step()
            between()

    return TrainLoop(
        model=nn.ModuleDict({"a": model, "b": shadow}), optimizer=[optimizer, other], batch=data.labelled(), fit=fit
    )


@odd(notes="the log gets groups of state_dict() whose rates were rounded")
def rounded_rates_for_the_log():
    model = mlp(6, 32, 3)
    optimizer = sgd(model, 0.123456)
    log = []

    def after(loss):
        groups = optimizer.state_dict()["param_groups"]
        for group in groups:
            group["lr"] = round(group["lr"], 3)
        log.append([{k: v for k, v in group.items() if k != "params"} for group in groups])

    return trained(optimizer, after, model=model)


@odd(notes="a schedule moves the rate, and the edited state is saved only where the loss is the best so far")
def best_state_with_another_rate_beside_a_schedule():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.99)
    best = [float("inf")]

    def after(loss):
        schedule.step()
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] *= 0.1
        if loss.item() < best[0]:
            best[0] = loss.item()
            torch.save(state, io.BytesIO())

    return trained(optimizer, after, model=model)
