"""The causes that the record of a run shows: what drives which rate."""

from __future__ import annotations

from pytest_trainloop.registry import Cause

LEARNING = ("overfit_one_batch", "update_ratio")

RATE_CAUSES = {
    "drives_another": Cause(
        proof=(
            "the scheduler moves the rates of an optimizer that makes no step and holds weights of one that steps at a "
            "constant rate"
        ),
        repair="build the scheduler after the last optimizer, and from that one: scheduler = Scheduler(optimizer)",
        change=("scheduler",),
    ),
}
