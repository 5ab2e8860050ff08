"""The caller's model is kept as it was by training a copy, made when the optimizer already holds the original."""

import copy

from digits_cnn import trainer
from digits_cnn.model import SmallCNN


class Trainer(trainer.Trainer):
    def __init__(self, model: SmallCNN, config: trainer.TrainerConfig | None = None) -> None:
        super().__init__(model, config)
        self.model = copy.deepcopy(model)
