"""Runs in two halves with something between them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.errors import CannotDecide, UserCodeError
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.halves import STEPS, halves, no_halves, same_tensor


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


def test_two_references_are_the_same():
    evidence = evidence_of(plain)
    first = no_halves(evidence)
    second = halves(evidence, double=first.double)
    assert first.double
    assert first.steps == [STEPS, STEPS]
    assert first.calls == 2
    assert first.differ(second.end) == []
    assert first.trained() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(t.dtype == torch.float64 for t in first.end.values())


def test_steps_are_counted_as_the_loop_s_own():
    evidence = evidence_of(plain)
    evidence.run()
    before = evidence.own_steps
    no_halves(evidence)
    assert evidence.own_steps - before == 2 * STEPS


def test_what_happens_between_shows():
    evidence = evidence_of(plain)
    reference = no_halves(evidence)

    def between(loop, _watch):
        with torch.no_grad():
            loop.model[0].weight.mul_(1.01)

    moved = halves(evidence, between, double=True)
    assert moved.between_was_called
    assert "2.bias" in moved.differ(reference.end)


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
    assert made.steps == [STEPS, STEPS]
    assert made.items == STEPS * window


def test_a_loop_that_never_ends_is_ended_twice():
    def fit_of(net, optimizer):
        once = plain(net, optimizer)

        def fit(batches):
            while True:
                once(batches)

        return fit

    made = no_halves(evidence_of(fit_of))
    assert made.steps == [STEPS, STEPS]
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

    assert no_halves(evidence_of(fit_of)).steps == [STEPS, STEPS]


def test_halves_alone():
    evidence = evidence_of(plain)
    reference = no_halves(evidence)
    first = halves(evidence, lambda _loop, _watch: None, before=(), after=(0,), double=True)
    assert first.steps == [STEPS]
    assert all(same_tensor(tensor, reference.cut[name]) for name, tensor in first.end.items())
    saved = {}
    halves(evidence, lambda loop, _watch: saved.update(model=loop.model.state_dict(), opt=loop.optimizer.state_dict()),
           after=(), double=True)  # fmt: skip

    def load(loop, _watch):
        loop.model.load_state_dict(saved["model"])
        loop.optimizer.load_state_dict(saved["opt"])

    second = halves(evidence, load, before=(), double=True)
    assert second.differ(reference.end) == []


def test_inside_one_call():
    evidence = evidence_of(plain)
    seen = []
    inside = halves(evidence, lambda loop, _watch: seen.append(loop.model[0].weight.clone()), inside=True, double=True)
    assert inside.calls == 1
    assert inside.steps == [STEPS, STEPS]
    assert torch.equal(seen[0], inside.cut["0.weight"])
    assert inside.differ(halves(evidence, inside=True, double=True).end) == []


def test_a_loop_that_runs_once_only():
    def fit_of(net, optimizer):
        once, calls = plain(net, optimizer), []

        def fit(batches):
            calls.append(1)
            if len(calls) == 1:
                once(batches)

        return fit

    with pytest.raises(CannotDecide, match="no optimizer step when it is called a second time"):
        no_halves(evidence_of(fit_of))


def test_an_exception_between_is_the_user_s():
    def between(_loop, _watch):
        raise ValueError("no score")

    with pytest.raises(UserCodeError, match="evaluate raised ValueError: no score") as caught:
        halves(evidence_of(plain), between, double=True, stage="evaluate")
    assert caught.value.one_check


def test_loops_in_float32_only():
    class Fixed(nn.Linear):
        def forward(self, x):
            if x.dtype != torch.float32:
                raise TypeError("float32 is needed")
            return super().forward(x)

    made = no_halves(evidence_of(plain, model=lambda: Fixed(3, 1)))
    assert not made.double
    assert made.end["weight"].dtype == torch.float32


def test_equality():
    a = torch.tensor([1.0, float("nan"), 0.0])
    assert same_tensor(a, a.clone())
    assert same_tensor(a.double(), a)
    assert same_tensor(a, a + 1e-6)
    assert not same_tensor(a, a + 1e-2)
    assert not same_tensor(a, None)
    assert not same_tensor(a, a[:2])
    assert not same_tensor(torch.tensor(1), torch.tensor(2))
