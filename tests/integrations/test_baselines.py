"""Trajectories of loops that a library runs: wholly in float64, the same when made again, and small as files."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.baselines.as_json import text_of
from pytest_trainloop.baselines.capture import captured
from pytest_trainloop.baselines.thinned import thinned
from pytest_trainloop.runs.evidence import Evidence

pytestmark = pytest.mark.integration


def batch():
    return torch.randn(8, 4), torch.randn(8, 1)


def transformers():
    library = pytest.importorskip("transformers")
    from pytest_trainloop.adapters.transformers import from_trainer

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = library.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=3, **sizes)
    rows = [{"input_ids": torch.randint(0, 20, (6,)), "labels": torch.randint(0, 3, ())} for _ in range(32)]
    given = {"output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
    arguments = library.TrainingArguments(**given)
    model = library.BertForSequenceClassification(config)
    return from_trainer(library.Trainer(model=model, args=arguments, train_dataset=rows))


def lightning():
    library = pytest.importorskip("lightning")
    from pytest_trainloop.adapters.lightning import from_lightning

    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch, _index):
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return from_lightning(Module(), library.Trainer(accelerator="cpu", **dict.fromkeys(quiet, False)), batch=batch())


def accelerate():
    library = pytest.importorskip("accelerate")
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))

    def fit(batches):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch(), fit=fit)


@pytest.mark.parametrize("make", [transformers, lightning, accelerate])
def test_a_library_has_a_trajectory(make):
    evidence = Evidence(make)
    found = captured(evidence)
    assert found.double is not None
    assert not found.double.lower
    assert len(found.double.steps) == len(found.own.steps) >= 11
    assert all(step.gradients and step.events for step in found.own.steps[:11])
    assert captured(evidence, found.made) == found
    assert len(text_of(thinned(found))) < 110_000
