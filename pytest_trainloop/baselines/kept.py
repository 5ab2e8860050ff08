"""The baseline of a loop as a check asks for it: the stored trajectory and the fresh one, or a new one to be stored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.baselines.as_json import text_of, trajectory_of
from pytest_trainloop.baselines.thinned import thinned
from pytest_trainloop.errors import CannotDecide, NotRecorded, Unreliable, UsageError

if TYPE_CHECKING:
    from pytest_trainloop.baseline_file import BaselineFile
    from pytest_trainloop.baselines.trajectory import Trajectory
    from pytest_trainloop.runs.evidence import Evidence


def stored_and_fresh(evidence: Evidence) -> tuple[Trajectory | None, Trajectory]:
    """The stored trajectory of the loop, and that of now, made in the same way.

    Where this run records it, that of now is the new one, and the stored one None where there is none that can be read.

    Raises ``CannotDecide`` where none is stored or the loop has no trajectory, ``Unreliable`` where what is to be
    recorded differs from one run to the next, and ``UsageError`` for a file that cannot be read.
    """
    from pytest_trainloop.baselines.capture import captured

    place = evidence.baseline
    if place is None:
        raise CannotDecide("no file for a baseline is given", needs="baseline=")
    if place.is_to_be_recorded:
        new = _recorded(evidence)
        place.text = text_of(thinned(new))
        return _readable(place), new
    if not place.is_there:
        raise NotRecorded(f"no baseline is recorded yet: {place.first} records the loop as it is", needs=place.flag)
    stored = trajectory_of(place.read(), place.shown, place.repair)
    fresh = captured(evidence, stored.made)
    then, now = stored.environment.device, fresh.environment.device
    if then != now:
        raise CannotDecide(
            f"{place.shown} was recorded on {then} and the loop runs on {now}, where other random numbers are drawn",
            needs="the same device",
        )
    return stored, fresh


def _readable(place: BaselineFile) -> Trajectory | None:
    try:
        return trajectory_of(place.read(), place.shown, place.repair) if place.is_there else None
    except UsageError:
        return None


def _recorded(evidence: Evidence) -> Trajectory:
    """A new trajectory, made twice: what differs from one run to the next is no baseline."""
    from pytest_trainloop.baselines.capture import captured

    first = captured(evidence)
    return replace(first, own=replace(first.own, repeatable=is_exact(evidence, first)))


def is_exact(evidence: Evidence, first: Trajectory) -> bool:
    """Make a trajectory once more: whether its course in the loop's own precision is the same bit for bit.

    Raises ``Unreliable`` where two runs under one seed differ by more than rounding.
    """
    from pytest_trainloop.baselines.capture import captured
    from pytest_trainloop.baselines.repeat import ROUNDED, first_difference

    again = captured(evidence, first.made)
    both = first.double is not None and again.double is not None
    a, b = (first.double, again.double) if both else (first.own, again.own)
    if a is None or b is None:  # for the types: both are there
        raise Unreliable("two runs under one seed differ: one of them is in float64")
    difference = first_difference(a, b, rounded=ROUNDED[a.precision])
    if difference:
        raise Unreliable(
            f"two runs under one seed differ: {difference}. What cannot be repeated has no baseline: see determinism"
        )
    return not first_difference(first.own, again.own)
