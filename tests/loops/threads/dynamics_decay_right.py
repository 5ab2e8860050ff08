"""Weight decay as projects mean it, where a rule of thumb would object."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


class NeuMF(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(50, 8)
        self.item = nn.Embedding(80, 8)
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, item):
        return self.mlp(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)


@right(
    "decay",
    "each layer's weight has a decay of its own, the first none, as the reference training has; biases go to plain SGD",
    thread="aiqm/torchani#279",
)
def atomic_network():
    net = nn.Sequential(
        nn.Linear(24, 32),
        nn.CELU(0.1),
        nn.Linear(32, 24),
        nn.CELU(0.1),
        nn.Linear(24, 16),
        nn.CELU(0.1),
        nn.Linear(16, 1),
    )
    weights = torch.optim.AdamW(
        [
            {"params": [net[0].weight], "weight_decay": 0},
            {"params": [net[2].weight], "weight_decay": 1e-5},
            {"params": [net[4].weight], "weight_decay": 1e-6},
            {"params": [net[6].weight], "weight_decay": 0},
        ],
        lr=1e-3,
    )
    biases = torch.optim.SGD([net[i].bias for i in (0, 2, 4, 6)], lr=1e-3)

    def train(batches):
        for aev, energy in batches:
            loss = F.mse_loss(net(aev).squeeze(1), energy)
            weights.zero_grad()
            biases.zero_grad()
            loss.backward()
            weights.step()
            biases.step()

    x = torch.rand(64, 24)
    return TrainLoop(
        model=net,
        optimizer=[weights, biases],
        batches=DataLoader(TensorDataset(x, x.sin().sum(1)), batch_size=16, shuffle=True),
        fit=train,
    )


@right(
    "decay",
    "reg_loss is reported and always 0: the regularization is the optimizer's weight_decay, which bypasses the loss",
    thread="allenai/allennlp#4436",
)
def applicator_without_terms():
    model = NeuMF()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def terms(model, batch):
        user, item, rating = batch
        return {"loss": F.binary_cross_entropy_with_logits(model(user, item), rating), "reg_loss": torch.tensor(0.0)}

    def train(batches):
        for batch in batches:
            outputs = terms(model, batch)
            optimizer.zero_grad()
            (outputs["loss"] + outputs["reg_loss"]).backward()
            optimizer.step()

    data = TensorDataset(torch.randint(0, 50, (96,)), torch.randint(0, 80, (96,)), torch.randint(0, 2, (96,)).float())
    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=16, shuffle=True), fit=train, parts=terms
    )
