"""One watched run: how it begins, goes and ends."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.recording.events import Step
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.run import RunPlan, run


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()


def making(work=train, **given):
    def make(accumulate=1):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = (torch.randn(4, 3), torch.randn(4, 1))
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            **{"batch": batch, "fit": lambda batches: work(model, optimizer, batches), **given},
        )

    return make


def test_a_plain_run():
    record = run(making(frozen=("bias",)), RunPlan(knobs={"accumulate": 2}))
    assert (record.steps, record.rounds, record.items) == (FULL_ROUNDS,) * 3
    assert record.raised is None
    assert record.ended
    assert not record.notes
    assert record.knobs == {"accumulate": 2}
    assert record.frozen == ("bias",)
    assert [p.name for p in record.parameters] == ["weight", "bias"]


def test_a_loop_of_its_own_data_may_take_the_number_of_batches_alone():
    def work(model, optimizer, batches):
        train(model, optimizer, [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(len(batches))])

    record = run(making(work), RunPlan(count=5))
    assert (record.steps, record.items, record.ended) == (5, 5, True)


def test_fit_is_seeded_whatever_building_drew():
    drawn = []

    def making_noise(before):
        def work(model, optimizer, batches):
            drawn.append(float(torch.rand(1)))
            train(model, optimizer, batches)

        made = making(work)
        return lambda: (torch.rand(before), made())[1]

    for before in (1, 5):
        run(making_noise(before), RunPlan())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam], ids=["none", "one"])
def test_for_a_loss_alone_a_plain_loop_stands_in(optimizer):
    def make():
        model = nn.Linear(3, 1)
        made = optimizer and optimizer(model.parameters())
        return TrainLoop(model=model, optimizer=made, batch=(torch.randn(4, 3), torch.randn(4, 1)), loss=mse)

    record = run(make, RunPlan())
    assert record.steps == FULL_ROUNDS
    assert record.optimizers[0].kind == ("Adam" if optimizer else "SGD")


def test_a_loop_with_a_copy_of_its_batches_is_ended_from_its_own_step():
    def epochs(model, optimizer, batches):
        mine = list(batches)
        while True:
            train(model, optimizer, mine)

    record = run(making(epochs), RunPlan(count=4))
    assert record.steps == 24  # twice the steps that are watched in full
    assert not record.ended
    assert record.raised is None


def test_what_fit_raises_for_want_of_batches_is_noted_only():
    def two_epochs(model, optimizer, batches):
        for _ in range(2):
            seen = [train(model, optimizer, [batch]) for batch in batches]
            print(1 / len(seen))

    record = run(making(two_epochs), RunPlan())
    assert record.raised is None
    assert record.notes == ["fit raised ZeroDivisionError: division by zero after the batches had ended"]


def test_what_fit_raises_after_it_read_ahead_is_put_to_the_test_with_all_batches():
    def by_index(model, optimizer, batches):
        mine = list(batches)
        for number in range(len(batches)):
            train(model, optimizer, [mine[number]])

    record = run(making(by_index), RunPlan(count=13, read_ahead=10))
    assert (record.raised, record.steps) == (None, 13)

    def wrong(model, optimizer, batches):
        train(model, optimizer, list(batches)[:3])
        raise ValueError("bad row")

    record = run(making(wrong), RunPlan(count=13, read_ahead=10))
    assert record.raised.summary == "ValueError: bad row"


def test_a_loop_with_long_windows_gets_more_batches():
    def windows(model, optimizer, batches):
        for number, batch in enumerate(batches, 1):
            mse(model, batch).backward()
            if number % 30 == 0:
                optimizer.step()
                optimizer.zero_grad()

    evidence = Evidence(making(windows))
    record = evidence.run()
    assert (record.items, record.steps) == (100, 3)
    assert evidence.own_steps == 3


def test_a_loop_that_never_steps_gets_no_more_than_it_asked_for():
    def no_steps(model, optimizer, batches):
        for batch in batches:
            model(batch[0])

    record = Evidence(making(no_steps)).run()
    assert (record.items, record.steps) == (10, 0)


def test_contexts_are_entered_and_left_around_fit():
    order = []

    @contextlib.contextmanager
    def noted(watch):
        order.append("in")
        try:
            yield
        finally:
            order.append("out")

    def work(model, optimizer, batches):
        order.append("fit")
        raise ValueError

    plan = RunPlan(prepare=lambda watch: order.append("prepare"), contexts=lambda watch: [noted(watch)])
    run(making(work), plan)
    assert order == ["prepare", "in", "fit", "out"]


def test_gradients_are_on_whatever_the_process_had():
    with torch.no_grad():
        record = run(making(), RunPlan())
        assert not torch.is_grad_enabled()
    assert len(record.of(Step)) == FULL_ROUNDS
    assert record.reached(0)
