"""A check passes where it looked at something: else it does not apply, or is skipped."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop

OF_OTHER_LOOPS = {
    "train_mode": "no module of the model acts by mode (as dropout and batch norm do)",
    "frozen_stays_frozen": "no parameter is frozen: all require gradients, and frozen= names none",
    "adversaries_oppose": "no network scores what another trained network makes",
    "parameter_precision": "no parameter, average or running value is kept in bfloat16 or float16",
    "grad_scaler": "no GradScaler is called",
    "schedule": "the learning rate is constant, and no scheduler is used",
    "weight_decay_groups": "no optimizer that steps has weight decay",
}
"""Checks of what a plain loop does not have, and what they say of it."""


def plain(before_step=lambda optimizer: None, *, offset=0, **knobs):
    """A loop without anything but a model, a loss and an optimizer; labels from ``offset`` on."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y + offset)
            optimizer.zero_grad()
            loss.backward()
            before_step(optimizer)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 6), torch.arange(8) % 4), fit=fit)


def test_what_a_loop_does_not_have_is_not_counted_as_passed():
    results = {r.check: r for r in check_loop(plain, only=list(OF_OTHER_LOOPS)).results}
    assert {name: (r.outcome, r.applies, r.reason) for name, r in results.items()} == {
        name: ("skipped", False, reason) for name, reason in OF_OTHER_LOOPS.items()
    }


def test_an_autocast_of_ours_that_shows_nothing_is_no_pass_of_low_precision():
    (result,) = check_loop(plain, only=["precision_parity"]).results
    assert (result.outcome, result.applies) == ("skipped", False)
    assert result.reason.startswith("the loop computes nothing in low precision and has no knob precision=")


def test_a_run_that_raised_shows_nothing_that_comes_after():
    report = check_loop(lambda: plain(offset=1), raises=False)
    outcomes = {r.check: r.outcome for r in report.results}
    assert outcomes.pop("loss_contract") == "failed"
    assert set(outcomes.values()) == {"skipped"}


def test_without_a_step_nothing_is_said_of_steps():
    def leave(optimizer):
        optimizer.zero_grad = optimizer.step = lambda: None

    report = check_loop(lambda: plain(leave), raises=False, only=["every_param_moves", "optimizer_numerics"])
    assert {r.outcome for r in report.results} == {"skipped"}
