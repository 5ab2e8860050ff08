"""How long a ``transformers.Trainer`` trains, and the schedule that it builds for that."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.runs.accelerate_state import gradient_state_kept
from pytest_trainloop.runs.projection import Counts, Planned

if TYPE_CHECKING:
    from collections.abc import Sequence


def batches_a_pass(trainer: Any) -> int | None:
    """Batches of the trainer's own train dataloader; None where it has no length."""
    with gradient_state_kept():
        try:
            return len(trainer.get_train_dataloader())
        except (TypeError, ValueError):  # of an iterable data set, or none
            return None


def plan_of(trainer: Any, batches: int | None) -> Counts:
    """What ``train()`` would make: ``max_steps``, else the steps of all epochs."""
    args = trainer.args
    window = args.gradient_accumulation_steps
    per_pass = None if batches is None else max(1, -(-batches // window))
    if args.max_steps > 0:
        steps = args.max_steps
        passes = None if per_pass is None else -(-steps // per_pass)
        return Counts(steps, steps * window, passes)
    if per_pass is None:
        return Counts(None, None, None)
    steps = math.ceil(args.num_train_epochs * per_pass)
    return Counts(max(1, steps), max(1, steps * window), max(1, math.ceil(args.num_train_epochs)))


def planned_schedules(trainer: Any, steps: int | None) -> Sequence[Planned]:
    """The schedule of a thrown-away trainer, as ``train()`` would build it; ``steps`` where the project declares them.

    Raises ``CannotDecide`` where nothing says how long it trains.
    """
    counts = plan_of(trainer, batches_a_pass(trainer))
    if steps is not None:
        counts = Counts(steps, steps * trainer.args.gradient_accumulation_steps, None)
    if counts.steps is None:
        raise CannotDecide("the train dataloader has no length: give max_steps, or steps=", needs="steps=")
    with gradient_state_kept():
        trainer.create_optimizer_and_scheduler(num_training_steps=counts.steps)
    scheduler = trainer.lr_scheduler
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return []
    return [
        Planned(
            schedulers=(scheduler,),
            optimizer=scheduler.optimizer,
            unit="step",
            calls=counts.steps,
            counts=counts,
            declared=steps is not None or trainer.args.max_steps > 0,
        )
    ]
