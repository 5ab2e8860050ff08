"""What counts as a round, by a clock that the loop itself moves on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.timing import ready_batches
from pytest_trainloop.runs.timing.step_times import MOST_ROUNDS, WARM_UP, StepTimer, Wanted


class Clock:
    """Moved on by the loops, so that every time is exact."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def loop(work, model=None, **given):
    """``work(model, optimizer, batches)`` on eight rows."""

    def make():
        net = nn.Linear(4, 1) if model is None else model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        batch = {"x": torch.ones(8, 4), "y": torch.ones(8, 1)}
        return TrainLoop(
            model=net,
            optimizer=optimizer,
            fit=lambda batches: work(net, optimizer, batches),
            **{"batch": batch, **given},
        )

    return make


def step(model, optimizer, batch):
    optimizer.zero_grad()
    F.mse_loss(model(batch["x"]), batch["y"]).backward()
    optimizer.step()


def times(make, clock, rounds=7, seconds=0.0):
    return StepTimer(Evidence(make)).measured(Wanted(rounds=rounds, seconds=seconds, clock=clock))


def test_a_round_is_what_lies_between_two_steps_with_all_that_is_done_there(clock):
    def work(model, optimizer, batches):
        for number, batch in enumerate(batches):
            clock.now += 2.0
            step(model, optimizer, batch)
            clock.now += 0.5 if number % 2 else 0.25  # logging

    found = times(loop(work), clock, rounds=4)
    assert found.seconds == (2.5, 2.25, 2.5, 2.25)
    assert found.batches == 1
    assert found.device == "cpu"


def test_the_first_rounds_of_each_fit_do_not_count(clock):
    def work(model, optimizer, batches):
        for number, batch in enumerate(batches):
            clock.now += 100.0 if number <= WARM_UP else 1.0
            step(model, optimizer, batch)

    assert set(times(loop(work), clock, rounds=2 * MOST_ROUNDS).seconds) == {1.0}


def test_an_accumulating_loop_has_several_batches_in_a_round(clock):
    def work(model, optimizer, batches):
        for number, batch in enumerate(batches, 1):
            clock.now += 1.0
            (F.mse_loss(model(batch["x"]), batch["y"]) / 3).backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()

    found = times(loop(work), clock)
    assert set(found.seconds) == {3.0}
    assert found.batches == pytest.approx(3, rel=0.2)


def test_a_round_of_two_optimizers_is_that_of_the_one_that_steps_least_often(clock):
    def make():
        nets = nn.ModuleDict({"critic": nn.Linear(4, 1), "generator": nn.Linear(4, 4)})
        optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()}

        def fit(batches):
            for number, x in enumerate(batches, 1):
                clock.now += 1.0
                nets["critic"](nets["generator"](x)).mean().backward()
                optimizers["critic"].step()
                if number % 3 == 0:
                    clock.now += 0.5
                    optimizers["generator"].step()

        return TrainLoop(model=nets, optimizer=optimizers, batch=torch.ones(8, 4), fit=fit)

    assert set(times(make, clock).seconds) == {3.5}


def test_seconds_are_filled_up_by_further_fits(clock):
    fits = []

    def work(model, optimizer, batches):
        fits.append(0)
        for number, batch in enumerate(batches):
            clock.now += 1.0
            step(model, optimizer, batch)
            if number == 9:
                return  # as many steps as the project chose

    found = times(loop(work), clock, rounds=5, seconds=20.0)
    assert len(found.seconds) == 20
    assert len(fits) == 1 + 4 + 1  # watched; of ten steps six rounds count; for the memory


def test_what_copies_cost_does_not_count(clock, monkeypatch):
    class Dear:
        """A field of a batch that takes long to copy."""

        def __deepcopy__(self, memo):
            clock.now += 1000.0
            return self

    def work(model, optimizer, batches):
        for batch in batches:
            clock.now += 1.0
            assert batch.pop("x") is not None  # each is fresh
            model.zero_grad()
            (model.weight**2).sum().backward()
            optimizer.step()

    make = loop(work, batch={"x": torch.ones(8, 4), "dear": Dear()})
    assert set(times(make, clock).seconds) == {1.0}
    monkeypatch.setattr(ready_batches, "MOST_BYTES", 1)  # copied one by one
    assert set(times(make, clock).seconds) == {1.0}


def test_batches_of_the_project_go_round_and_keep_its_attributes(clock):
    def work(model, optimizer, batches):
        assert batches.batch_size == 2
        for batch in list(batches):
            clock.now += float(batch.sum())
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()

    data = torch.eye(4)[torch.tensor([0, 1])].repeat(4, 1)
    found = times(loop(work, batch=None, batches=torch.utils.data.DataLoader(data, batch_size=2)), clock)
    assert set(found.seconds) == {2.0}


def test_a_loop_that_raises_once_its_schedule_is_over_is_timed_until_then(clock):
    def work(model, optimizer, batches):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        for batch in batches:
            clock.now += 1.0
            step(model, optimizer, batch)
            schedule.step()

    assert set(times(loop(work), clock, rounds=30).seconds) == {1.0}


def test_a_loop_over_batches_of_its_own_is_ended(clock):
    def work(model, optimizer, batches):
        first = next(iter(batches))
        while True:
            clock.now += 1.0
            step(model, optimizer, first)

    assert set(times(loop(work), clock).seconds) == {1.0}


def test_the_memory_of_tensors_is_counted_on_a_cpu(clock):
    def work(model, optimizer, batches):
        for batch in batches:
            clock.now += 1.0
            step(model, optimizer, batch)

    def wide():
        return nn.Linear(4, 1, bias=False).requires_grad_()

    found = times(loop(work, model=wide), clock)
    weights, gradients, outputs = 16, 16, 32
    assert weights + gradients + outputs <= found.peak_bytes < 1000
    assert found == times(loop(work, model=wide), clock)


def test_one_step_is_nothing_to_time(clock):
    def work(model, optimizer, given):
        step(model, optimizer, next(iter(given)))

    with pytest.raises(CannotDecide, match=r"fit makes 1 optimizer step in .*; what lies between two steps is timed"):
        times(loop(work), clock)
