"""Models that change while they train, and models that are saved, copied or found by the way."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.watch import Watch
from tests.helpers.watched_runs import arrived, batches, names, net, net_and_sgd


def step_on(model, optimizer, x, y):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("declared", [True, False])
def test_a_head_swapped_midway_is_entered_beside_the_old_one(declared):
    model, optimizer = net_and_sgd()
    with Watch({"": model} if declared else {}, [optimizer] if declared else []) as watch:
        for n, (x, y) in enumerate(batches(3)):
            if n == 1:
                model[2] = nn.Linear(4, 2)
            step_on(model, optimizer, x, y)
    assert names(watch.record) == ["0.weight", "0.bias", "2.weight", "2.bias", "2.weight (2)", "2.bias (2)"]
    assert [arrived(watch.record, b) for b in watch.record.of(Backward)] == [
        {"0.weight", "0.bias", "2.weight", "2.bias"},
        *[{"0.weight", "0.bias", "2.weight (2)", "2.bias (2)"}] * 2,
    ]
    assert watch.record.optimizers[0].parameters == (0, 1, 2, 3)
    assert 4 not in watch.record.held


def test_parameters_unfrozen_midway_are_seen_from_then_on():
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch({"": model}, [optimizer]) as watch:
        for n, (x, y) in enumerate(batches(4)):
            model[0].requires_grad_(n in (1, 3))
            step_on(model, optimizer, x, y)
    assert [len(b.arrivals) for b in watch.record.of(Backward)] == [2, 4, 2, 4]
    assert [p.requires_grad for p in watch.record.parameters] == [False, False, True, True]  # as they were at first


def test_a_parameter_made_in_the_first_forward():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 2)

        def forward(self, x):
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.ones(2))
            return self.body(x) * self.scale

    model = Grows()
    with Watch({"": model}) as watch:
        for x, y in batches(3):
            F.mse_loss(model(x), y).backward()
    assert names(watch.record) == ["body.weight", "body.bias", "scale"]
    assert ["scale" in arrived(watch.record, b) for b in watch.record.of(Backward)] == [False, True, True]


def test_what_a_model_never_registered_is_found_in_its_lists():
    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = [nn.Linear(3, 3), nn.Linear(3, 3)]
            self.heads = {"a": nn.Linear(3, 2)}
            self.gains = (nn.Parameter(torch.ones(2)),)
            self.head = self.blocks[0]

        def forward(self, x):
            return self.heads["a"](self.blocks[1](self.blocks[0](x))) * self.gains[0]

    model = Hides()
    with Watch({"": model}) as watch:
        model(torch.ones(1, 3)).sum().backward()
    roles = {p.name: p.role for p in watch.record.parameters}
    assert roles == {
        **{"head.weight": "model", "head.bias": "model"},
        **{"blocks[1].weight": "unregistered", "blocks[1].bias": "unregistered"},
        **{"heads['a'].weight": "unregistered", "heads['a'].bias": "unregistered", "gains[0]": "unregistered"},
    }
    assert arrived(watch.record, watch.record.of(Backward)[0]) == set(roles)


def test_names_do_not_clash_where_several_undeclared_models_run():
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    with Watch() as watch:
        (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum().backward()
    assert names(watch.record) == ["first.weight", "first.bias", "second.weight", "second.bias"]


def test_integer_and_quantised_weights_stand_in_the_record():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.packed = nn.Parameter(torch.arange(-4, 4, dtype=torch.int8), requires_grad=False)
            self.scales = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
            self.adapter = nn.Linear(8, 1)

        def forward(self, x):
            return self.adapter(x * self.packed * self.scales.float())

    model = Quantised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch({"": model}, [optimizer]) as watch:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert [(p.dtype, p.start.peak) for p in watch.record.parameters[:2]] == [("int8", 4.0), ("float8_e4m3fn", 1.0)]
    assert watch.record.changed() == {2, 3}


def test_a_model_on_the_meta_device_is_named_and_nothing_more():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    with Watch({"": model}) as watch:
        pass
    assert [(p.name, p.device, p.start.finite) for p in watch.record.parameters] == [
        *(("weight", "meta", False), ("bias", "meta", False)),
    ]
    assert watch.record.changed() == set()


def test_saving_and_copying_a_watched_model_warns_of_nothing_and_copies_no_hook():
    model, leaf = net(), torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [leaf]}], lr=0.1)
    saved = io.BytesIO()
    with Watch({"": model}, [optimizer]) as watch, warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in batches(2):
            (F.mse_loss(model(x), y) + leaf.sum()).backward()
            optimizer.step()
        torch.save(model, saved)
        torch.save([leaf, optimizer], io.BytesIO())
        copies = [copy.deepcopy(model), copy.deepcopy([leaf, optimizer])]
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
    assert watch.record.steps == 2
    for p in (*loaded.parameters(), *copies[0].parameters(), copies[1][0]):
        assert not p._backward_hooks
    assert torch.equal(loaded[0].weight, model[0].weight)


def test_a_copy_trained_beside_the_original_is_a_model_of_its_own():
    model = net()
    teacher = copy.deepcopy(model)
    with Watch({"": model}) as watch:
        ((x, y),) = batches(1)
        F.mse_loss(model(x), teacher(x).detach() + y).backward()
    assert len(names(watch.record)) == 8
    assert [p.declared for p in watch.record.parameters] == [True] * 4 + [False] * 4
    assert sorted(watch.record.of(Backward)[0].arrivals) == [0, 1, 2, 3]


def test_moving_average_weights_move_by_other_hands():
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch({"model": model, "average": average}, [optimizer]) as watch:
        for x, y in batches(2):
            step_on(model, optimizer, x, y)
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.1)
    moved = set(watch.record.names(watch.record.moved_outside_steps()))
    assert moved == {f"average.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
