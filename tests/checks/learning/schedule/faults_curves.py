"""Curves of the learning rate that are wrong whatever the model: of schedulers, and of lines that write it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def trained(build=None, *, write=None, groups=None, after=None, **fields):
    """A classifier's training: ``build(optimizer)`` makes the schedule that is called after each step, ``write`` is
    called with the optimizer and the number of the step before it."""

    def make():
        model = mlp(6, 32, 3)
        own = groups(model) if groups else model.parameters()
        optimizer = torch.optim.SGD(own, lr=0.05, momentum=0.9)
        scheduler, counter = build(optimizer) if build else None, {"step": 0}

        def fit(batches):
            for x, y in batches:
                if write:
                    write(optimizer, counter["step"])
                counter["step"] += 1
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if after:
                    after(scheduler, model, counter["step"])
                elif scheduler:
                    scheduler.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, **fields)

    return make


def by(factor):
    """A LambdaLR of this factor, or of these: one for each group."""
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor)


def weights_and_biases(model):
    biases = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": biases}, {"params": [p for p in model.parameters() if p.dim() > 1]}]


def slow_biases(model):
    biases, weights = weights_and_biases(model)
    return [{**biases, "lr": 0.005}, weights]


# Factors that multiply the last rate, not the base rate.


class WarmUp(lr_scheduler.LRScheduler):
    def __init__(self, optimizer, *, from_base, steps=12):
        self.from_base, self.steps = from_base, steps
        super().__init__(optimizer)

    def get_lr(self):
        factor = 0.3 + 0.7 * min(1.0, self.last_epoch / self.steps)
        rates = self.base_lrs if self.from_base else [group["lr"] for group in self.optimizer.param_groups]
        return [rate * factor for rate in rates]


pair(
    "warm_up_that_multiplies_the_last_rate",
    "schedule",
    "factors_multiply",
    where="scheduler.step()",
    faulty=trained(lambda optimizer: WarmUp(optimizer, from_base=False)),
    fixed=trained(lambda optimizer: WarmUp(optimizer, from_base=True)),
    quick=True,
)


def poly(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] *= (1 - step / 400) ** 0.9


def poly_of_the_base(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * (1 - step / 400) ** 0.9


pair(
    "poly_decay_of_the_last_rate",
    "schedule",
    "factors_multiply",
    culprits=("poly()",),
    faulty=trained(write=poly),
    fixed=trained(write=poly_of_the_base),
)

# A lambda that returns the rate, which LambdaLR multiplies by the base rate.

pair(
    "lambda_that_returns_the_rate",
    "schedule",
    "lr_is_the_factor",
    where="scheduler.step()",
    mentions=("lr=0.05",),
    faulty=trained(by(lambda step: 0.05 * (1 + 1e-3 * step) ** -0.75)),
    fixed=trained(by(lambda step: (1 + 1e-3 * step) ** -0.75)),
    quick=True,
)


pair(
    "lambda_of_one_rate_for_groups_with_their_own",
    "schedule",
    "lr_is_the_factor",
    faulty=trained(by(lambda step: 0.05 * (1 + 1e-3 * step) ** -0.75), groups=slow_biases),
    fixed=trained(by(lambda step: (1 + 1e-3 * step) ** -0.75), groups=slow_biases),
)

# A decay of each pass that is made at each step, and a factor that is the rate after it.

pair(
    "exponential_decay_called_at_each_step",
    "schedule",
    "fades_out",
    mentions=("e-09 of its peak",),
    faulty=trained(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9), steps=250),
    fixed=trained(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9 ** (1 / 10)), steps=250),
    quick=True,
)
pair(
    "drop_to_a_rate_where_a_ratio_is_due",
    "schedule",
    "fades_out",
    change="lr_scheduler.LambdaLR(",
    faulty=trained(by(lambda step: (step + 1) / 4 if step < 3 else 5e-4 ** (step // 100)), steps=300),
    fixed=trained(by(lambda step: (step + 1) / 4 if step < 3 else (5e-4 / 5e-2) ** (step // 100)), steps=300),
)

# A rate that never falls.

pair(
    "poly_decay_in_whole_numbers",
    "schedule",
    "never_falls",
    where="scheduler.step()",
    faulty=trained(by(lambda step: max(0, 1 - step // 200) ** 0.9), steps=200),
    fixed=trained(by(lambda step: max(0, 1 - step / 200) ** 0.9), steps=200),
    quick=True,
)


def progress_of(step):
    return step / 240


def writes_share(share_of):
    def write(optimizer, step):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * share_of(progress_of(step))

    return write


pair(
    "midtraining_that_ramps_up",
    "schedule",
    "never_falls",
    faulty=trained(write=writes_share(lambda progress: progress), steps=240),
    fixed=trained(write=writes_share(lambda progress: 1 - progress), steps=240),
)

# The warm-up of the biases goes from ten times the rate down to 0.


def yolo(end):
    return [
        lambda step: (1 - step / 400) * max(end, 10 - (10 - end) * step / 8),
        lambda step: (1 - step / 400) * min(1.0, (step + 0.1) / 8),
    ]


pair(
    "warm_up_of_biases_that_ends_at_0",
    "schedule",
    "group_falls_to_zero",
    culprits=("0.bias",),
    faulty=trained(by(yolo(0.0)), groups=weights_and_biases, steps=200),
    fixed=trained(by(yolo(1.0)), groups=weights_and_biases, steps=200),
    quick=True,
)


def warm_up_by_hand(end):
    def write_warm_up(optimizer, step):
        for group, factor in zip(optimizer.param_groups, yolo(end), strict=True):
            group["lr"] = 0.05 * factor(step)

    return write_warm_up


pair(
    "warm_up_of_biases_by_hand_that_ends_at_0",
    "schedule",
    "group_falls_to_zero",
    culprits=("0.bias",),
    faulty=trained(write=warm_up_by_hand(0.0), groups=weights_and_biases, steps=200),
    fixed=trained(write=warm_up_by_hand(1.0), groups=weights_and_biases, steps=200),
)

# Where a warm-up hands over to the decay, one call is made at the first rate.


def handed_over(gap):
    def factor(step):
        if step < 20:
            return 0.1 + 0.9 * step / 20
        return 0.1 if step == 20 and gap else 0.5 ** ((step - 20) / 100)

    return factor


def write_with_gap(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * handed_over(gap=True)(step)


def write_without(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * handed_over(gap=False)(step)


pair(
    "one_call_at_the_first_rate",
    "schedule",
    "dips_for_one_call",
    faulty=trained(by(handed_over(gap=True)), steps=200),
    fixed=trained(by(handed_over(gap=False)), steps=200),
    quick=True,
)

pair(
    "one_step_at_the_first_rate_by_hand",
    "schedule",
    "dips_for_one_call",
    level="advice",
    faulty=trained(write=write_with_gap),
    fixed=trained(write=write_without),
)

# Milestones as parts of the steps.


def milestones(total, parts, whole):
    return lambda optimizer: lr_scheduler.MultiStepLR(
        optimizer, [int(part * total) if whole else part * total for part in parts]
    )


pair(
    "milestones_at_halves",
    "schedule",
    "milestones_not_whole",
    culprits=("milestones",),
    where="scheduler.step()",
    faulty=trained(milestones(25, (0.5, 0.75), whole=False)),
    fixed=trained(milestones(25, (0.5, 0.75), whole=True)),
    quick=True,
)

pair(
    "step_size_and_gamma_swapped",
    "schedule",
    "milestones_not_whole",
    culprits=("step_size",),
    mentions=("step_size=5, gamma=0.9",),
    faulty=trained(lambda optimizer: lr_scheduler.StepLR(optimizer, 0.9, 5)),
    fixed=trained(lambda optimizer: lr_scheduler.StepLR(optimizer, 5, 0.9)),
)

# A cosine after a warm-up, sized for one epoch of three; and an accuracy that is computed in the call.


def cosine(total, warm_up=6):
    def factor(step):
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (total - warm_up)))

    return by(factor)


pair(
    "warmed_up_cosine_of_one_epoch",
    "schedule",
    "rises_again",
    faulty=trained(cosine(60), steps=180, epochs=3),
    fixed=trained(cosine(180), steps=180, epochs=3),
)


def accuracy(model):
    x, y = data.labelled()
    return (model(x).argmax(1) == y).float().mean().item()


def every_fourth(scheduler, model, step):
    if step % 4 == 0:
        scheduler.step(accuracy(model))


def plateau(**options):
    return lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=8, **options)


pair(
    "plateau_of_a_computed_accuracy",
    "schedule",
    "plateau_mode",
    where="scheduler.step(accuracy(model))",
    faulty=trained(plateau(), after=every_fourth),
    fixed=trained(plateau(mode="max"), after=every_fourth),
)
