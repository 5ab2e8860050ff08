"""What is ours, and that no check judges it wherever a project keeps it."""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import importlib
import inspect
import itertools
import pkgutil
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pytest_trainloop
from pytest_trainloop import Padding, TrainLoop, check_loop
from pytest_trainloop.core.ours import StandsIn, holds_alone, is_our_class, is_ours
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.record import Record
from pytest_trainloop.runs.batch_stream import Batches
from pytest_trainloop.runs.reachable_state.snapshot import Reach, differences
from pytest_trainloop.runs.reachable_state.value_kinds import sort_of_class
from tests.loops import data


def classes():
    """Every class that is defined in the package, also private ones, by name."""
    found = {}
    for module in pkgutil.walk_packages(pytest_trainloop.__path__, "pytest_trainloop."):
        if module.name.endswith("__main__"):
            continue
        with contextlib.suppress(ImportError):  # of a library that is not installed
            for name, value in vars(importlib.import_module(module.name)).items():
                if inspect.isclass(value) and value.__module__ == module.name:
                    found[f"{module.name}.{name}"] = value
    return found


CLASSES = classes()


def bare(kind):
    """An instance without attributes; None of a class that has none."""
    if issubclass(kind, enum.Enum):
        return next(iter(kind))
    for base in (object, dict, str, tuple, BaseException, threading.local):
        with contextlib.suppress(TypeError):
            return base.__new__(kind)
    return None


def instances():
    return {name: made for name, kind in CLASSES.items() if is_our_class(kind) and (made := bare(kind)) is not None}


def some_batches():
    loop = TrainLoop(model=nn.Linear(2, 1), batch=torch.ones(2, 2), fit=print)
    return Batches(loop, 3, spent=bool, stepped=bool, stop=bool, read_ahead=None)


class Keeper:
    """An object of a project."""

    def __init__(self, kept=None):
        self.kept = kept


def theirs():
    yield some_batches()


def test_every_class_of_the_package_is_ours():
    assert len(CLASSES) > 700
    assert [name for name, kind in CLASSES.items() if is_our_class(kind) == issubclass(kind, StandsIn)] == []
    assert {sort_of_class(kind) for kind in CLASSES.values() if is_our_class(kind)} == {"ours"}
    assert len(instances()) > 600
    assert [name for name, made in instances().items() if not is_ours(made)] == []


def test_what_stands_in_for_the_projects_own_is_no_more_than_that():
    standing = [kind for kind in CLASSES.values() if issubclass(kind, StandsIn) and kind is not StandsIn]
    assert {sort_of_class(kind) for kind in standing} == {"dict", "scalar"}


def test_code_of_ours_is_ours():
    batches = some_batches()
    hooked = torch.ones(1, requires_grad=True)
    found = [
        *(on_gradient, TrainLoop.__init__, batches.part, functools.partial(on_gradient, None), iter(batches)),
        *(pytest_trainloop, vars(pytest_trainloop), TrainLoop, threading.Thread(target=on_gradient)),
        *(enumerate(batches), zip([1], batches, strict=False), map(len, batches), itertools.islice(batches, 2)),
        *(itertools.chain([1], enumerate(batches)), on_gradient(hooked, print), batches.__len__),
    ]
    assert [one for one in found if not is_ours(one)] == []
    wrapped = functools.wraps(Keeper.__init__)(lambda *given: None)
    assert not is_ours(wrapped)


def test_what_holds_ours_is_the_projects():
    batches = some_batches()
    hooked = torch.ones(1, requires_grad=True)
    found = [
        *(theirs, theirs(), Keeper(batches), Keeper, [batches], (batches,), {"batches": batches}, torch, vars(torch)),
        *(functools.partial(print, batches), Keeper(batches).__init__, threading.Thread(target=theirs), None, 1, "one"),
        *(
            vars(sys.modules[__name__]),
            enumerate([batches]),
            zip([batches], strict=True),
            hooked.register_hook(theirs),
            iter([batches]),
            vars(batches),
        ),
    ]
    assert [one for one in found if is_ours(one)] == []


def test_what_only_we_hold():
    mine, both = torch.ones(1), torch.ones(1)
    batches, keeper = some_batches(), Keeper([both])
    batches.kept = {"mine": [mine], "both": (both,)}
    given = [mine, both, Keeper()]
    ignored = (id(given), id(globals()))
    del mine, both
    assert [holds_alone(given[number], ignored) for number in range(3)] == [True, False, False]
    assert keeper.kept


def loop_that_holds(*held):
    keeper, model = Keeper(), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        return keeper, model, optimizer, batches

    keeper.kept = dict(enumerate(held))
    return TrainLoop(model=model, optimizer=optimizer, batch=torch.ones(4, 3), fit=fit)


def test_a_walk_ends_at_what_is_ours():
    held = [*instances().values(), some_batches(), iter(some_batches()), enumerate(some_batches()), on_gradient]
    reach = Reach.of(loop_that_holds(*held))
    below = [path for path in reach.walked.places if path.startswith("keeper.kept[")]
    assert len(below) == len(held)
    assert {reach.walked.places[path].kind for path in below} == {None}


def test_what_we_gave_is_no_difference():
    loop = loop_that_holds(None, 1, [2.0])
    keeper = loop.fit.__closure__[0].cell_contents
    before = Reach.of(loop).snapshot()
    keeper.kept[0], keeper.kept[1], keeper.batches = some_batches(), iter(some_batches()), some_batches()
    keeper.kept[2][0] = 3.0
    found = differences(before, Reach.of(loop).snapshot())
    assert {d.leaf.path for d in found} == {"keeper.kept[2][0]"}
    before.put_back()
    assert keeper.kept == {0: None, 1: 1, 2: [2.0]}


class Nothing:
    """Keeps nothing."""

    def __call__(self, trainer, batches):
        return None


KEPT_BY_THE_MODULE = None


def as_attributes(trainer, batches):
    trainer.train_dataloader, trainer.iterator = batches, iter(batches)
    trainer.numbered, trainer.length = enumerate(batches), batches.__len__
    trainer.padding, trainer.record, trainer.other = Padding(pad_id=0), Record(), trainer.loop


def in_a_list(trainer, batches):
    trainer.history = [batches, iter(batches), Padding(pad_id=0), Record()] * 4
    trainer.by_name = {"batches": batches, "loop": trainer.loop}


def in_a_closure(trainer, batches):
    record = Record()
    trainer.callback = lambda: (batches, record)


def in_a_global(trainer, batches):
    global KEPT_BY_THE_MODULE
    KEPT_BY_THE_MODULE = [batches, trainer.loop]
    trainer.logger = read_the_global


def read_the_global():
    return KEPT_BY_THE_MODULE


def on_the_model(trainer, batches):
    trainer.model.trainer_batches, trainer.model.parts = batches, [batches, Record()]
    trainer.optimizer.batches = batches


def all_that_lives(trainer, batches):
    """Everything of ours that the heap holds while a loop runs: what watches, the guard, the record, the evidence."""
    found = [one for one in gc.get_objects() if is_our_class(type(one))]
    trainer.found, trainer.named = found, {type(one).__name__: one for one in found}


def an_instance_of_every_class(trainer, batches):
    trainer.found = list(instances().values())
    trainer.__dict__.update({f"kept_{number}": one for number, one in enumerate(trainer.found)})


WAYS = {f.__name__: f for f in (as_attributes, in_a_list, in_a_closure, in_a_global, on_the_model, all_that_lives)}
WAYS["an_instance_of_every_class"] = an_instance_of_every_class


class Trainer:
    """A trainer of a project that keeps what it is given."""

    def __init__(self, keep, accumulate):
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.0)
        self.keep, self.accumulate, self.seen, self.loop = keep, accumulate, 0, None

    def fit(self, batches):
        self.keep(self, batches)
        self.model.train()
        for number, (x, y) in enumerate(batches, start=1):
            (F.cross_entropy(self.model(x), y) / self.accumulate).backward()
            if number % self.accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.seen += 1

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        x, y = data.labelled(seed=3)
        loss = F.cross_entropy(self.model(x), y)
        self.model.train()
        return loss

    def save(self, folder):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "seen": self.seen}
        torch.save(state, folder / "last.pt")

    def load(self, folder):
        state = torch.load(folder / "last.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.seen = state["seen"]


def loop_of(keep):
    def make(accumulate=1):
        trainer = Trainer(keep, accumulate)
        loader = DataLoader(TensorDataset(*data.labelled(rows=64)), batch_size=16, shuffle=True)
        trainer.loop = TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batches=loader,
            batch=next(iter(loader)),
            fit=trainer.fit,
            evaluate=trainer.evaluate,
            save=trainer.save,
            load=trainer.load,
        )
        return trainer.loop

    return make


def verdicts(keep, only=None):
    report = check_loop(loop_of(keep), only=only, raises=False)
    return {r.check: (r.outcome, tuple((f.cause, f.summary) for f in r.findings)) for r in report.results}


@functools.cache
def verdicts_of_one_that_keeps_nothing():
    return verdicts(Nothing())


OBJECT_CHECKS = ("data_order", "evaluation_is_pure", "memory_growth", "resume_equivalence")
"""Checks that walk over objects."""


@pytest.mark.parametrize("way", ["as_attributes", "all_that_lives"])
def test_a_trainer_that_keeps_ours_is_judged_as_one_that_does_not(way):
    own = {c: v for c, v in verdicts_of_one_that_keeps_nothing().items() if c in OBJECT_CHECKS}
    assert verdicts(WAYS[way], only=OBJECT_CHECKS) == own


@pytest.mark.corpus
@pytest.mark.parametrize("way", WAYS)
def test_no_check_judges_what_is_ours(way):
    assert verdicts(WAYS[way]) == verdicts_of_one_that_keeps_nothing()
    assert not any(outcome == "failed" for outcome, _ in verdicts_of_one_that_keeps_nothing().values())
