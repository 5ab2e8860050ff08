"""Values carried from one loop into another that the same function built."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pytest_trainloop import TrainLoop
from pytest_trainloop.runs.reachable_state.copies import same_bits
from pytest_trainloop.runs.reachable_state.snapshot import Reach, differences
from tests.reachable_state.reached import changes, function_with, loop_with, snapshot_of


@dataclass
class Progress:
    step: int = 0
    best: dict = field(default_factory=dict)


class Trainer:
    def __init__(self, scaler=False):
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.averaged = AveragedModel(self.model)
        self.queue = deque(maxlen=3)
        self.progress = Progress()
        self.noise = np.random.default_rng(0)
        self.python = random.Random(0)
        self.hidden = None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=True)

    def fit(self, batches):
        for x in batches:
            x = x + float(self.noise.normal()) + self.python.random()
            self.optimizer.zero_grad()
            out = self.model(x)
            if self.hidden is not None:
                out = out + self.hidden[0].mean() + torch.stack(list(self.queue)).mean()
            self.scaler.scale(out.pow(2).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            self.averaged.update_parameters(self.model)
            self.hidden = (out.detach(), out.detach().mean())
            self.queue.append(out.detach().mean())
            self.progress.step += 1
            self.progress.best = {"weights": [p.detach().clone() for p in self.model.parameters()]}


def make():
    trainer = Trainer()
    return TrainLoop(
        model=trainer.model,
        optimizer=trainer.optimizer,
        scheduler=trainer.schedule,
        scaler=trainer.scaler,
        batch=torch.ones(4, 3),
        fit=trainer.fit,
    )


def batches():
    torch.manual_seed(0)
    return [torch.randn(4, 3) for _ in range(3)]


def test_a_fresh_loop_goes_on_as_the_other_one_would():
    first, second = make(), make()
    first.fit(batches())
    snapshot = snapshot_of(first)
    assert snapshot.carry_over(Reach.of(second)) == []
    assert not differences(snapshot, snapshot_of(second))
    ends = []
    for loop in (first, second):
        torch.manual_seed(3)
        loop.fit(batches())
        ends.append({name: t.clone() for name, t in loop.model.state_dict().items()})
    assert all(same_bits(ends[0][name], ends[1][name]) for name in ends[0])


def test_moments_are_matched_by_parameter_not_by_order():
    def build(reverse):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        parameters = list(model.parameters())
        optimizer = torch.optim.Adam(parameters[::-1] if reverse else parameters)
        return loop_with(model, optimizer)

    first, second = build(reverse=False), build(reverse=True)
    first.fit([torch.randn(4, 3)])
    snapshot = snapshot_of(first)
    paths = [path for path, leaf in snapshot.leaves.items() if leaf.component == "optimizer.state"]
    assert snapshot.carry_over(Reach.of(second), paths) == []
    carried = second.optimizer.state[second.model[1].bias]["exp_avg"]
    assert same_bits(carried, snapshot.value("optimizer.state[1.bias]['exp_avg']"))


def test_what_is_lost_by_the_other_loop_is_made_again():
    def holder(**given):
        class Holder:
            pass

        made = Holder()
        vars(made).update(given)
        return made

    full = holder(bank={"a": [torch.ones(2)]}, mean=torch.ones(1), at=3, progress=Progress(4), gone=None)
    empty = holder(bank={}, mean=None, gone=torch.ones(1))
    first, second = loop_with(fit=function_with(h=full)), loop_with(fit=function_with(h=empty))
    snapshot = snapshot_of(first)
    assert snapshot.carry_over(Reach.of(second)) == []
    assert torch.equal(empty.bank["a"][0], torch.ones(2))
    assert empty.bank["a"][0] is not full.bank["a"][0]
    assert (empty.at, empty.progress, empty.gone) == (3, Progress(4), None)
    assert empty.progress is not full.progress


def test_what_cannot_be_made_is_returned():
    first = loop_with(fit=function_with(h={"layer": nn.Linear(1, 1), "at": 1}))
    second = loop_with(fit=function_with(h={"layer": None, "at": 0}))
    left = snapshot_of(first).carry_over(Reach.of(second))
    assert {"h['layer'].weight", "h['layer'].bias"} <= set(left)
    assert Reach.of(second).value("h['at']") == 1


def test_a_weight_whose_memory_another_tensor_shares_in_one_loop_only():
    def build():
        model = nn.Linear(3, 2)
        model.cached = model.weight.data
        return loop_with(model)

    first, second = build(), build()
    first.model.cached = torch.full((2, 3), 9.0)
    snapshot = snapshot_of(first)
    assert snapshot.carry_over(Reach.of(second)) == []
    assert not differences(snapshot, snapshot_of(second))


@pytest.mark.parametrize(
    "component",
    ["weights of model", "optimizer.state", "optimizer.param_groups", "scheduler", "scaler", "Trainer.queue"],
)
def test_one_component_alone(component):
    first, second = make(), make()
    first.fit(batches())
    snapshot, before = snapshot_of(first), snapshot_of(second)
    found = differences(before, snapshot)
    inside = {d.leaf.path for d in found if d.leaf.component == component}
    assert inside
    assert snapshot.carry_over(Reach.of(second), inside) == []
    assert set(changes(before, second)) == inside
