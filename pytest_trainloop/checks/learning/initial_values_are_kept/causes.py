"""The causes of ``initial_values_are_kept``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.registry import Cause, finding_maker

_lost = partial(
    Cause,
    measured=(
        "{written:parameter} written by this line; all are initialised again before the first step, and nothing reads "
        "the values in between"
    ),
    explains=("loss_at_init", "overfit_one_batch"),
    variants={
        "first loss": {"shown_by": "with these values put back, the first loss is {back:.4g} in place of {first:.4g}"},
        "declared": {"shown_by": "pretrained= declares that training begins with these values"},
    },
)
_NOTHING_LEFT = "no parameter begins with a value that this line wrote"

CAUSES = {
    "loaded_values_overwritten": _lost(
        proof="values that were loaded into parameters are drawn again before the first step",
        summary="the values that are loaded into {names} are lost: {names:they} {names:are} initialised again",
        shown_by=_NOTHING_LEFT,
        repair="initialise first and load last: move the line that loads behind the initialisation",
        settle="pretrained= names the parts that begin with loaded values; delete the line where none should",
        source="https://github.com/ImCharlesY/AdaInt/pull/12",
    ),
    "set_values_overwritten": _lost(
        proof="values that were set by hand in parameters are drawn again before the first step",
        summary="the values that are set in {names} are lost: {names:they} {names:are} initialised again",
        shown_by=_NOTHING_LEFT,
        repair="initialise first and set the values last: move the line that sets them behind the initialisation",
        settle="delete the line that sets the values where the general initialisation should replace them",
        source="https://github.com/yhenon/pytorch-retinanet/issues/50",
    ),
}

found = finding_maker(CAUSES)
