"""Float32 masters of bfloat16 weights that do not keep what rounding takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# The copy from the model to its masters stands in the step, where it belongs before the loop.


class MixedTrainer:
    def __init__(self, model, refresh):
        self.model = model.bfloat16()
        self.masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=5e-5)
        self.refresh = refresh

    @torch.no_grad()
    def load_masters(self):
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            master.copy_(p)

    def step(self, x, y):
        if self.refresh:
            self.load_masters()
        loss = F.cross_entropy(self.model(x.bfloat16()).float(), y)
        self.model.zero_grad()
        loss.backward()
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                p.copy_(master)


def mixed(refresh):
    def make():
        trainer = MixedTrainer(mlp(6, 32, 3), refresh)

        def fit(batches):
            for x, y in batches:
                trainer.step(x, y)

        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "masters_loaded_anew_in_every_step",
    "parameter_precision",
    "updates_lost",
    culprits=("0.weight", "2.weight"),
    where="self.optimizer.step()",
    faulty=mixed(refresh=True),
    fixed=mixed(refresh=False),
)


# The gradients of the masters are made where there are none, and nothing takes them away.


class Handing:
    def __init__(self, fresh):
        self.model = mlp(6, 24, 3).bfloat16()
        self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.05, momentum=0.9)
        self.fresh = fresh

    def hand_over(self):
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            if self.fresh or master.grad is None:
                master.grad = p.grad.float()

    def train(self, batches):
        for x, y in batches:
            self.model.zero_grad()
            F.cross_entropy(self.model(x.bfloat16()).float(), y).backward()
            self.hand_over()
            self.optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(list(self.model.parameters()), self.masters)


def handing(fresh):
    def make():
        trainer = Handing(fresh)
        batches = [data.labelled() for _ in range(6)]
        return TrainLoop(
            model=trainer.model, optimizer=trainer.optimizer, batch=batches[0], batches=batches, fit=trainer.train
        )

    return make


pair(
    "gradients_handed_to_masters_once",
    "step_order",
    "gradient_kept",
    where="master.grad = p.grad.float()",
    faulty=handing(fresh=False),
    fixed=handing(fresh=True),
)
