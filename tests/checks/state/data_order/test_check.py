"""What is skipped, what a project's exception becomes, and what a run that is only observed shows."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from pytest_trainloop import TrainLoop, observe
from pytest_trainloop.frontends.api import check_loop
from tests.loops.loaders import ROWS, stored, trains_on


def result_of(make):
    return check_loop(make, only=["data_order"], raises=False).results[0]


def test_one_example_batch_has_no_order():
    skipped = result_of(trains_on(None))
    assert skipped.outcome == "skipped"
    assert skipped.needs == "batches="


def test_data_made_on_the_fly_say_what_to_give():
    skipped = result_of(trains_on(lambda: lambda n: ((torch.randn(4, 6), torch.arange(4) % 3) for _ in range(n))))
    assert skipped.reason == (
        "no row comes twice in 48 batches of batches(n): they are made for each call, and have no order"
    )


def with_labels_of_others(items):
    x, y = zip(*items, strict=True)
    return torch.stack(x), torch.stack(y)[torch.randperm(len(y))]


def test_a_collate_function_of_two_loaders_is_told_once():
    def loader():
        return DataLoader(TensorDataset(*stored()), batch_size=8, shuffle=True, collate_fn=with_labels_of_others)

    def fit_of(model, optimizer, step):
        val_loader = loader()

        def fit(batches):
            for batch in batches:
                step(batch)
            return [F.cross_entropy(model(x), y).item() for x, y in val_loader]

        return fit

    found = result_of(trains_on(loader, fit_of))
    assert [fault.cause for fault in found.faults] == ["labels_apart"]
    assert "TrainLoop.batches" in found.faults[0].summary
    assert not found.advice


class Broken(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        if index == 150:
            raise OSError("truncated file 150.png")
        return stored(8)[0][0], 0


def test_an_exception_far_into_an_epoch_is_shown_with_its_traceback():
    broken = result_of(trains_on(lambda: DataLoader(Broken(), batch_size=8)))
    assert broken.outcome == "error"
    assert "truncated file 150.png" in broken.error.summary
    assert "in __getitem__" in broken.error.traceback
    assert "pytest_trainloop/" not in broken.error.traceback


def test_random_states_are_left_as_they_were():
    before = torch.get_rng_state(), random.getstate()
    result_of(trains_on(lambda: DataLoader(TensorDataset(*stored()), batch_size=8, shuffle=True)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


class ByEpoch(Sampler):
    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return ROWS

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def train(kind):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(*stored())
    by_epoch = DataLoader(dataset, batch_size=8, sampler=ByEpoch())
    loader = by_epoch if "epoch" in kind else DataLoader(dataset, batch_size=8, shuffle=True)
    endless = itertools.cycle(loader)
    for epoch in range(3):
        if kind == "seed":
            torch.manual_seed(0)
        if kind == "epoch set":
            loader.sampler.set_epoch(epoch)
        for x, y in itertools.islice(endless, 6) if kind == "cycle" else loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("plain", None),
        ("seed", "shuffled_alike"),
        ("cycle", "shuffled_alike"),
        ("epoch", "set_epoch_missing"),
        ("epoch set", None),
    ],
)
def test_training_that_is_only_observed(kind, cause):
    with observe() as record:
        train(kind)
    (result,) = record.check("data_order", raises=False).results
    assert [finding.cause for finding in result.findings] == ([] if cause is None else [cause])


def test_training_without_a_loader_is_skipped():
    with observe() as record:
        model = nn.Linear(6, 3)
        x, y = stored()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    (result,) = record.check("data_order", raises=False).results
    assert result.outcome == "skipped"
    assert "no DataLoader was iterated to its end" in result.reason


def test_a_data_set_of_the_file_keeps_its_data_and_its_cache():
    images, masks, cache = [torch.rand(1, 9, 9) for _ in range(8)], [torch.rand(1, 9, 9).round() for _ in range(8)], {}
    before = [image.clone() for image in (*images, *masks)]

    class Cached(Dataset):
        def __len__(self):
            return len(images)

        def __getitem__(self, index):
            return cache.setdefault(index, (images[index] * 2, masks[index]))

    def make():
        model = nn.Conv2d(1, 1, 3, padding=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for image, mask in batches:
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(model(image), mask).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(Cached(), batch_size=4), fit=fit)

    assert result_of(make).outcome == "passed"
    assert all(map(torch.equal, (*images, *masks), before))
    assert all(torch.equal(cache[index][0], images[index] * 2) for index in cache)
