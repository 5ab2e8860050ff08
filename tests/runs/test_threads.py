"""A small loop runs in one thread, a large one in all that its process may take."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop import TrainLoop
from pytest_trainloop.runs import threads
from pytest_trainloop.runs.evidence import Evidence


@pytest.fixture
def seen(monkeypatch):
    """The threads of torch at each batch of a loop, in a process that may take three."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    before, numbers = torch.get_num_threads(), []
    torch.set_num_threads(3)
    yield numbers
    torch.set_num_threads(before)


def evidence_of(numbers):
    def make():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for batch in batches:
                numbers.append(torch.get_num_threads())
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(4, 2), fit=fit)

    return Evidence(make)


def test_a_small_loop_takes_one_and_leaves_the_number_as_it_was(seen):
    evidence = evidence_of(seen)
    evidence.run()
    evidence.rerun()
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("pays", "number"), [(True, 3), (False, 1)])
def test_a_large_loop_takes_more_where_the_cores_are_free(seen, monkeypatch, pays, number):
    monkeypatch.setattr(threads, "LARGE", 0.0)
    monkeypatch.setattr(threads, "pays", lambda given: pays)
    evidence = evidence_of(seen)
    assert evidence.run().rounds == 12
    assert seen[0] == 1
    assert set(seen[-12:]) == {number}
    evidence.rerun()
    assert set(seen[-12:]) == {number}


@pytest.mark.parametrize(("slow", "answer"), [(1, True), (3, False)])
def test_more_threads_pay_where_an_operation_is_faster_with_them(seen, monkeypatch, slow, answer):
    now = [0.0]

    def passes():
        now[0] += 2.0 if torch.get_num_threads() == slow else 1.0
        return now[0]

    monkeypatch.setattr(threads.time, "perf_counter", passes)
    assert threads.pays(3) is answer
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, 8),
        ({"PYTEST_XDIST_WORKER_COUNT": "4"}, 2),
        ({"PYTEST_XDIST_WORKER_COUNT": "16"}, 1),
        ({"PYTEST_XDIST_WORKER_COUNT": "4", "OMP_NUM_THREADS": "8"}, 8),
    ],
)
def test_each_worker_has_its_share_unless_the_user_said_how_many(seen, monkeypatch, environment, number):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert threads.most(8) == number
