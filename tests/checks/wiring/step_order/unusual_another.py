"""Correct loops in which one backward pass brings gradients for several optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def two_parts(fit_of):
    body, head = mlp(8, 24, 24), nn.Linear(24, 4)
    of_body, of_head = torch.optim.Adam(body.parameters(), 3e-3), torch.optim.SGD(head.parameters(), 0.05)
    return TrainLoop(
        model={"body": body, "head": head},
        optimizer=[of_body, of_head],
        batch=points(),
        batches=fresh(points),
        fit=fit_of(body, head, of_body, of_head),
    )


@odd(notes="one loss, and an optimizer for each part: both step with the same pass")
def one_loss_for_two_optimizers() -> TrainLoop:
    def fit_of(body, head, of_body, of_head):
        def fit(batches):
            for x, y in batches:
                of_body.zero_grad()
                of_head.zero_grad()
                F.cross_entropy(head(body(x)), y).backward()
                of_body.step()
                of_head.step()

        return fit

    return two_parts(fit_of)


@odd(notes="the head steps with every second batch, and gathers the gradients of both")
def head_that_gathers_two_batches() -> TrainLoop:
    def fit_of(body, head, of_body, of_head):
        def fit(batches):
            for number, (x, y) in enumerate(batches):
                of_body.zero_grad()
                F.cross_entropy(head(body(x)), y).backward()
                of_body.step()
                if number % 2:
                    of_head.step()
                    of_head.zero_grad()

        return fit

    return two_parts(fit_of)


@odd(notes="the body's pass leaves gradients in the head, which are cleared before its own loss")
def head_cleared_before_its_own_loss() -> TrainLoop:
    def fit_of(body, head, of_body, of_head):
        def fit(batches):
            for x, y in batches:
                of_body.zero_grad()
                F.cross_entropy(head(body(x)), y).backward()
                of_body.step()
                of_head.zero_grad()
                F.cross_entropy(head(body(x).detach()), y, label_smoothing=0.1).backward()
                of_head.step()

        return fit

    return two_parts(fit_of)


@odd(notes="two losses are added up in the head before either optimizer steps")
def two_losses_before_both_steps() -> TrainLoop:
    def fit_of(body, head, of_body, of_head):
        def fit(batches):
            for x, y in batches:
                of_body.zero_grad()
                of_head.zero_grad()
                features = body(x)
                F.cross_entropy(head(features), y).backward()
                F.cross_entropy(head(features.detach() + 0.1 * torch.randn_like(features)), y).backward()
                of_body.step()
                of_head.step()

        return fit

    return two_parts(fit_of)
