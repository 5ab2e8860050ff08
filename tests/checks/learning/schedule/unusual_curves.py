"""Right curves that look like a wrong one: each is a factor on the base rate, by step."""

from __future__ import annotations

import math

from torch.optim import lr_scheduler

from tests.checks.learning.schedule.faults_curves import by, trained, weights_and_biases
from tests.loops.odd import odd

FACTORS = {
    "inverse_root_after_warm_up": (
        "its quotients rise towards 1, on no line (Noam)",
        lambda step: min((step + 1) / 10, (10 / (step + 1)) ** 0.5),
    ),
    "approach_to_a_floor": ("a fall that slows down, and stays", lambda step: 0.1 + 0.9 * 0.8 ** min(step, 60)),
    "linear_decay_past_the_plan": ("its quotients fall faster and faster", lambda step: max(0.0, 1 - step / 210)),
    "half_a_cosine": ("quotients of a cosine are no cosine", lambda step: math.cos(math.pi / 2 * min(step, 198) / 200)),
    "warm_up_from_its_own_rate": (
        "the first factor is the learning rate by chance",
        lambda step: min(1.0, 0.05 + step / 50),
    ),
    "constant_for_the_plan": ("no factor at all (transformers' constant schedule)", lambda step: 1.0),
    "drop_after_the_last_step": (
        "a tenth from the last call on: the next stage",
        lambda step: 0.1 if step >= 200 else 1.0,
    ),
    "warm_up_for_the_whole_plan": (
        "a first stage that only warms up, from a tenth",
        lambda step: min(1.0, 0.1 + 0.9 * step / 200),
    ),
    "hard_restarts": ("restarts at once at the peak", lambda step: 0.5 * (1 + math.cos(math.pi * (step % 60) / 60))),
    "two_waves": (
        "num_cycles=1.5 of transformers, after a warm-up",
        lambda step: min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * 3 * min(step, 200) / 200)),
    ),
    "every_other_step_at_half": ("two rates in turn", lambda step: 0.4 if step % 2 else 1.0),
    "warm_up_stable_decay_by_root": (
        "1 - sqrt over the last fifth",
        lambda step: min(1.0, (step + 1) / 10, 1 - max(0.0, (min(step, 199) - 160) / 40) ** 0.5),
    ),
}

for name, (notes, factor) in FACTORS.items():
    make = trained(by(factor), steps=200, epochs=2)
    make.__name__ = name
    odd(notes=notes)(make)


def cosine_until(end):
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(step, end) / end))


@odd(notes="the first layers come to rest before the others, each at the end of its own cosine (FreezeOut)")
def layers_that_come_to_rest():
    return trained(by([cosine_until(50), cosine_until(200)]), groups=weights_and_biases, steps=200)()


@odd(notes="a group with a tenth of the rate beside one with all of it; the base rate is a tenth too")
def a_tenth_of_a_tenth():
    def groups(model):
        return [{**group, "lr": 0.1} for group in weights_and_biases(model)]

    return trained(by([lambda step: 0.1 * 0.99**step, lambda step: 0.99**step]), groups=groups)()


class Decay(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [group["lr"] * (0.99 if self.last_epoch else 1.0) for group in self.optimizer.param_groups]


@odd(notes="an exponential decay in the recursive form: each call multiplies the last rate by one factor")
def decay_of_the_last_rate():
    return trained(Decay, steps=200)()


@odd(notes="milestones that are whole numbers in floating point are reached")
def milestones_in_floating_point():
    return trained(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [0.5 * 20, 0.75 * 20]), steps=20)()


def rate_of(step, most=0.05, warm_up=10, total=200):
    if step < warm_up:
        return most * (step + 1) / warm_up
    return 0.1 * most + 0.45 * most * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (total - warm_up))))


@odd(notes="warm-up and cosine by a function of the step, with a floor of a tenth (nanoGPT)")
def rate_by_a_function_of_the_step():
    def write(optimizer, step):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)

    return trained(write=write, steps=200)()


@odd(notes="the trunk has a rate of 0 in all steps that a test makes, and is unfrozen by its rate later")
def unfrozen_by_rates_long_after():
    def write(optimizer, step):
        for group, begins in zip(optimizer.param_groups, (80, 0), strict=True):
            group["lr"] = 0.05 if step >= begins else 0.0

    return trained(write=write, groups=weights_and_biases, steps=200)()


@odd(notes="three decades by a staircase: the last quarter is at a thousandth of the peak")
def staircase_of_three_decades():
    return trained(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [60, 120, 160]), steps=200)()


@odd(notes="a range test over eight decades: the peak comes last")
def range_test_over_eight_decades():
    return trained(by(lambda step: 1e-8 * 10 ** (8 * step / 200)), steps=200)()


@odd(notes="a quartic decay to 0, which is small for long and ends with the training")
def quartic_decay_to_zero():
    return trained(by(lambda step: (1 - min(step, 200) / 200) ** 4), steps=200)()


@odd(notes="five decades by an exponential decay (annealed Langevin sampling, reproductions of PINNs)")
def exponential_decay_over_five_decades():
    return trained(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 10 ** (-5 / 200)), steps=200)()
