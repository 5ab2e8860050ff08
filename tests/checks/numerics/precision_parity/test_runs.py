"""The gradient that two runs are compared by."""

import math

import pytest
import torch

from pytest_trainloop.checks.numerics.precision_parity.runs import distance, first_gradient, first_item
from pytest_trainloop.recording.watch import Watch


def watched(run, model, optimizer=None):
    with Watch({"": model}, [] if optimizer is None else [optimizer]) as watch:
        run()
    return watch.record


def linear(*shape):
    model = torch.nn.Linear(*shape, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_large_tensors_count_for_all_their_entries():
    model, optimizer = linear(100, 50)

    def run():
        model(torch.ones(3, 100)).sum().backward()
        optimizer.step()

    (found,) = first_gradient(watched(run, model, optimizer)).values()
    assert math.isclose(float(found.norm()), float(model.weight.grad.norm()), rel_tol=1e-6)


def test_what_is_wiped_before_the_first_step_does_not_count():
    model, optimizer = linear(2, 1)

    def run():
        for scale in (5.0, 1.0):
            optimizer.zero_grad()
            (scale * model(torch.ones(1, 2)).sum()).backward()
        optimizer.step()

    assert first_gradient(watched(run, model, optimizer))["weight"].tolist() == [1.0, 1.0]


def test_weights_moved_by_hand_end_the_window():
    model, _ = linear(2, 1)

    def run():
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            with torch.no_grad():
                model.weight -= model.weight.grad

    assert first_gradient(watched(run, model))["weight"].tolist() == [2.0, 2.0]


def test_the_scale_is_taken_out_of_the_losses_that_were_scaled():
    def run_with(scaler):
        (first, optimizer), (second, _) = linear(2, 1), linear(2, 1)
        optimizer.add_param_group({"params": second.parameters()})

        def run():
            scaler.scale(first(torch.ones(1, 2)).sum()).backward()
            second(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        return watched(run, torch.nn.ModuleList([first, second]), optimizer)

    scaled = run_with(torch.amp.GradScaler("cpu", init_scale=4096.0))
    plain = run_with(torch.amp.GradScaler("cpu", enabled=False))
    assert [g.tolist() for g in first_gradient(scaled, plain).values()] == [[1.0, 1.0], [1.0, 1.0]]
    assert first_gradient(scaled)["0.weight"].tolist() == [1.0, 1.0]


def test_items_are_those_of_the_last_gradient_before_the_step():
    assert first_item(watched(lambda: None, torch.nn.Linear(1, 1))) == 0


def test_distances():
    a = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    assert distance(a, {"w": torch.tensor([3.0, 4.5], dtype=torch.float64)}) == pytest.approx(0.1)
    assert distance(a, {"w": torch.tensor([3.0, math.inf], dtype=torch.float64)}) == math.inf
    assert math.isnan(distance({"w": torch.tensor([math.nan, 1.0], dtype=torch.float64)}, a))
