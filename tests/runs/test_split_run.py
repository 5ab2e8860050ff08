"""Runs in two halves with something between them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.split_run import STEPS_OF_A_HALF, halves, no_halves, same_tensor


def evidence_of(fit_of, *, rows=24, batch=4, model=None, **fields):
    def make():
        net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)) if model is None else model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        data = torch.utils.data.TensorDataset(torch.randn(rows, 3), torch.randn(rows, 1))
        batches = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)
        return TrainLoop(model=net, optimizer=optimizer, batches=batches, fit=fit_of(net, optimizer), **fields)

    return Evidence(make)


def plain(net, optimizer, epochs=1, window=1):
    def fit(batches):
        net.train()
        for _ in range(epochs):
            for i, (x, y) in enumerate(batches, 1):
                (nn.functional.mse_loss(net(x), y) / window).backward()
                if i % window == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    return fit


def test_numbers_drawn_between_change_nothing():
    evidence = evidence_of(plain)
    reference = no_halves(evidence)
    drew = halves(evidence, lambda _loop, _watch: torch.randn(7), double=True)
    assert drew.differ(reference.end) == []
    other = halves(evidence, cut_seed=1, double=True)
    assert other.differ(reference.end) != []
    kept = halves(evidence, lambda _loop, _watch: torch.randn(7), double=True, seed_after=False)
    assert kept.differ(reference.end) != []


@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("window", [1, 3])
def test_a_half_ends_after_its_steps(epochs, window):
    made = no_halves(evidence_of(lambda net, opt: plain(net, opt, epochs, window)))
    assert made.steps == [STEPS_OF_A_HALF, STEPS_OF_A_HALF]
    assert made.items == STEPS_OF_A_HALF * window


def test_a_loop_that_never_ends_is_ended_twice():
    def fit_of(net, optimizer):
        once = plain(net, optimizer)

        def fit(batches):
            while True:
                once(batches)

        return fit

    made = no_halves(evidence_of(fit_of))
    assert made.steps == [STEPS_OF_A_HALF, STEPS_OF_A_HALF]
    assert made.stopped


def test_a_loop_that_reads_all_batches_first_is_stopped():
    def fit_of(net, optimizer):
        once = plain(net, optimizer)

        def fit(batches):
            kept = list(batches)
            while True:
                once(kept)

        return fit

    made = no_halves(evidence_of(fit_of))
    assert made.stopped
    assert made.steps[0] == made.steps[1]


def test_a_mean_over_no_batches_ends_a_half():
    def fit_of(net, optimizer):
        def fit(batches):
            for _ in range(3):
                losses = []
                for x, y in batches:
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(net(x), y)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                sum(losses) / len(losses)

        return fit

    assert no_halves(evidence_of(fit_of)).steps == [STEPS_OF_A_HALF, STEPS_OF_A_HALF]


def test_equality():
    a = torch.tensor([1.0, float("nan"), 0.0])
    assert same_tensor(a, a.clone())
    assert same_tensor(a.double(), a)
    assert same_tensor(a, a + 1e-6)
    assert not same_tensor(a, a + 1e-2)
    assert not same_tensor(a, None)
    assert not same_tensor(a, a[:2])
    assert not same_tensor(torch.tensor(1), torch.tensor(2))
