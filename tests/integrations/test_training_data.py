"""The data that a trainer would train on, judged by ``data_order``."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer
from tests.integrations.one_a_library import one_a_library

loops = pytest.importorskip("tests.integrations.resuming_loops")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
L = pytest.importorskip("lightning")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("a_process_without_accelerators")]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class ByEpoch(Sampler):
    """Draws the order by the epoch that was set, as DistributedSampler does."""

    def __init__(self, data):
        self.data, self.epoch = data, 0

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return iter(torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def set_epoch(self, epoch):
        self.epoch = epoch


class Reseeded(ByEpoch):
    def set_epoch(self, epoch):
        pass


class OneGenerator(RandomSampler):
    def __init__(self, data):
        super().__init__(data, generator=torch.Generator().manual_seed(0))


class InPlace(Dataset):
    """Faulty: shifts what it stores."""

    def __init__(self, rows=32):
        self.x, self.y = loops.labelled(rows)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        x += 0.5
        return x, self.y[index]


class AsDicts(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return {"x": x, "labels": y}


class Stream(IterableDataset):
    """As ``datasets`` streams: shuffled by the epoch that was set."""

    def __init__(self, rows=32):
        self.data, self.epoch = [{"x": x, "labels": y} for x, y in zip(*loops.labelled(rows), strict=True)], 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch))
        return (self.data[i] for i in order.tolist())


def stored(rows=32):
    return TensorDataset(*loops.labelled(rows))


class WithSampler(transformers.Trainer):
    sampler = OneGenerator

    def _get_train_sampler(self, train_dataset=None):
        return self.sampler(self.train_dataset)


class WithEpochSampler(WithSampler):
    sampler = ByEpoch


class WithReseededSampler(WithSampler):
    sampler = Reseeded


class WithLoader(transformers.Trainer):
    """Its own loader, as many projects write it; not shuffled, as the rows are texts in their order."""

    def get_train_dataloader(self):
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=4))


def hf(data, kind=transformers.Trainer, **settings):
    args = transformers.TrainingArguments("out", use_cpu=True, per_device_train_batch_size=4, **settings)
    return from_trainer(kind(model=loops.Rows(), args=args, train_dataset=data()))


class Loaded(loops.Module):
    """Gives its own loader, of what a subclass says."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def train_dataloader(self):
        return self.make()


class Two(Loaded):
    def training_step(self, batch, batch_idx):
        return sum(super(Two, self).training_step(part, batch_idx) for part in batch.values())


class Data(L.LightningDataModule):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def train_dataloader(self):
        return self.make()


def module(make, kind=Loaded):
    return from_lightning(kind(make))


def datamodule(make):
    return from_lightning(loops.Module(), datamodule=Data(make))


def batch_sampled():
    data = stored()
    return DataLoader(data, batch_sampler=BatchSampler(ByEpoch(data), 8, drop_last=False))


def with_sampler(kind):
    def make():
        data = stored()
        return DataLoader(data, batch_size=8, sampler=kind(data))

    return make


def shuffled():
    return DataLoader(stored(), batch_size=8, shuffle=True)


def with_accelerate(make):
    accelerator = fresh_accelerator(cpu=True)
    model = loops.net()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), make())

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


def dicts():
    return AsDicts(stored())


RIGHT = {
    "hf": partial(hf, dicts),
    "hf-one-generator": partial(hf, dicts, WithSampler),
    "hf-sampler-by-epoch": partial(hf, dicts, WithEpochSampler),
    "hf-own-loader": partial(hf, dicts, WithLoader),
    "hf-by-length": partial(hf, dicts, train_sampling_strategy="sequential"),
    "hf-stream": partial(hf, Stream, max_steps=8),
    "hf-workers": partial(hf, dicts, dataloader_num_workers=2),
    "lightning": partial(module, shuffled),
    "lightning-sampler-by-epoch": partial(module, with_sampler(ByEpoch)),
    "lightning-batch-sampler": partial(datamodule, batch_sampled),
    "lightning-datamodule": partial(datamodule, shuffled),
    "lightning-two-loaders": partial(module, lambda: {"labelled": shuffled(), "other": shuffled()}, Two),
    "accelerate": partial(with_accelerate, shuffled),
    "accelerate-sampler-by-epoch": partial(with_accelerate, with_sampler(ByEpoch)),
}

FAULTY = {
    "hf-reseeded": (partial(hf, dicts, WithReseededSampler), "shuffled_alike"),
    "hf-in-place": (partial(hf, lambda: AsDicts(InPlace())), "changed_in_place"),
    "lightning-reseeded": (partial(module, with_sampler(Reseeded)), "shuffled_alike"),
    "lightning-in-place": (partial(datamodule, lambda: DataLoader(InPlace(), batch_size=8)), "changed_in_place"),
    "accelerate-reseeded": (partial(with_accelerate, with_sampler(Reseeded)), "shuffled_alike"),
}


def judged(make):
    (result,) = check_loop(make, only=["data_order"], raises=False).results
    assert result.outcome in ("passed", "failed"), (result.outcome, result.reason, result.error)
    return result


@one_a_library(RIGHT)
def test_right_data_are_silent(name):
    result = judged(RIGHT[name])
    assert result.outcome == "passed", [f.summary for f in result.faults]
    assert [f.summary for f in result.findings] == []


@one_a_library(FAULTY)
def test_faulty_data_are_named(name):
    make, cause = FAULTY[name]
    (fault,) = judged(make).faults
    assert fault.cause == cause
