"""A second optimizer for the head; its ``zero_grad`` was pasted and never renamed."""

from digits_cnn import trainer
from torch import Tensor
from torch.optim import SGD


class Trainer(trainer.Trainer):
    def configure_optimizer(self) -> SGD:
        self.head_optimizer = SGD(self.model.head.parameters(), lr=self.config.rate)
        return SGD(self.model.trunk.parameters(), lr=self.config.rate / 10, momentum=self.config.momentum)

    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        self.optimizer.zero_grad()
        loss = self.loss(images, labels)
        loss.backward()
        self.optimizer.step()
        self.head_optimizer.step()
        return loss.detach()
