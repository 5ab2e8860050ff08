"""The trunk is frozen after a few steps, in an optimizer that keeps its momentum and its zeroed gradients."""

from digits_cnn import trainer
from torch import Tensor


class Trainer(trainer.Trainer):
    seen = 0

    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        if self.seen == 4:
            self.model.trunk.requires_grad_(False)
        self.seen += 1
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.loss(images, labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()
