"""Accelerate and the Trainer in several processes."""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_trainer
from tests.blind.cases import fault


@fault(
    "frameworks",
    "the model that was handed to prepare is trained, not the one that came back",
    thread="kohya-ss/sd-scripts#989",
    check="distributed_equivalence",
    place="model_pred = unet(",
)
def prepared_and_not_used(ranks=1):
    accelerator = fresh_accelerator(cpu=True)
    unet = nn.Sequential(nn.Linear(9, 18), nn.SiLU(), nn.Linear(18, 9))
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    network, optimizer = accelerator.prepare(unet, optimizer)

    def train(batches):
        network.train()
        for latents in batches:
            with accelerator.accumulate(network):
                model_pred = unet(latents)
                loss = F.mse_loss(model_pred, latents.roll(1, 1))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=unet, optimizer=optimizer, batch=torch.randn(8, 9), fit=train)


class Collated(torch.utils.data.Dataset):
    def __init__(self, rows: int, columns: int, labels: int) -> None:
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, columns, generator=g)
        self.y = torch.randint(labels, (rows,), generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.x[index], "labels": self.y[index]}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = self.model(**inputs)
        weight = torch.tensor([1.0, 2.0, 0.5], dtype=outputs["logits"].dtype)
        loss = (F.cross_entropy(outputs["logits"], labels, reduction="none") * weight[labels]).mean()
        return (loss, outputs) if return_outputs else loss


@fault(
    "frameworks",
    "compute_loss calls self.model, past the wrapper that it is handed",
    thread="LibreYOLO/libreyolo#836",
    check="distributed_equivalence",
    place="outputs = self.model(**inputs)",
)
def trainer_own_model(ranks=1):
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=8 // ranks,
        save_strategy="no",
        learning_rate=1e-3,
        max_grad_norm=0.0,
        seed=3,
    )
    trainer = WeightedTrainer(model=Classifier(), args=arguments, train_dataset=Collated(32, 6, 3))
    dataset = trainer.train_dataset
    return from_trainer(trainer, batch={"inputs": dataset.x[:8], "labels": dataset.y[:8]})
