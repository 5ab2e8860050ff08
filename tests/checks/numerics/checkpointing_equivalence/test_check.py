"""What ``checkpointing_equivalence`` says of small loops, and when it makes no runs."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.numerics.checkpointing_equivalence.check import checkpointing_equivalence
from pytest_trainloop.checks.numerics.checkpointing_equivalence.runs import plain_name
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.frontends.api import check_loop, observe
from pytest_trainloop.recording import torch_internals
from pytest_trainloop.runs.evidence import Evidence


class Net(nn.Module):
    def __init__(self, call, norm):
        super().__init__()
        self.first, self.norm, self.second, self.call = nn.Linear(3, 4), norm or nn.Tanh(), nn.Linear(4, 1), call

    def forward(self, x):
        return self.call(lambda h: self.second(self.norm(h)), self.first(x))


def loop(call, norm=None, *, after=lambda loss: loss):
    model = Net(call, norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            after(F.mse_loss(model(x), y)).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(6, 3), torch.randn(6, 1)), fit=fit)


def plain(function, x):
    return function(x)


saved = functools.partial(checkpoint, use_reentrant=False)


def result(make, **how):
    (found,) = check_loop(make, only=["checkpointing_equivalence"], raises=False, **how).results
    return found


def levels(norm):
    return [f.level for f in result(lambda: loop(saved, norm())).findings]


@pytest.mark.parametrize("momentum", [1 - 0.9**0.5, 0.0513, 0.005013])
def test_a_momentum_made_for_two_updates_is_right(momentum):
    assert levels(lambda: nn.BatchNorm1d(4, momentum=momentum)) == []


@pytest.mark.parametrize("momentum", [0.1, 0.05, 0.5, 1.0, 0.0517])
def test_other_momenta_are_not(momentum):
    expected = [] if momentum == 1.0 else ["advice"]  # the statistics of the last batch, whoever came before
    assert levels(lambda: nn.BatchNorm1d(4, momentum=momentum)) == expected


def test_a_count_of_batches_alone_changes_nothing():
    assert levels(lambda: nn.BatchNorm1d(4, momentum=None)) == []


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x


def test_a_counter_of_the_project_is_advice_even_with_the_knob():
    (found,) = result(lambda checkpoint=False: loop(saved if checkpoint else plain, Counted())).findings
    assert (found.level, found.culprits) == ("advice", ("norm.calls",))
    assert "norm.calls is 2 with checkpointing and 1 without" in found.measured


def test_names_of_wrapped_modules():
    assert plain_name("blocks.0._checkpoint_wrapped_module.weight") == "blocks.0.weight"


def only_without_gradients(function, x):
    with torch.no_grad():
        saved(function, x)
    return function(x)


@pytest.mark.parametrize("call", [plain, only_without_gradients])
def test_a_loop_without_checkpoints_costs_no_run(call):
    evidence = Evidence(lambda: loop(call))
    evidence.run()
    before = evidence.own_steps
    with pytest.raises(CannotDecide, match="no activation checkpointing was seen"):
        list(checkpointing_equivalence(evidence))
    assert evidence.own_steps == before


def test_a_loop_with_checkpoints_costs_two_short_runs():
    evidence = Evidence(lambda: loop(saved))
    evidence.run()
    before = evidence.own_steps
    assert list(checkpointing_equivalence(evidence)) == []
    assert evidence.own_steps == before + 2


def test_a_knob_that_is_no_switch_is_left_alone():
    def make(checkpoint="blocks"):
        assert checkpoint == "blocks"
        return loop(plain)

    assert result(make).outcome == "skipped"


def test_a_knob_that_the_loop_does_not_use():
    found = result(lambda checkpoint=False: loop(plain))
    assert found.outcome == "skipped"
    assert found.reason.startswith("with checkpoint=True nothing was seen to be recomputed: hand the knob on to the mo")


def test_a_knob_that_cannot_be_switched():
    def make(checkpoint=False):
        if checkpoint:
            raise RuntimeError("needs another library")
        return loop(plain)

    found = result(make)
    assert found.outcome == "skipped"
    assert "with checkpoint=True the loop could not be run" in found.reason


def test_a_knob_that_builds_another_model():
    def make(checkpoint=False):
        made = loop(plain)
        if checkpoint:
            made.model.third = nn.Linear(2, 2)
        return made

    assert "third" in result(make).reason


def test_an_exception_of_the_loops_own_is_no_finding():
    def broken(function, x):
        saved(function, x)
        raise RuntimeError("broken")

    found = result(lambda: loop(broken))
    assert not found.findings
    assert found.outcome == "error"


def test_gradients_that_are_not_finite():
    found = result(lambda: loop(saved, after=lambda loss: loss * float("inf")))
    assert found.outcome == "skipped"
    assert "not finite" in found.reason


def test_unseeded_draws_under_a_checkpoint_are_for_determinism():
    def noisy(function, x):
        generator = torch.Generator()
        generator.seed()
        return saved(lambda h: function(h * torch.rand(h.shape, generator=generator)), x)

    assert result(lambda: loop(noisy)).outcome == "unreliable"


def test_a_torch_with_other_names(monkeypatch):
    monkeypatch.setattr(torch_internals, "_GENERATORS", ("_renamed",))
    assert result(lambda: loop(saved)).outcome == "skipped"


def test_a_loop_that_was_watched_once():
    made = loop(saved)
    with observe(made.model, made.optimizer) as watched:
        made.fit([made.batch] * 3)
    (found,) = watched.check("checkpointing_equivalence").results
    assert found.outcome == "skipped"
    assert "further runs" in found.reason
