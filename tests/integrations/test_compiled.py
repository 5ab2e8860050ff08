"""Trainers that compile, and inductor itself: the compiled loop trains as the eager one does."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer
from pytest_trainloop.frontends.api import check_loop
from tests.checks.scale.compile_parity.compiled_loops import (
    BACKEND,
    CHECK,
    Classifier,
    batches,
    compiling,
    plain,
    steps,
)

pytestmark = pytest.mark.integration


def result_of(make):
    (result,) = check_loop(make, only=[CHECK], raises=False).results
    return result


def test_inductor_trains_as_eager_and_leaves_no_process():
    children = multiprocessing.active_children()

    @compiling
    def kept(model, compile):
        return torch.compile(model) if compile else model

    result = result_of(kept)
    assert (result.outcome, result.findings) == ("passed", ())
    assert multiprocessing.active_children() == children


def test_inductor_draws_dropout_as_eager():
    def make(compile=False):
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        return plain(model, torch.compile(model, mode="reduce-overhead") if compile else model)

    assert result_of(make).outcome == "passed"


def test_a_buffer_counted_and_read_in_one_graph_under_inductor():
    class Counting(Classifier):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (self.calls / 100).clamp(max=1.0)

    def make(compile=False):
        model = Counting()
        return plain(model, torch.compile(model) if compile else model)

    assert [f.cause for f in result_of(make).findings] == ["compiled_code_differs"]


@torch.library.custom_op("trainloop_tests::mixed", mutates_args=())
def mixed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t() * 2.0


mixed.register_fake(lambda x: x.new_empty(x.shape))
mixed.register_autograd(lambda ctx, gradient: gradient * 2.0)


def test_an_operator_whose_fake_implementation_has_other_strides():
    class Mixing(Classifier):
        def forward(self, x):
            return self.head(mixed(self.encoder(x)).flatten(1))

    def make(compile=False):
        model = Mixing()
        return plain(model, torch.compile(model) if compile else model)

    (finding,) = result_of(make).findings
    assert (finding.cause, finding.culprits) == ("operator_misdeclared", ("trainloop_tests::mixed",))
    assert "strides" in finding.shown_by
    assert "mixed(self.encoder(x))" in finding.where


def test_transformers_compiles(tmp_path):
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(32, (12,), generator=generator) for _ in range(16)]

    def make(compile=False):
        sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=8,
            report_to=[],
            torch_compile=compile,
            torch_compile_backend=BACKEND if compile else None,
            use_cpu=True,
        )
        rows = [{"input_ids": text, "labels": text} for text in texts]
        trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows)
        return from_trainer(trainer)

    result = result_of(make)
    assert (result.outcome, {f.cause for f in result.findings}) == ("passed", {"graph_breaks"})


def test_lightning_with_a_compiled_part():
    lightning = pytest.importorskip("lightning")

    def make(compile=False):
        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = Classifier()
                if compile:
                    self.net.compile(backend=BACKEND)

            def training_step(self, batch, index):
                x, y = batch
                return F.cross_entropy(self.net(x), y)

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        return from_lightning(Module(), batches=batches())

    assert result_of(make).outcome == "passed"


def test_accelerate_compiles_what_it_prepares():
    pytest.importorskip("accelerate")

    def make(compile=False):
        accelerator = fresh_accelerator(cpu=True, dynamo_backend=BACKEND if compile else "no")
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        return TrainLoop(
            model=model, optimizer=optimizer, batches=batches(), fit=lambda given: steps(model, optimizer, given)
        )

    assert result_of(make).outcome == "passed"
