"""Images are augmented with noise from one generator of the module: a second run goes on where the first stopped."""

import numpy as np
import torch
from digits_cnn import trainer
from torch import Tensor

GENERATOR = np.random.default_rng(0)


class Trainer(trainer.Trainer):
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        noise = GENERATOR.normal(scale=0.05, size=images.shape)
        return super().loss(images + torch.from_numpy(noise).to(images.dtype), labels)
