"""Stop and go on with each library's own checkpoints: the resumed run is the uninterrupted one."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer
from pytest_trainloop.errors import UsageError
from tests.integrations.one_a_library import one_a_library

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
L = pytest.importorskip("lightning")
loops = pytest.importorskip("tests.integrations.resuming_loops")

pytestmark = pytest.mark.integration

DROPOUT = [0.0, 0.3]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture(autouse=True)
def a_process_without_accelerators():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def net(dropout=0.0):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))


def labelled(rows=8):
    x = torch.randn(rows, 4)
    return x, (x.sum(dim=1) > 0).long()


class Rows(nn.Module):
    """A classifier as the HF Trainer calls it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = net(dropout)

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(count=32):
    x, y = labelled(count)
    return [{"x": x[i], "labels": y[i]} for i in range(count)]


def hf(tmp_path, dropout=0.0, kind=transformers.Trainer, model=None, fields=None, optimizers=(None, None), **settings):
    settings = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, **settings}
    args = transformers.TrainingArguments(tmp_path / "project", use_cpu=True, **settings)
    model = Rows(dropout) if model is None else model
    trainer = kind(model=model, args=args, train_dataset=rows(), eval_dataset=rows(8), optimizers=optimizers)
    return from_trainer(trainer, **(fields or {}))


class Module(L.LightningModule):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = net(dropout)
        self.where = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.where.append((self.current_epoch, self.global_step))
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(L.LightningDataModule):
    def setup(self, stage):
        self.rows = torch.utils.data.TensorDataset(*labelled(24))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.rows, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.rows, batch_size=8)


def lightning(tmp_path, dropout=0.0, kind=Module, trainer=False, **settings):
    given = L.Trainer(accelerator="cpu", default_root_dir=tmp_path, **settings) if trainer or settings else None
    return from_lightning(kind(dropout), given, batch=labelled())


def with_accelerate(tmp_path, dropout=0.0, accumulate=1):
    accelerator = fresh_accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = net(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    def fit(batches):
        model.train()
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=schedule,
        batch=labelled(),
        fit=fit,
        save=accelerator.save_state,
        load=accelerator.load_state,
    )


LIBRARIES = [hf, lightning, with_accelerate]
MADE = [
    *(partial(make, dropout=p) for make in LIBRARIES for p in DROPOUT),
    partial(hf, dropout=0.3, gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=1),
    partial(hf, optim="adafactor"),
    partial(lightning, dropout=0.3, accumulate_grad_batches=2, gradient_clip_val=0.5),
    partial(lightning, max_epochs=7),
    partial(with_accelerate, accumulate=2),
]


def made_id(make):
    """The library and the settings; an address would be another one in each worker."""
    function = getattr(make, "func", make)
    return "-".join([function.__name__, *(f"{name}={value}" for name, value in getattr(make, "keywords", {}).items())])


def run_apart(make, folder, path):
    """The loop that ran through, and one that was resumed where the other was at half time."""
    torch.manual_seed(0)
    through = make()
    torch.manual_seed(7)
    halves = [[copy.deepcopy(through.batch) for _ in range(4)] for _ in range(2)]
    torch.manual_seed(0)
    through.fit(halves[0])
    through.save(path)
    torch.manual_seed(1)
    through.fit(halves[1])
    torch.manual_seed(0)
    resumed = make()
    resumed.load(path)
    torch.manual_seed(1)
    resumed.fit(halves[1])
    return through, resumed


@pytest.mark.parametrize("make", MADE, ids=made_id)
def test_resumed_by_the_librarys_own_functions(make, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    path = folder / "state.ckpt" if make.func is lightning else folder
    through, resumed = run_apart(partial(make, tmp_path), folder, path)
    ends = [loop.model.state_dict() for loop in (through, resumed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    moments = [first_moments(loop.model) for loop in (through, resumed)]
    assert moments == moments[::-1]
    if make.func is lightning:
        assert through.model.where[4:] == resumed.model.where
        assert resumed.model.where[0] == (1, 4 // make.keywords.get("accumulate_grad_batches", 1))


def first_moments(model):
    """How far the optimizer that Lightning configured has come."""
    trainer = getattr(model, "_trainer", None)
    return [float(state["step"]) for o in getattr(trainer, "optimizers", ()) for state in o.state.values()]


def test_a_checkpoint_goes_to_the_folder_that_is_given_and_nowhere_else(tmp_path, capfd):
    for make, name in ((hf, ""), (lightning, "state.ckpt")):
        folder = tmp_path / make.__name__
        folder.mkdir()
        loop = make(tmp_path)
        project = sorted(tmp_path.rglob("project/*"))
        capfd.readouterr()
        loop.fit([loop.batch] * 2)
        loop.save(folder / name)
        make(tmp_path).load(folder / name)
        assert list(folder.iterdir())
        assert sorted(tmp_path.rglob("project/*")) == project
        if make is hf:
            assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(
    ("make", "offered"),
    [
        (hf, True),
        (partial(hf, save_strategy="no"), False),
        (partial(hf, save_only_model=True), False),
        (lightning, True),
        (partial(lightning, trainer=True), True),
        (partial(lightning, enable_checkpointing=False), False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else made_id(value),
)
def test_save_and_load_are_offered_where_the_trainer_writes_checkpoints(make, offered, tmp_path):
    loop = make(tmp_path)
    assert (loop.save is not None, loop.load is not None) == (offered, offered)


def test_a_datamodule_gives_the_batch_and_the_validation_data(tmp_path):
    loop = from_lightning(Module(), datamodule=Data())
    assert [tuple(part.shape) for part in loop.batch] == [(8, 4), (8,)]
    loop.fit([loop.batch] * 3)
    assert len(loop.model.where) == 3
    assert loop.evaluate()[0]["val_loss"] > 0
    assert from_lightning(Module(), batch=labelled()).evaluate is None
    assert from_lightning(Module(), L.Trainer(limit_val_batches=0), datamodule=Data()).evaluate is None
    with pytest.raises(UsageError, match=r"got a list as datamodule; a lightning.pytorch.LightningDataModule is"):
        from_lightning(Module(), datamodule=[])


def test_validation_in_the_middle_of_fit_is_lightnings_own(tmp_path):
    seen = []
    loop = from_lightning(Module(), datamodule=Data())
    loop.model.on_validation_batch_start = lambda *_args: seen.append((len(loop.model.where), loop.model.training))

    class Evaluating(list):
        def __iter__(self):
            for position, batch in enumerate(super().__iter__()):
                if position == 2:
                    loop.evaluate()
                yield batch

    loop.fit(Evaluating([loop.batch] * 4))
    assert len(loop.model.where) == 4
    assert len(seen) == 2  # the second one at the end of the epoch
    assert not any(training for _, training in seen)
    assert loop.model.training


def judged(make):
    (result,) = check_loop(make, only=["resume_equivalence"], raises=False).results
    assert result.outcome in ("passed", "failed"), (result.outcome, result.reason, result.error)
    return result


@one_a_library(loops.FAULTY)
def test_what_a_resumed_run_loses_is_named(name):
    make, causes, culprit = loops.FAULTY[name]
    faults = judged(make).faults
    assert {fault.cause for fault in faults} <= set(causes.split("|"))
    assert any(culprit in f"{fault.summary} {' '.join(fault.culprits)}" for fault in faults)
    assert not any("site-packages" in fault.where for fault in faults)


@one_a_library(loops.RIGHT)
def test_a_right_checkpoint_is_silent(name):
    assert [(f.level, f.cause, f.summary) for f in judged(loops.RIGHT[name]).findings] == []


@one_a_library(loops.ADVISED)
def test_what_may_be_right_is_advice(name):
    make, cause = loops.ADVISED[name]
    assert [(f.level, f.cause) for f in judged(make).findings] == [("advice", cause)]
