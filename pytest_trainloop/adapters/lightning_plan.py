"""How long a Lightning ``Trainer`` trains, and how often it calls each scheduler."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pytest_trainloop.runs.projection import Counts, Planned, Unit

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_EPOCHS = 1000
"""What Lightning takes where neither max_epochs nor max_steps is given."""


def declared_length(trainer: Any, declared: Counts) -> Counts:
    """What the project says of the length: its own fields first, then the settings of its trainer."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    by_default = epochs == DEFAULT_EPOCHS and steps == -1
    epochs = None if by_default or epochs is None or epochs < 1 else epochs
    return Counts(
        declared.steps if declared.steps is not None else steps if steps > 0 else None,
        None,
        declared.passes if declared.passes is not None else epochs,
    )


def configured_schedules(trainer: Any, plan: Counts) -> Iterator[Planned]:
    """Inside ``trainer.fit``, where the optimizers are configured: every schedule, and its calls in the whole training.

    Lightning calls a scheduler after an epoch, unless ``interval`` is "step", and then only every ``frequency`` times.
    """
    estimated = trainer.estimated_stepping_batches
    if plan.passes is None and plan.steps is None:
        return
    steps = plan.steps
    if steps is None and math.isfinite(estimated) and estimated > 0:
        steps = int(estimated)
    passes = plan.passes
    window = trainer.accumulate_grad_batches
    counts = Counts(steps, None if steps is None else steps * window, passes)
    for config in trainer.strategy.lr_scheduler_configs:
        unit: Unit = "step" if config.interval == "step" else "epoch"
        total = counts.of(unit)
        if config.reduce_on_plateau or total is None:
            continue
        yield Planned(
            schedulers=(config.scheduler,),
            optimizer=config.scheduler.optimizer,
            unit=unit,
            calls=max(1, total // config.frequency),
            counts=counts,
            declared=unit == "step" and plan.steps is not None,
        )
