"""Scripts of the training libraries under ``python -m pytest_trainloop``, and the tests that it writes for them."""

from __future__ import annotations

import pytest

from pytest_trainloop import check_loop
from tests.script_runner.conftest import loaded

pytestmark = [pytest.mark.integration, pytest.mark.processes]

DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def rows():
    x = torch.randn(64, 4)
    return TensorDataset(x, x.sum(1, keepdim=True))

def data():
    return DataLoader(rows(), batch_size=8, shuffle=True)

def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
"""

TRANSFORMERS = """
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

class Rows(Dataset):
    def __init__(self, n):
        self.x = torch.randint(0, 50, (n, 8))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "attention_mask": torch.ones(8, dtype=torch.long), "labels": self.x[i, 0] % 2}

def main():
    (args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=16)
    trainer = Trainer(model=BertForSequenceClassification(config), args=args, train_dataset=Rows(64))
    trainer.train()

if __name__ == "__main__":
    main()
"""

LIGHTNING = (
    DATA
    + """
import lightning as L

class Lit(L.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = mlp()

    def training_step(self, batch, i):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return data()

def main():
    model = Lit(lr=0.05)
    trainer = L.Trainer(max_epochs=50, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, datamodule=Data())

if __name__ == "__main__":
    main()
"""
)

ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator

def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, data())
    for epoch in range(100):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

if __name__ == "__main__":
    main()
"""
)

ARGUMENTS = "--output_dir out --report_to none --use_cpu True --disable_tqdm True --num_train_epochs 20".split()


def said_of(watch, source, *arguments, options=()):
    said = watch(source, *options, args=arguments, head="")
    assert said.status == 0, said
    assert "train.py: 30 optimizer steps watched, then it was stopped" in said.out
    return said.out


@pytest.mark.parametrize(
    ("library", "source", "arguments"),
    [
        ("transformers", TRANSFORMERS, ARGUMENTS),
        ("lightning", LIGHTNING, []),
        ("lightning", LIGHTNING.replace("datamodule=Data()", "data(), data()"), []),
        ("lightning", LIGHTNING.replace("datamodule=Data()", "train_dataloaders=DataLoader(rows(), 8)"), []),
    ],
    ids=["transformers", "lightning", "lightning loaders", "lightning loader by name"],
)
def test_a_trainer_is_watched_and_its_written_test_runs(watch, folder, library, source, arguments):
    pytest.importorskip(library)
    said = said_of(watch, source, *arguments, options=["--write-test=test_it.py"])
    assert "wrote test_it.py; run it by pytest --trainloop test_it.py" in said
    report = check_loop(loaded(folder / "test_it.py").test_train, only=["step_order", "optimizer_holds_every_param"])
    assert [result.outcome for result in report.results] == ["passed", "passed"]


def test_accelerate_is_watched(watch, folder):
    pytest.importorskip("accelerate")
    said_of(watch, ACCELERATE, options=["--write-test=test_it.py"])
    text = (folder / "test_it.py").read_text()
    assert "accelerator = fresh_accelerator(cpu=True, gradient_accumulation_steps=2)" in text
    assert "from pytest_trainloop import Script" in text
    assert "import accelerate" not in text
