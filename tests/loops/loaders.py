"""A small classifier that trains on what a loader gives, for faults of the data: every test brings its own loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 48


def stored(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """What the data sets hold: rows of 6 features, and their labels out of 3."""
    return data.labelled(rows=rows)


def trains_on(
    batches_of: Callable[[], Any] | None, fit_of: Callable[[Any, Any, Callable[[Any], None]], Any] | None = None
) -> Callable[[], TrainLoop]:
    """A function that builds the project: ``batches_of()`` gives its loader, ``fit_of(model, optimizer, step)`` its
    loop, where that is more than a step for each batch."""

    def make() -> TrainLoop:
        model = mlp(6, 24, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def step(batch: Any) -> None:
            x, y = batch
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        def fit(batches: Any) -> None:
            for batch in batches:
                step(batch)

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(rows=12),
            batches=None if batches_of is None else batches_of(),
            fit=fit if fit_of is None else fit_of(model, optimizer, step),
        )

    return make
