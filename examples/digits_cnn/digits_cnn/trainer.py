"""A class-based trainer: ``python -m digits_cnn.trainer --epochs 10``."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from digits_cnn.data import loaders
from digits_cnn.model import SmallCNN

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainerConfig:
    epochs: int = 10
    rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    decay_every: int = 4
    decay_factor: float = 0.2
    label_smoothing: float = 0.1
    clip: float = 5.0
    precision: str = "fp32"
    device: str = "cpu"


class Trainer:
    """SGD with momentum, a rate that falls every few epochs, label smoothing, mixed precision on request."""

    def __init__(self, model: SmallCNN, config: TrainerConfig | None = None) -> None:
        self.config = config or TrainerConfig()
        self.model = model.to(self.config.device)
        self.optimizer = self.configure_optimizer()
        self.scheduler = StepLR(self.optimizer, self.config.decay_every, self.config.decay_factor)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=self.config.label_smoothing)
        self.scaler = GradScaler(self.config.device, enabled=self.config.precision == "fp16")

    def configure_optimizer(self) -> SGD:
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        gains_and_biases = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [
            {"params": weights, "weight_decay": self.config.weight_decay},
            {"params": gains_and_biases, "weight_decay": 0.0},
        ]
        return SGD(groups, lr=self.config.rate, momentum=self.config.momentum, nesterov=True)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        dtype = LOW_PRECISION.get(self.config.precision)
        with torch.autocast(self.config.device, dtype, enabled=dtype is not None):
            loss: Tensor = self.criterion(self.model(images), labels)
        return loss

    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(images, labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def train_epoch(self, loader: Iterable[Sequence[Tensor]]) -> float:
        """One pass over the data; returns the mean loss."""
        self.model.train()
        total, count = 0.0, 0
        for images, labels in loader:
            loss = self.train_step(images.to(self.config.device), labels.to(self.config.device))
            total += loss.item() * len(labels)
            count += len(labels)
        return total / max(1, count)

    def fit(
        self, loader: Iterable[Sequence[Tensor]], validation: Iterable[Sequence[Tensor]] | None = None
    ) -> list[float]:
        """Train for ``config.epochs``; returns the mean loss of every epoch."""
        history = []
        for epoch in range(1, self.config.epochs + 1):
            rate = self.scheduler.get_last_lr()[0]
            history.append(self.train_epoch(loader))
            self.scheduler.step()
            if validation is not None:
                accuracy = self.evaluate(validation)
                print(f"epoch {epoch:3d}  rate {rate:.4f}  loss {history[-1]:.3f}  accuracy {accuracy:.1%}")
        return history

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Sequence[Tensor]]) -> float:
        """The share of images that are recognised."""
        was_training = self.model.training
        self.model.eval()
        right, count = 0, 0
        for images, labels in loader:
            guessed = self.model(images.to(self.config.device)).argmax(dim=1).cpu()
            right += int((guessed == labels).sum())
            count += len(labels)
        self.model.train(was_training)
        return right / max(1, count)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=TrainerConfig.epochs)
    parser.add_argument("--precision", choices=["fp32", *LOW_PRECISION], default=TrainerConfig.precision)
    parser.add_argument("--device", default=TrainerConfig.device)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    train, test = loaders()
    config = TrainerConfig(epochs=options.epochs, precision=options.precision, device=options.device)
    Trainer(SmallCNN(), config).fit(train, validation=test)


if __name__ == "__main__":
    main()
