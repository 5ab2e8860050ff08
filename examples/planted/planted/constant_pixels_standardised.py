"""Pixels are standardised by their spread over the batch; the corners of the digits are the same in all of it."""

from digits_cnn import trainer
from torch import Tensor


class Trainer(trainer.Trainer):
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().loss((images - images.mean(0)) / images.std(0), labels)
