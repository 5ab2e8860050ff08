"""Accelerate in several processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator
from tests.blind.scale.cases import fault


@fault(
    "frameworks",
    "the model that was handed to prepare is trained, not the one that came back",
    thread="kohya-ss/sd-scripts#989",
    check="distributed_equivalence",
    place="model_pred = unet(",
)
def prepared_and_not_used(ranks=1):
    accelerator = fresh_accelerator(cpu=True)
    unet = nn.Sequential(nn.Linear(9, 18), nn.SiLU(), nn.Linear(18, 9))
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    network, optimizer = accelerator.prepare(unet, optimizer)

    def train(batches):
        network.train()
        for latents in batches:
            with accelerator.accumulate(network):
                model_pred = unet(latents)
                loss = F.mse_loss(model_pred, latents.roll(1, 1))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=unet, optimizer=optimizer, batch=torch.randn(8, 9), fit=train)
