"""The optimizer never steps."""

from digits_cnn import trainer
from torch import Tensor, nn


class Trainer(trainer.Trainer):
    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(images, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        return loss.detach()
