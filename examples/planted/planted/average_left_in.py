"""Validation copies the average of the weights into the model, and does not put the trained weights back."""

from collections.abc import Iterable, Sequence

from digits_cnn import trainer
from digits_cnn.model import SmallCNN
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Trainer(trainer.Trainer):
    def __init__(self, model: SmallCNN, config: trainer.TrainerConfig | None = None) -> None:
        super().__init__(model, config)
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = super().train_step(images, labels)
        self.average.update_parameters(self.model)
        return loss

    def evaluate(self, loader: Iterable[Sequence[Tensor]]) -> float:
        self.model.load_state_dict(self.average.module.state_dict())
        return super().evaluate(loader)
