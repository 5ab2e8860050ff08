"""The gradient that two runs are compared by."""

import math

import pytest
import torch

from pytest_trainloop.checks.numerics.precision_parity.first_gradient import distance, first_gradient, first_item
from pytest_trainloop.recording.watch import Watch


def watched(run, model, optimizer=None):
    with Watch({"": model}, [] if optimizer is None else [optimizer]) as watch:
        run()
    return watch.record


def test_large_tensors_count_for_all_their_entries():
    model = torch.nn.Linear(100, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []

    def run():
        model(torch.ones(3, 100)).sum().backward()
        kept.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
        optimizer.step()

    found = first_gradient(watched(run, model, optimizer))
    assert math.isclose(math.sqrt(sum(float(g.square().sum()) for g in found.values())), kept[0], rel_tol=1e-6)


def test_what_is_wiped_before_the_first_step_does_not_count():
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        for scale in (5.0, 1.0):
            optimizer.zero_grad()
            (scale * model(torch.ones(1, 2)).sum()).backward()
        optimizer.step()

    assert first_gradient(watched(run, model, optimizer))["weight"].tolist() == [1.0, 1.0]


def test_a_scale_is_taken_out():
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def run():
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    assert first_gradient(watched(run, model, optimizer))["weight"].tolist() == [1.0, 1.0]


def test_weights_moved_by_hand_end_the_window():
    model = torch.nn.Linear(2, 1, bias=False)

    def run():
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            with torch.no_grad():
                model.weight -= model.weight.grad

    start = model.weight.detach().clone().double()
    found = first_gradient(watched(run, model))["weight"]
    assert torch.allclose(found, (2 * start.sum()).expand(2), rtol=1e-5)


def test_items_are_those_of_the_last_gradient_before_the_step():
    assert first_item(watched(lambda: None, torch.nn.Linear(1, 1))) == 0


def test_distances():
    a = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    assert distance(a, {"w": torch.tensor([3.0, 4.5], dtype=torch.float64)}) == pytest.approx(0.1)
    assert distance(a, {"w": torch.tensor([3.0, math.inf], dtype=torch.float64)}) == math.inf
    assert math.isnan(distance({"w": torch.tensor([math.nan, 1.0], dtype=torch.float64)}, a))


def test_a_loss_that_goes_past_the_scaler_is_not_unscaled():
    def run_with(scaler):
        first, second = (torch.nn.Linear(2, 1, bias=False) for _ in range(2))
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

        def run():
            scaler.scale(first(torch.ones(1, 2)).sum()).backward()
            second(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        torch.manual_seed(0)
        for p in (*first.parameters(), *second.parameters()):
            torch.nn.init.constant_(p, 0.5)
        return watched(run, torch.nn.ModuleList([first, second]), optimizer)

    scaled = run_with(torch.amp.GradScaler("cpu", init_scale=4096.0))
    plain = run_with(torch.amp.GradScaler("cpu", enabled=False))
    assert {n: g.tolist() for n, g in first_gradient(scaled, plain).items()} == {
        "0.weight": [1.0, 1.0],
        "1.weight": [1.0, 1.0],
    }
