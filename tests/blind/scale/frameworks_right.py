"""Accelerate, the Trainer and Lightning, rightly."""

from __future__ import annotations

import tempfile

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer
from tests.blind.cases import right


@right("frameworks", "prepare, accumulate and backward", thread="huggingface/accelerate#106")
def prepared(ranks=1, accumulate=1):
    accelerator = fresh_accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    def train(batches):
        model.train()
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 7), torch.randint(3, (8,))), fit=train)


@right(
    "frameworks",
    "the loss of all ranks is gathered for the log; gradients are those of accelerator.reduce, without a wrapper",
    thread="kohya-ss/sd-scripts#989",
)
def reduced_by_accelerator(ranks=1):
    accelerator = fresh_accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []

    def train(batches):
        for x in batches:
            loss = F.mse_loss(model(x), x)
            history.append(accelerator.gather(loss.detach()).mean().item())
            loss.backward()
            for p in model.parameters():
                p.grad = accelerator.reduce(p.grad, reduction="mean")
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(8, 6), fit=train)


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


@right("frameworks", "the Trainer compiles the model itself", thread="pytorch/pytorch#186294")
def trainer_compiles(compile=False):
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compile else {}
    trainer = trainer_of(**options)
    rows = trainer.train_dataset
    return from_trainer(trainer, batch={"inputs": rows.x[:8], "labels": rows.y[:8]})


class Lit(lightning.LightningModule):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Linear(16, 3)
        self.run = torch.compile(self.forward, backend="aot_eager") if compiled else self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.run(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@right(
    "frameworks",
    "a Lightning module that compiles its forward, and calls that",
    thread="Lightning-AI/pytorch-lightning#17529",
)
def lightning_compiled_forward(compile=False):
    return from_lightning(Lit(compile), batch=(torch.randn(8, 6), torch.randint(3, (8,))))
