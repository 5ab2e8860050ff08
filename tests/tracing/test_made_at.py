"""The line on which each part of a loop was made."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.recording.record import Record
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.single_run import SingleRun
from tests.loops import plain


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad.sign()


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = [nn.Linear(4, 4) for _ in range(2)]
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def freeze(module):
    for p in module.parameters():
        p.requires_grad = False


def loop(model, optimizer, batches=None):
    data = (torch.randn(8, 4), torch.randint(0, 2, (8,)))
    return plain.loop(model, data, plain.cross_entropy, optimizer, batches=batches)


def made_at(make):
    return MadeAt.of(Evidence(make))


def test_optimizers_groups_and_steps_of_the_projects_own():
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = Lion(model[0].parameters(), lr=1e-3)
        optimizer.add_param_group({"params": list(model[1].parameters())})
        return loop(model, optimizer)

    made = made_at(make)
    assert made.optimizer().endswith("optimizer = Lion(model[0].parameters(), lr=1e-3)")
    assert made.group().endswith('optimizer.add_param_group({"params": list(model[1].parameters())})')
    assert made.method_of(0).endswith("def step(self, closure=None):")
    assert made.optimizer(3) == made.method_of(3) == ""


def test_modules_and_the_lists_that_hide_them():
    def make():
        model = Blocks()
        return loop(model, torch.optim.SGD(model.head.parameters(), lr=0.1))

    made = made_at(make)
    assert made.module("head").endswith("self.head = nn.Linear(4, 2)")
    assert made.module("head.unknown") == made.module("head")
    assert made.module("").endswith("model = Blocks()")
    assert made.attribute("blocks[0].weight").endswith("self.blocks = [nn.Linear(4, 4) for _ in range(2)]")


def test_freezing_by_the_attribute_and_by_the_method_and_thawing():
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        freeze(model[0])
        model[1].requires_grad_(False)
        model[2].requires_grad_(False)
        model[2].requires_grad_(True)
        return loop(model, torch.optim.SGD(model.parameters(), lr=0.1))

    made = made_at(make)
    assert made.froze(["0.weight"]).endswith("p.requires_grad = False")
    assert made.froze(["1.weight"]).endswith("model[1].requires_grad_(False)")
    assert made.froze(["2.weight", "3.weight"]) == ""
    assert made.thawed(["0.weight", "2.weight"]).endswith("model[2].requires_grad_(True)")


def test_schedulers_scalers_loaders_and_casts():
    def make():
        model = nn.Linear(4, 2).to(torch.float64).to(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = loop(model, optimizer)
        made.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        made.scaler = torch.amp.GradScaler("cpu", enabled=False)
        made.batches = DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8).long()), batch_size=4)
        return made

    made = made_at(make)
    assert made.scheduler().endswith("StepLR(optimizer, 3)")
    assert made.scaler().endswith('GradScaler("cpu", enabled=False)')
    assert "DataLoader(TensorDataset(" in made.loader()
    assert made.cast(["weight"]).endswith("model = nn.Linear(4, 2).to(torch.float64).to(torch.float32)")


def test_what_fit_makes_and_what_it_raises():
    def make():
        model = nn.Linear(4, 2)

        def fit(batches):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in batches:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            raise ValueError("after training")

        return TrainLoop(model=model, batch=(torch.randn(8, 4), torch.randint(0, 2, (8,))), fit=fit)

    assert made_at(make).optimizer().endswith("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)")


def test_everything_is_put_back():
    def patched():
        optimizer = torch.optim.Optimizer
        classes = (nn.Module, optimizer, torch.amp.GradScaler, DataLoader)
        return [cls.__init__ for cls in classes] + [nn.Module.to, optimizer.add_param_group]

    before = patched()

    def make():
        model = nn.Linear(4, 2)
        return loop(model, torch.optim.SGD(model.parameters(), lr=0.1))

    made_at(make)
    assert before == patched()


def test_a_run_that_was_only_observed_knows_nothing_without_its_instrument():
    assert MadeAt.of(SingleRun(Record())).optimizer() == ""


def test_a_script_that_is_observed_has_its_lines_too():
    from pytest_trainloop import observe

    with observe() as record:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 2, (8,))).backward()
            optimizer.step()
    (result,) = record.check("optimizer_holds_every_param", raises=False).results
    assert result.faults[0].change.endswith("optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)")
