"""The rate falls to a tenth every epoch, and the schedule is stepped after every batch."""

from dataclasses import replace

from digits_cnn import trainer
from digits_cnn.model import SmallCNN
from torch import Tensor


class Trainer(trainer.Trainer):
    def __init__(self, model: SmallCNN, config: trainer.TrainerConfig | None = None) -> None:
        super().__init__(model, replace(config or trainer.TrainerConfig(), decay_every=1, decay_factor=0.1, rate=0.002))

    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = super().train_step(images, labels)
        self.scheduler.step()
        return loss
