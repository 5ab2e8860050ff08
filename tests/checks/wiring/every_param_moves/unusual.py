"""Optimizers and hooks that keep something of their own: what rounding takes, masters, bounds, averages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.plain import cross_entropy, loop
from tests.loops.random_data import points


def low():
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).bfloat16()


def train_low(model, optimizer, batches, after=lambda: None):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
        after()


class Compensated(torch.optim.AdamW):
    """Signs of gradients, summed with Kahan's compensation where weights are in bfloat16."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.dtype is not torch.bfloat16:
                    continue
                lost = self.state[p].setdefault("lost", torch.zeros_like(p, dtype=torch.float32))
                wanted = p.float() - group["lr"] * p.grad.float().sign() + lost
                p.copy_(wanted)
                lost.copy_(wanted - p.float())


@odd(notes="norm gains in bfloat16 rest for hundreds of steps, and what rounding takes is kept until it is enough")
def keeping_what_rounding_takes():
    model = low()
    optimizer = Compensated(model.parameters(), lr=1e-5)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(12),
        fit=lambda batches: train_low(model, optimizer, batches),
    )


@odd(notes="hooks of the step fill the gradients of float32 masters, and write these back; no optimizer has the model")
def keeping_masters_by_hooks():
    model = low()
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)

    def fill(*_):
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()

    @torch.no_grad()
    def write_back(*_):
        for master, p in zip(masters, model.parameters(), strict=True):
            p.copy_(master)
            p.grad = None

    optimizer.register_step_pre_hook(fill)
    optimizer.register_step_post_hook(write_back)

    def fit(batches):
        for x, y in batches:
            F.cross_entropy(model(x.bfloat16()).float(), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)
        with torch.no_grad():
            self.body.weight.copy_(0.5 * torch.eye(4, 8))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.body(x) * self.scale


@odd(notes="a logit scale starts at its upper bound and wants beyond it: a hook of the step clamps it back each time")
def keeping_a_scale_at_its_bound():
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *_: model.scale.data.clamp_(max=2.0))
    return loop(model, points(12), cross_entropy, optimizer)


@odd(notes="a hook of the step keeps the average of the weights: it moves inside the step, and no optimizer holds it")
def keeping_an_average_by_hook():
    model = relu_mlp(8, 16, 4)
    average = relu_mlp(8, 16, 4).requires_grad_(False)
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def follow(*_):
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)

    optimizer.register_step_post_hook(follow)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model={"model": model, "average": average}, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="a branch is shrunk away: its gradients are set to zero, and its group has a decay of its own")
def keeping_a_branch_under_decay_only():
    model = nn.ModuleDict({"kept": relu_mlp(8, 16, 4), "pruned": relu_mlp(8, 16, 4)})
    groups = [
        {"params": model["kept"].parameters()},
        {"params": model["pruned"].parameters(), "weight_decay": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model["kept"](x) + model["pruned"](x), y).backward()
            for p in model["pruned"].parameters():
                p.grad.zero_()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="weights in bfloat16 under a one-cycle rate: the first steps are lost to rounding, the peak's are not")
def keeping_on_to_the_peak_of_one_cycle():
    model = relu_mlp(8, 16, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=400, div_factor=1e4)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(12),
        fit=lambda batches: train_low(model, optimizer, batches, cycle.step),
    )


@odd(notes="a turned matrix is updated through a view of its own layout, which is contiguous once it is turned back")
def updating_a_turned_matrix_through_its_transpose():
    model = relu_mlp(6, 24, 3)
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())

    def fit(batches):
        for x, y in batches:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                value, gradient = (p.data, p.grad) if p.is_contiguous() else (p.data.t(), p.grad.t())
                value.view(-1).sub_(gradient.reshape(-1), alpha=0.1)

    return TrainLoop(model=model, batch=data.labelled(), fit=fit)


@odd(notes="a turned weight rests at zero, the bound of a projection, and wants below it")
def resting_turned_weight_at_its_bound():
    model = Turned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + model.share.sum()).backward()
            optimizer.step()
            with torch.no_grad():
                model.share.clamp_(min=0.0)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


class Turned(nn.Module):
    """A gate of a matrix that starts closed, and lies in memory by columns."""

    def __init__(self):
        super().__init__()
        self.body = relu_mlp(6, 16, 3)
        self.share = nn.Parameter(torch.zeros(3, 6).t())

    def forward(self, x):
        return self.body(x) + 0.01 * x @ self.share
