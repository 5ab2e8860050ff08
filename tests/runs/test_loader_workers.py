"""The worker processes of a DataLoader end with the run that started them, whatever still knows its iterator."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import dataloader as of_torch

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.core.errors import UserCodeError
from pytest_trainloop.runs.kept_batches import LoaderBatches
from pytest_trainloop.runs.run import RunPlan, run


class Numbers(IterableDataset):
    def __iter__(self):
        for _ in range(40):
            yield torch.randn(3), torch.randn(1)


def rows(count=64):
    return TensorDataset(torch.randn(count, 3), torch.randn(count, 1))


def step(model, optimizer, batch):
    x, y = batch
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(model, optimizer, batches, loader):
    for batch in batches:
        step(model, optimizer, batch)


def inside(model, optimizer, batches, loader):
    for _, batch in zip(batches, loader, strict=False):
        step(model, optimizer, batch)


def break_early(model, optimizer, batches, loader):
    for batch in loader:
        step(model, optimizer, batch)
        if next(iter(batches), None) is None:
            break


def half_a_generator(model, optimizer, batches, loader):
    stream = (batch for batch in loader)
    for _ in batches:
        step(model, optimizer, next(stream))


def two_iterators(model, optimizer, batches, loader):
    one, other = iter(loader), iter(loader)
    for _ in zip(batches, one, other, strict=False):
        step(model, optimizer, next(one))


def for_ever(model, optimizer, batches, loader):
    """Stopped in the optimizer's step, with the loader's iterator in the frames that the stop passes through."""
    batch = batches[0]
    for _ in itertools.cycle(loader):
        step(model, optimizer, batch)


def kept_with_its_exception(model, optimizer, batches, loader):
    for number, batch in enumerate(loader):
        step(model, optimizer, batch)
        if number == 5:
            model.last_error = KeyError("no row")
            raise model.last_error


def in_a_cycle(model, optimizer, batches, loader):
    """As a trainer that its model knows."""
    stream = iter(loader)
    for _ in batches:
        step(model, optimizer, next(stream))
    object.__setattr__(model, "trainer", {"model": model, "stream": stream})


def swallowing(model, optimizer, batches, loader):
    errors = []
    stream = iter(loader)
    for _ in batches:
        try:
            step(model, optimizer, next(stream))
            raise OSError("no log")
        except OSError as error:
            errors.append((error, sys.exc_info()))


FITS = [
    *(train, inside, break_early, half_a_generator, two_iterators, for_ever),
    *(kept_with_its_exception, in_a_cycle, swallowing),
]
LOADERS = {
    "plain": lambda: DataLoader(rows(), 8, num_workers=2),
    "shuffled": lambda: DataLoader(rows(), 8, num_workers=2, shuffle=True),
    "persistent": lambda: DataLoader(rows(), 8, num_workers=1, persistent_workers=True),
    "pinned": lambda: DataLoader(rows(), 8, num_workers=1, pin_memory=True),
    "endless": lambda: DataLoader(Numbers(), 4, num_workers=1),
}


def loop_with(fit=train, loader=LOADERS["plain"], *, given=lambda loader: loader):
    def make():
        model, batches = nn.Linear(3, 1), loader()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batches=given(batches),
            fit=lambda given: fit(model, optimizer, given, batches),
        )

    return make


@pytest.fixture(autouse=True)
def closed_queues(monkeypatch):
    """No queue is closed when the workers behind it are told to end: else each is waited for 5 s."""
    closed = []
    iterator = of_torch._MultiProcessingDataLoaderIter
    end = iterator._shutdown_workers

    def looked_at(self):
        closed.extend(q for q in self._index_queues if q._close is not None and not q._close.still_active())
        end(self)

    monkeypatch.setattr(iterator, "_shutdown_workers", looked_at)
    gc.disable()  # nothing shall be left to chance
    yield
    gc.enable()
    assert multiprocessing.active_children() == []
    assert closed == []


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.__name__)
def test_after_any_fit_no_worker_is_left(fit):
    run(loop_with(fit), RunPlan(count=4, enough=lambda record: record.rounds >= 3))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("fit", [train, inside], ids=["given", "inside"])
@pytest.mark.parametrize("loader", LOADERS.values(), ids=list(LOADERS))
def test_after_any_loader_no_worker_is_left(fit, loader):
    run(loop_with(fit, loader), RunPlan(count=4, enough=lambda record: record.rounds >= 3))
    assert multiprocessing.active_children() == []


GIVEN = {
    "function": lambda loader: lambda n: loader,
    "generator": lambda loader: (batch for batch in loader),
    "cut": lambda loader: itertools.islice(loader, 7),
    "mapped": lambda loader: map(tuple, loader),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=list(GIVEN))
def test_a_loader_behind_something_else(given):
    assert run(loop_with(given=given), RunPlan()).steps > 2
    assert multiprocessing.active_children() == []


def test_a_run_that_raises():
    def broken(model, optimizer, batches, loader):
        for batch in batches:
            step(model, optimizer, batch)
            F.mse_loss(model(batch[0]), batch[1], reduction="none").backward()

    with pytest.raises(UserCodeError):
        run(loop_with(broken), RunPlan())
    assert multiprocessing.active_children() == []


def test_an_iterator_of_the_users_own_that_outlives_runs_goes_on():
    kept = []

    def lazily(model, optimizer, batches, loader):
        if not kept:
            kept.append(iter(loader))
        for _ in batches:
            step(model, optimizer, next(kept[0]))

    for _ in range(2):
        record = run(loop_with(lazily, lambda: DataLoader(rows(), 2, num_workers=1)), RunPlan(count=4))
        assert record.steps == 4
        assert record.raised is None
    kept.clear()


def test_no_frame_that_a_stop_passed_through_is_kept():
    class Held:
        pass

    def fit(model, optimizer, batches, loader):
        _held = Held()
        for_ever(model, optimizer, batches, loader)

    run(loop_with(fit), RunPlan())
    assert not [o for o in gc.get_objects() if type(o) is Held]


@pytest.mark.parametrize(("fit", "most"), [(train, 8), (inside, 60)], ids=["given", "inside"])
def test_how_often_a_battery_starts_workers(monkeypatch, fit, most):
    """A loader that is given is read once for each way to build it, and again for determinism; one that fit iterates
    over in each run."""
    starts = []
    iterator = of_torch._MultiProcessingDataLoaderIter
    start = iterator.__init__

    def counted(self, *args):
        starts.append(1)
        start(self, *args)

    monkeypatch.setattr(iterator, "__init__", counted)
    report = check_loop(loop_with(fit, LOADERS["shuffled"]), raises=False)
    assert not [r for r in report.results if r.outcome in ("failed", "error")]
    assert 0 < len(starts) <= most
    assert multiprocessing.active_children() == []


def test_what_a_check_is_skipped_for_keeps_no_loader():
    """A verdict is kept, and must not keep the frames of what raised it."""
    from pytest_trainloop.judging.battery import Settings, Subject

    subject = Subject("it", loop_with(loader=LOADERS["persistent"]), settings=Settings())
    assert subject.run_check("padding_invariance").outcome == "skipped"
    assert multiprocessing.active_children() == []


class Seen(list):
    """What a loop was given, in each run."""

    def loop(self, loader):
        def fit(model, optimizer, batches, own):
            self.append([batch[0].clone() for batch in batches])

        return loop_with(fit, loader)

    @property
    def same(self):
        return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in itertools.pairwise(self))


@pytest.mark.parametrize("name", ["shuffled", "persistent", "endless"])
@pytest.mark.parametrize("counts", [(5, 5), (3, 12), (20, 11)], ids=str)
def test_kept_batches_are_those_that_the_loader_gives(name, counts):
    """Also where the second run goes on behind what the first one read, and where the loader begins again."""
    for count in counts:
        fresh, seen, kept = Seen(), Seen(), LoaderBatches()
        run(fresh.loop(LOADERS[name]), RunPlan(count=count))
        for other in (*counts, count):
            seen.clear()
            run(seen.loop(LOADERS[name]), RunPlan(count=other, kept=kept))
        assert Seen([*fresh, *seen]).same


def test_under_another_seed_knob_or_precision_other_batches_are_read():
    kept = LoaderBatches()
    ways = [(0, {}, False), (1, {}, False), (0, {"accumulate": 2}, False), (0, {}, True)]
    assert len({id(kept.of(seed, knobs, double=double)) for seed, knobs, double in ways}) == 4
    assert kept.of(0, {}) is kept.of(0, {})


def test_a_loader_of_another_class_is_read_each_time():
    """Accelerate's counts, while it is iterated over, where gradients are to be synchronized."""
    read = []

    class Counting(DataLoader):
        def __iter__(self):
            read.append(1)
            return super().__iter__()

    kept = LoaderBatches()
    for _ in range(2):
        run(loop_with(loader=lambda: Counting(rows(), 8, num_workers=1)), RunPlan(count=3, kept=kept))
    assert len(read) == 2


def test_data_that_differ_each_time_are_found_all_the_same():
    class FromTheSystem(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            noise = torch.frombuffer(bytearray(os.urandom(3)), dtype=torch.uint8) / 255
            return noise, torch.ones(1)

    loop = loop_with(loader=lambda: DataLoader(FromTheSystem(), 8, num_workers=1))
    (result,) = check_loop(loop, only=["determinism"], raises=False).results
    assert result.outcome == "failed"
