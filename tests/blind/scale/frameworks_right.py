"""Accelerate in several processes, rightly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator
from tests.blind.scale.cases import right


@right("frameworks", "prepare, accumulate and backward", thread="huggingface/accelerate#106")
def prepared(ranks=1, accumulate=1):
    accelerator = fresh_accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    def train(batches):
        model.train()
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 7), torch.randint(3, (8,))), fit=train)


@right(
    "frameworks",
    "the loss of all ranks is gathered for the log; gradients are those of accelerator.reduce, without a wrapper",
    thread="kohya-ss/sd-scripts#989",
)
def reduced_by_accelerator(ranks=1):
    accelerator = fresh_accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []

    def train(batches):
        for x in batches:
            loss = F.mse_loss(model(x), x)
            history.append(accelerator.gather(loss.detach()).mean().item())
            loss.backward()
            for p in model.parameters():
                p.grad = accelerator.reduce(p.grad, reduction="mean")
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(8, 6), fit=train)
