"""What ``checkpointing_equivalence`` says of verdicts that are given to it, and when it makes no runs."""

from __future__ import annotations

import functools
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from pytest_trainloop.api import check_loop, observe
from pytest_trainloop.checks.numerics.checkpointing_equivalence.check import checkpointing_equivalence
from pytest_trainloop.checks.numerics.checkpointing_equivalence.first_difference import OtherCall
from pytest_trainloop.checks.numerics.checkpointing_equivalence.passes import Difference, plain_name
from pytest_trainloop.checks.numerics.checkpointing_equivalence.runs import Checkpointing, Verdict
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.compare import Agreement
from pytest_trainloop.recording import torch_internals
from pytest_trainloop.recording.events import CheckpointCall, Place
from pytest_trainloop.runs.evidence import Evidence
from tests.helpers.records import ONE, FakeEvidence, parameter, record

HERE = Place("model.py", 9, "x = checkpoint(block, x, use_reentrant=True)")
CALL = CheckpointCall(at=1, place=HERE, site=(), reentrant=True, preserves=True, needs_grad=False, grad_enabled=True)


class Given:
    """Runs whose verdict is given."""

    place = str(HERE)

    def __init__(self, verdict=None, twice=()):
        self.verdict = lambda: verdict
        self.buffers_updated_twice = lambda: twice
        self.require_recomputation = lambda: None

    def counts(self, name):
        return "num" in name

    def largest_at_the_end(self, name):
        return 2.0, 1.0


def with_checkpoint(checkpoint=False): ...


def given(made, calls=(CALL,), norm=None, knob=False):
    seen = record([parameter(0, "a.weight")], held=[0], gradients={0: ONE})
    seen.checkpoints.extend(calls)
    evidence = FakeEvidence(seen, shared={Checkpointing: made})
    model = nn.Sequential(OrderedDict(norm=norm or nn.BatchNorm1d(2)))
    evidence.fresh_loop = lambda: TrainLoop(model=model)
    evidence.make, evidence.knobs = with_checkpoint, {"checkpoint": "checkpoint"} if knob else {}
    return evidence


def findings(made, **how):
    return list(checkpointing_equivalence(given(made, **how)))


def difference(*, loss=(1.0, 1.0), names=("a.weight",), forward=False):
    return Difference(0, loss, Agreement(1.0, 0.5, 0.3), names, (), "train.py:7", forward)


def test_all_is_the_same():
    assert findings(Given()) == []


def test_no_gradient():
    verdict = Verdict(
        cause="inputs_need_grad", difference=difference(), without_gradient=("a.weight",), place=str(HERE)
    )
    (found,) = findings(Given(verdict))
    assert found.cause == "inputs_need_grad"
    assert "a.weight gets no gradient" in found.summary


def test_a_part_of_the_gradient_only():
    (found,) = findings(Given(Verdict(cause="inputs_need_grad", difference=difference(), place=str(HERE))))
    assert "a part of its gradient only" in found.summary


def test_a_generator_is_named():
    verdict = Verdict(cause="rng_not_preserved", difference=difference(), generators=("python's random",))
    (found,) = findings(Given(verdict))
    assert found.culprits == ("python's random",)
    assert "restore python's random" in found.summary


def test_the_call_that_differs_is_named():
    verdict = Verdict(
        cause="state_changed", difference=difference(), other=OtherCall("mul", "blocks.0", "model.py:4", by=0.5)
    )
    (found,) = findings(Given(verdict))
    assert found.where == "model.py:4"
    assert "gives another result of mul() in blocks.0 (by up to 0.5)" in found.shown_by


def test_a_result_that_the_function_stores():
    (found,) = findings(Given(Verdict(cause="side_result_cut", difference=difference(), place=str(HERE))))
    assert (found.cause, found.culprits, found.where) == ("side_result_cut", ("a.weight",), str(HERE))


def test_no_call_differs():
    (found,) = findings(Given(Verdict(cause="state_changed", difference=difference(), place=str(HERE))))
    assert "not determined" in found.shown_by
    assert found.where == str(HERE)


def test_fit_raises_with_checkpointing_only():
    (found,) = findings(Given(Verdict(cause="state_changed", raised="CheckpointError: other", place=str(HERE))))
    assert "fit raises CheckpointError: other" in found.measured


def test_the_loss_differs_at_once():
    (found,) = findings(Given(Verdict(cause="other_computation", difference=difference(loss=(1.5, 1.0), forward=True))))
    assert "loss 1.5 with checkpointing and 1 without" in found.measured


STATISTICS = ("norm.running_mean", "norm.num_batches_tracked")


def test_statistics_are_advice_without_a_knob_and_a_fault_with_one():
    (found,) = findings(Given(twice=STATISTICS))
    assert (found.cause, found.level) == ("statistics_updated_twice", "advice")
    assert "norm.num_batches_tracked is 2 with checkpointing and 1 without" in found.measured
    assert "a knob checkpoint=" in found.repair
    (found,) = findings(Given(twice=STATISTICS), knob=True)
    assert found.level == "fault"


def test_a_counter_of_the_project_is_advice_even_with_the_knob():
    (found,) = findings(Given(twice=("num_calls",)), knob=True)
    assert found.level == "advice"


@pytest.mark.parametrize("momentum", [1 - 0.9**0.5, 0.0513, 1 - 0.99**0.5, 0.005013])
def test_a_momentum_made_for_two_updates_is_right(momentum):
    assert findings(Given(twice=STATISTICS), norm=nn.BatchNorm1d(2, momentum=momentum)) == []


@pytest.mark.parametrize("momentum", [0.1, 0.01, 0.05, 0.003, 0.5, 1.0, 0.0517])
def test_other_momenta_are_not(momentum):
    assert len(findings(Given(twice=STATISTICS), norm=nn.BatchNorm1d(2, momentum=momentum))) == 1


def test_a_count_of_batches_alone_changes_nothing():
    assert findings(Given(twice=("norm.num_batches_tracked",)), norm=nn.BatchNorm1d(2, momentum=None)) == []


@pytest.mark.parametrize(
    "calls",
    [
        (),
        (
            CheckpointCall(
                **{
                    **{n: getattr(CALL, n) for n in CALL.__slots__},
                    **{n: getattr(CALL, n) for n in ("at", "place", "site")},
                    "grad_enabled": False,
                }
            ),
        ),
    ],
)
def test_nothing_to_compare(calls):
    with pytest.raises(CannotDecide, match="no activation checkpointing was seen"):
        list(checkpointing_equivalence(given(None, calls)))


def test_names_of_wrapped_modules():
    assert plain_name("blocks.0._checkpoint_wrapped_module.weight") == "blocks.0.weight"


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.first, self.second, self.call = nn.Linear(3, 4), nn.Linear(4, 1), call

    def forward(self, x):
        return self.call(lambda h: self.second(h.tanh()), self.first(x))


def loop(call, *, after=lambda loss: loss):
    model = Net(call)
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


def test_a_loop_without_checkpoints_costs_no_run():
    evidence = Evidence(lambda: loop(plain))
    evidence.run()
    before = evidence.own_steps
    with pytest.raises(CannotDecide):
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
