"""Options and multiples of options in groups, which nothing reads, and rates that are written to a copy."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import lr_scheduler

from pytest_trainloop import TrainLoop
from tests.checks.learning.schedule.faults import trained
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# Groups with the option's name of another library, and options that are misspelled.


def grouped(kind=torch.optim.AdamW, rate=3e-3, **head):
    def configure(model):
        groups = [{"params": model[0].parameters()}, {"params": model[-1].parameters(), **head}]
        return kind(groups, lr=rate), None

    return configure


pair(
    "group_with_a_learning_rate",
    "schedule",
    "option_nobody_reads",
    culprits=('param_groups[1]["learning_rate"]',),
    where="return kind(groups, lr=rate), None",
    change="groups = [",
    mentions=("lr=0.003 is in effect",),
    faulty=trained(grouped(learning_rate=1e-2)),
    fixed=trained(grouped(lr=1e-2)),
    quick=True,
)


# Layers deeper in the net are to learn slower, as timm's schedulers have it; torch's do not know the key.


def layerwise(reads):
    def make():
        model = mlp(6, 32, 16, 3)
        layers = [m for m in model if isinstance(m, nn.Linear)]
        groups = [{"params": m.parameters(), "lr_scale": 0.75 ** (2 - n)} for n, m in enumerate(layers)]
        if reads:
            groups = [{**group, "lr": 5e-3 * group["lr_scale"]} for group in groups]
        optimizer = torch.optim.AdamW(groups, lr=5e-3)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "scale_of_each_layer_that_no_schedule_reads",
    "schedule",
    "option_nobody_reads",
    culprits=('param_groups[0]["lr_scale"]', 'param_groups[2]["lr_scale"]'),
    where="torch.optim.AdamW(groups, lr=5e-3)",
    mentions=(
        "0.5625 and 0.75",
        "both learn at 0.005",
    ),
    faulty=layerwise(reads=False),
    fixed=layerwise(reads=True),
)


# Rates of a warm-up, and of a decay by epochs, written to what state_dict() gives.


def write_to_copies(trainer):
    for group in trainer.optimizer.state_dict()["param_groups"]:
        group["lr"] = 0.1 * (trainer.steps + 1) / 400


def write_to_groups(trainer):
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.1 * (trainer.steps + 1) / 400


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None


pair(
    "warm_up_written_to_the_state_dict",
    "schedule",
    "lr_written_to_copy",
    culprits=("state_dict()",),
    where='in trainer.optimizer.state_dict()["param_groups"]',
    change='in trainer.optimizer.state_dict()["param_groups"]',
    mentions=("stays at 0.1", "were set to 0.0005"),
    faulty=trained(plain, write_to_copies),
    fixed=trained(plain, write_to_groups),
    quick=True,
)


# The decay after the warm-up is torch's, and moves the rate; the warm-up is written to copies.


def decayed(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, lr_scheduler.ExponentialLR(optimizer, 0.999)


def warm_up_and_decay(groups):
    def after(trainer):
        if trainer.steps < 6:
            for group in groups(trainer.optimizer):
                group["lr"] = 0.1 * trainer.steps / 6
        trainer.scheduler.step()

    return after


pair(
    "warm_up_written_to_copies_beside_a_schedule",
    "schedule",
    "lr_written_to_copy",
    culprits=("state_dict()",),
    faulty=trained(decayed, warm_up_and_decay(lambda optimizer: optimizer.state_dict()["param_groups"])),
    fixed=trained(decayed, warm_up_and_decay(lambda optimizer: optimizer.param_groups)),
)
