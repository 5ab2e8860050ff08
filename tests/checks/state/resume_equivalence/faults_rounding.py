"""A checkpoint that keeps less of a weight than the model has."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# Half the size on disk: the copy that is saved is cast, and every resume starts from rounded weights.


class DetectionTrainer:
    def __init__(self, exported):
        self.model, self.exported = mlp(6, 16, 3), exported
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)

    def train(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    @torch.no_grad()
    def save_model(self, path):
        checkpoint = {"model": self.exported(copy.deepcopy(self.model)), "optimizer": self.optimizer.state_dict()}
        torch.save(checkpoint, path)

    @torch.no_grad()
    def resume(self, path):
        checkpoint = torch.load(path, weights_only=False)
        self.model.load_state_dict(checkpoint["model"].float().state_dict())
        self.optimizer.load_state_dict(checkpoint["optimizer"])


def saved(exported):
    def make():
        trainer = DetectionTrainer(exported)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=data.labelled(),
            fit=trainer.train,
            save=trainer.save_model,
            load=trainer.resume,
        )

    return make


pair(
    "half_precision_checkpoint",
    "resume_equivalence",
    "weights_rounded",
    faulty=saved(lambda model: model.half()),
    fixed=saved(lambda model: model),
    culprits=("0.weight",),
    quick=True,
)
