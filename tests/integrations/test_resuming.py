"""Stop and go on with each library's own checkpoints: the resumed run is the uninterrupted one."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pytest_trainloop import UsageError, check_loop
from pytest_trainloop.adapters import from_lightning
from tests.integrations.one_a_library import one_a_library

accelerate = pytest.importorskip("accelerate")
L = pytest.importorskip("lightning")
loops = pytest.importorskip("tests.integrations.resuming_loops")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("a_process_without_accelerators")]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


class Module(loops.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().training_step(batch, batch_idx))


class Data(L.LightningDataModule):
    def setup(self, stage):
        self.rows = torch.utils.data.TensorDataset(*loops.labelled(24))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.rows, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.rows, batch_size=8)


def hf(tmp_path, **settings):
    return loops.hf(tmp_path / "project", **settings)


def lightning(tmp_path, trainer=False, **settings):
    given = L.Trainer(accelerator="cpu", default_root_dir=tmp_path, **settings) if trainer or settings else None
    return from_lightning(Module(), given, batch=loops.labelled())


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
    ids=["hf", "hf-no-saving", "hf-only-model", "lightning", "lightning-trainer", "lightning-no-checkpoints"],
)
def test_save_and_load_are_offered_where_the_trainer_writes_checkpoints(make, offered, tmp_path):
    loop = make(tmp_path)
    assert (loop.save is not None, loop.load is not None) == (offered, offered)


def test_a_datamodule_gives_the_batch_and_the_validation_data(tmp_path):
    loop = from_lightning(Module(), datamodule=Data())
    assert [tuple(part.shape) for part in loop.batch] == [(8, 4), (8,)]
    loop.fit([loop.batch] * 3)
    assert loop.model.seen == 3
    assert loop.evaluate()[0]["val_loss"] > 0
    assert from_lightning(Module(), batch=loops.labelled()).evaluate is None
    assert from_lightning(Module(), L.Trainer(limit_val_batches=0), datamodule=Data()).evaluate is None
    with pytest.raises(UsageError, match=r"got a list as datamodule; a lightning.pytorch.LightningDataModule is"):
        from_lightning(Module(), datamodule=[])


def test_validation_in_the_middle_of_fit_is_lightnings_own(tmp_path):
    seen = []
    loop = from_lightning(Module(), datamodule=Data())
    loop.model.on_validation_batch_start = lambda *_args: seen.append((loop.model.seen, loop.model.training))

    class Evaluating(list):
        def __iter__(self):
            for position, batch in enumerate(super().__iter__()):
                if position == 2:
                    loop.evaluate()
                yield batch

    loop.fit(Evaluating([loop.batch] * 4))
    assert loop.model.seen == 4
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
