"""The training data of a trainer, which ``fit`` does not read: it is given its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_trainloop.declare.loop import TrainLoop


@dataclass(frozen=True, slots=True)
class TrainingData:
    """One loader that the trainer would train on."""

    name: str
    """The call that gives it, as the project would write it."""
    loader: Any
    begin_epoch: Callable[[int], None]
    """What the trainer itself does before each epoch, with the number of the epoch."""


def training_data(loop: TrainLoop) -> Iterable[TrainingData]:
    """New loaders of the trainer that a loop was made from; none of a loop that is no trainer's."""
    make = getattr(loop.fit, "training_data", None)
    return () if make is None else make()
