"""The optimizer gets the trunk; nobody trains the head."""

from digits_cnn import trainer
from torch.optim import SGD


class Trainer(trainer.Trainer):
    def configure_optimizer(self) -> SGD:
        return SGD(self.model.trunk.parameters(), lr=self.config.rate, momentum=self.config.momentum)
