"""The causes of ``initial_values_are_kept``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_lost = partial(
    Cause,
    measured=(
        "{written:parameter} written by this line and initialised again before the first step; no code read the values "
        "in between"
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
        proof="an initialisation overwrites values that were loaded into parameters, before the first step",
        summary="a later initialisation overwrites the values that were loaded into {names}",
        shown_by=_NOTHING_LEFT,
        repair="initialise first, then load: move this line behind the initialisation",
        settle="pretrained= names the parts that must keep loaded values; delete the line if they are not needed",
        source="https://github.com/ImCharlesY/AdaInt/pull/12",
    ),
    "set_values_overwritten": _lost(
        proof="an initialisation overwrites values that were set by hand in parameters, before the first step",
        summary="a later initialisation overwrites the values that were set in {names}",
        shown_by=_NOTHING_LEFT,
        repair="initialise first, then set the values: move this line behind the initialisation",
        settle="delete this line if the later initialisation is the right one",
        source="https://github.com/yhenon/pytorch-retinanet/issues/50",
    ),
    "nothing_loaded": Cause(
        proof="load_state_dict with strict=False is given keys, and the module has none of them",
        summary="load_state_dict loads nothing: none of the {keys:key} it is given is a key of the module",
        measured="the first key given is {first}, and the first of the module's {own:key} is {other}",
        shown_by="the keys of both were compared while the loop was built",
        repair="give the keys the names that the module has, and strict=True while you look for it",
        change=("seen",),
        source="https://github.com/torchgeo/torchgeo/issues/4036",
        explains=("loss_at_init", "overfit_one_batch"),
    ),
}

found = finding_maker(CAUSES)
