"""Accelerate, the Trainer and Lightning, rightly."""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments

from pytest_trainloop.adapters import from_trainer
from tests.loops.from_threads import right


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows: int = 32) -> None:
        g = torch.Generator().manual_seed(2)
        self.x = torch.randn(rows, 6, generator=g)
        self.y = torch.randint(3, (rows,), generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.x[index], "labels": self.y[index]}


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def trainer_of(cls=Trainer, batch_size: int = 8, **options):
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=batch_size,
        save_strategy="no",
        learning_rate=1e-3,
        seed=5,
        **options,
    )
    return cls(model=Scored(), args=arguments, train_dataset=Rows())


class SmoothTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], inputs["labels"], label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


@right("frameworks", "compute_loss calls the model that it is handed", thread="huggingface/transformers#37110")
def trainer_given_model(ranks=1):
    trainer = trainer_of(SmoothTrainer, batch_size=8 // ranks)
    rows = trainer.train_dataset
    return from_trainer(trainer, batch={"inputs": rows.x[:8], "labels": rows.y[:8]})
