"""Loops whose functions hold what a test gives them."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.runs.reachable_state.snapshot import Difference, Reach, Snapshot, differences


def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
    for x in batches:
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()


def loop_with(model: nn.Module | None = None, optimizer: Any = None, **fields: Any) -> TrainLoop:
    """A loop of one model and one optimizer; ``holding`` are variables that its ``fit`` keeps."""
    model = nn.Linear(3, 2) if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1) if optimizer is None else optimizer
    fields = {"fit": lambda batches: train(model, optimizer, batches), **fields}
    return TrainLoop(model=model, optimizer=optimizer, batch=torch.ones(4, 3), **fields)


def function_with(**variables: Any) -> FunctionType:
    """A function of which these are the variables in its closure."""
    names = ", ".join(variables)
    scope: dict[str, Any] = {}
    text = f"def outer({names}):\n    def held(*given):\n        return ({names},)\n    return held\n"
    exec(text, {"__name__": __name__}, scope)
    return scope["outer"](**variables)


def reach_of(**variables: Any) -> Reach:
    """The reach of a loop whose ``fit`` keeps these variables."""
    return Reach.of(loop_with(fit=function_with(**variables)))


def snapshot_of(loop: TrainLoop) -> Snapshot:
    return Reach.of(loop).snapshot()


def changes(before: Snapshot, loop: TrainLoop) -> dict[str, Difference]:
    """What has changed in a loop since a snapshot, by path."""
    return {found.leaf.path: found for found in differences(before, snapshot_of(loop))}
