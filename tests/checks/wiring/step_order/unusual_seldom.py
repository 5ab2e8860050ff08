"""Loops that step seldom, or no more, and are right."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


@odd(notes="stops early on the loss of an epoch that is not left: the batches after it are only counted")
def early_stop_without_break() -> TrainLoop:
    model = mlp(8, 24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def fit(batches):
        best, worse = float("inf"), 0
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if worse < 2:  # once reached it is not lowered again
                optimizer.step()
                best, worse = (loss.item(), 0) if loss.item() < best else (best, worse + 1)

    batches = [data.labelled(features=8, seed=seed) for seed in range(16)]
    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=fit)


@odd(notes="the head warms up with an optimizer of its own, which never steps again")
def one_optimizer_after_the_other() -> TrainLoop:
    encoder, head = mlp(8, 16, 16), nn.Linear(16, 3)
    model = nn.Sequential(encoder, head)
    warm, whole = torch.optim.SGD(head.parameters(), lr=0.1), torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            optimizer = warm if number < 3 else whole
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=[warm, whole], batch=data.labelled(features=8), fit=fit)


@odd(notes="the batch size doubles with each step, by accumulation: 1, 2, 4, ... micro-batches")
def windows_that_double() -> TrainLoop:
    model = mlp(8, 24, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        batches = iter(batches)
        optimizer.zero_grad()
        for size in (2**n for n in itertools.count()):
            window = list(itertools.islice(batches, size))
            for x, y in window:
                (F.cross_entropy(model(x), y) / size).backward()
            if len(window) < size:
                break
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(features=8), fit=fit)


@odd(notes="the encoder is trained on two batches, then only read: nobody switched its gradients off")
def encoder_that_is_kept_after_two_batches() -> TrainLoop:
    encoder, decoder, head = nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(6, 3)
    first = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    second = torch.optim.Adam(head.parameters(), lr=1e-2)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            codes = encoder(x).tanh()
            if number < 2:
                first.zero_grad()
                F.mse_loss(decoder(codes), x).backward()
                first.step()
                continue
            second.zero_grad()
            F.cross_entropy(head(codes), y).backward()
            second.step()

    modules = {"encoder": encoder, "decoder": decoder, "head": head}
    return TrainLoop(model=modules, optimizer=[first, second], batch=data.labelled(features=8), fit=fit)
