"""Gradients are clipped to less than a thousandth of their size."""

from dataclasses import replace

from digits_cnn import trainer
from digits_cnn.model import SmallCNN


class Trainer(trainer.Trainer):
    def __init__(self, model: SmallCNN, config: trainer.TrainerConfig | None = None) -> None:
        super().__init__(model, replace(config or trainer.TrainerConfig(), clip=1e-4))
