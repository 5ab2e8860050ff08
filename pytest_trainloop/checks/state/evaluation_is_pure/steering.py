"""Evaluation that steers training by its score, told from one that leaves an option as it needed it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.state.evaluation_is_pure.interposed import EvaluateRaised
from pytest_trainloop.reach.leaves import same_value

if TYPE_CHECKING:
    from pytest_trainloop.checks.state.evaluation_is_pure.interposed import Interposed
    from pytest_trainloop.checks.state.evaluation_is_pure.left import Group

KINDS = ("scalar", "tensor", "array")
"""Kinds of leaves by which evaluation may steer."""


def steers(group: Group, first: Interposed, between: Interposed) -> bool:
    """Whether ``fit`` itself never changes this, and what evaluation sets it to depends on the model, or moves on with
    each evaluation: a curriculum, a threshold, the weight of a term.

    An option that is left as evaluation needs it (a rate of dropout at zero) is the same whatever the model is, and
    after a second call. A counter, or a state that is carried on, is moved by training as well. ``first`` makes runs
    with ``evaluate()`` before the first step, ``between`` those where the group was found.
    """
    if group.kind not in KINDS or any(d.how != "changed" for d in group.differences):
        return False
    try:
        begun = first.up_to_cut().run(watched=group.paths).seen.values
        if any(not same_value(begun.get(d.leaf.path), d.before) for d in group.differences):
            return False
        others = (between.up_to_cut().run(times=2).seen, between.up_to_cut().run(displaced=True).seen)
    except EvaluateRaised:
        return False
    after = [{d.leaf.path: d.after for d in seen.differences} for seen in others]
    return any(not same_value(found.get(d.leaf.path, d.before), d.after) for found in after for d in group.differences)
