"""The trunk is "frozen" by setting its gradients to zero: weight decay goes on."""

import torch
from digits_cnn import trainer
from torch import Tensor


class Trainer(trainer.Trainer):
    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(images, labels)
        loss.backward()
        for parameter in self.model.trunk.parameters():
            parameter.grad.zero_()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        return loss.detach()
