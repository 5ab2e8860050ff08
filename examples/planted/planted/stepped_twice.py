"""The plain ``step`` was left in when the loop was ported to the scaler."""

from digits_cnn import trainer
from torch import Tensor, nn


class Trainer(trainer.Trainer):
    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(images, labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.step()
        return loss.detach()
