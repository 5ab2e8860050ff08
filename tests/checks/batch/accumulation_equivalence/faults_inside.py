"""What runs with every micro-batch, where once for each step is due."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def nothing(*_given):
    pass


def windowed(*, each=nothing, once=nothing, after=nothing, net=None, loss=None, rate=0.1, **options):
    """A loop over windows. ``each(i, model, optimizer)`` runs after every backward pass, ``once`` before the step and
    ``after`` behind it."""
    loss = loss or (lambda model, x, y: F.cross_entropy(model(x), y))

    def make(accumulate=1):
        model = net() if net else mlp(6, 24, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, **options)

        def fit(batches):
            for i, (x, y) in enumerate(batches, start=1):
                (loss(model, x, y) / accumulate).backward()
                each(i, model, optimizer)
                if i % accumulate == 0 or i == len(batches):
                    once(i, model, optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
                    after(i, model, optimizer)

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


def clip_norm(_i, model, _optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_value(_i, model, _optimizer):
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def clip_by_hand(_i, model, _optimizer):
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))


for name, clip, line in (
    ("clipped_by_norm_inside_a_window", clip_norm, "nn.utils.clip_grad_norm_"),
    ("clipped_by_value_inside_a_window", clip_value, "nn.utils.clip_grad_value_"),
    ("clipped_by_hand_inside_a_window", clip_by_hand, "p.grad.mul_("),
):
    pair(
        name,
        "accumulation_equivalence",
        "clipped_inside_window",
        where=line,
        mentions=("after the last micro-batch of a window only",),
        faulty=windowed(each=clip),
        fixed=windowed(once=clip),
        quick=clip is clip_norm,
    )


# A clip as a hook on the parameters, which runs with every backward pass.


def hooked():
    model = mlp(6, 24, 3)
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


pair(
    "clipped_by_hooks_on_parameters",
    "accumulation_equivalence",
    "changed_inside_window",
    culprits=("register_hook()",),
    faulty=windowed(net=hooked),
    fixed=windowed(once=clip_value),
)


# Decoupled decay by hand.


def decay(_i, model, _optimizer):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)


pair(
    "decay_by_hand_inside_a_window",
    "accumulation_equivalence",
    "changed_inside_window",
    where="p.mul_(0.99)",
    culprits=("weights",),
    faulty=windowed(each=decay),
    fixed=windowed(once=decay),
    quick=True,
)


# Rates that are set by hand: the loop counts in what it chooses, which is advice.


def rate_by_hand(i, _model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.95


pair(
    "rate_by_hand_inside_a_window",
    "accumulation_equivalence",
    "scheduled_inside_window",
    level="advice",
    where='group["lr"]',
    faulty=windowed(each=rate_by_hand),
    fixed=windowed(after=rate_by_hand),
)


# Averages: a target that the loss looks at, and one for evaluation.


class Towards(nn.Module):
    """A net that is pulled to what its own average gives."""

    def __init__(self):
        super().__init__()
        self.online = mlp(6, 24, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def loss(self, x, y):
        out = self.online(x)
        return F.cross_entropy(out, y) + F.mse_loss(out, self.target(x.flip(1)))

    @torch.no_grad()
    def follow(self):
        for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


def follow(_i, model, _optimizer):
    model.follow()


pair(
    "target_follows_inside_a_window",
    "accumulation_equivalence",
    "averaged_inside_window",
    where="mine.lerp_(theirs, 0.1)",
    faulty=windowed(each=follow, net=Towards, loss=lambda model, x, y: model.loss(x, y)),
    fixed=windowed(after=follow, net=Towards, loss=lambda model, x, y: model.loss(x, y)),
    quick=True,
)


def averaged(each_micro_batch):
    def make(accumulate=1):
        model = mlp(6, 24, 3)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for i, (x, y) in enumerate(batches, start=1):
                (F.cross_entropy(model(x), y) / accumulate).backward()
                due = i % accumulate == 0 or i == len(batches)
                if due:
                    optimizer.step()
                    optimizer.zero_grad()
                if due or each_micro_batch:
                    average.update_parameters(model)

        both = {"net": model, "average": average}
        return TrainLoop(model=both, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "average_follows_inside_a_window",
    "accumulation_equivalence",
    "averaged_inside_window",
    where="average.update_parameters(model)",
    faulty=averaged(each_micro_batch=True),
    fixed=averaged(each_micro_batch=False),
)


# The size of outputs, kept by the loop.


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(6, 24, 3)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x):
        return self.net(x) / self.temperature


def cool(_i, model, _optimizer):
    with torch.no_grad():
        model.temperature.mul_(0.95).add_(0.02)


pair(
    "statistic_kept_inside_a_window",
    "accumulation_equivalence",
    "statistic_inside_window",
    where="model.temperature.mul_(0.95)",
    faulty=windowed(each=cool, net=Scaled),
    fixed=windowed(after=cool, net=Scaled),
    quick=True,
)


# A number of the loop's own, which nothing but its effect shows: how much a penalty weighs.


def annealed(each_micro_batch):
    def make(accumulate=1):
        model = mlp(6, 24, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            moved = 0
            for i, (x, y) in enumerate(batches, start=1):
                out = model(x)
                loss = F.cross_entropy(out, y) + min(1.0, moved / 10) * out.square().mean()
                (loss / accumulate).backward()
                due = i % accumulate == 0 or i == len(batches)
                if due:
                    optimizer.step()
                    optimizer.zero_grad()
                moved += due or each_micro_batch

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "penalty_grows_inside_a_window",
    "accumulation_equivalence",
    "update_differs",
    level="advice",
    faulty=annealed(each_micro_batch=True),
    fixed=annealed(each_micro_batch=False),
    quick=True,
)
