"""The baseline of a loop: the stored trajectory and the fresh one, or a new one to be stored; and its file as
``check_loop`` is given it."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.core.errors import CannotDecide, NotRecorded, Unreliable, UsageError
from pytest_trainloop.declare.baseline_file import BaselineFile, write
from pytest_trainloop.declare.fields import a
from pytest_trainloop.instruments.baselines.as_json import text_of, trajectory_of
from pytest_trainloop.instruments.baselines.trajectory import thinned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Result
    from pytest_trainloop.declare.selection import Plan
    from pytest_trainloop.instruments.baselines.trajectory import Course, Digest, Trajectory
    from pytest_trainloop.runs.evidence import Evidence

CHECK = "baseline"
"""The check that records and compares."""

ROUNDED = {"float64": 1e-6, "own": 1e-3}
"""Relative differences, by precision, that kernels which sum in another order each time may make over all steps:
another random draw makes larger ones."""


def stored_and_fresh(evidence: Evidence) -> tuple[Trajectory | None, Trajectory]:
    """The stored trajectory of the loop, and that of now, made in the same way.

    Where this run records it, that of now is the new one, and the stored one None where there is none that can be read.

    Raises ``CannotDecide`` where none is stored or the loop has no trajectory, ``Unreliable`` where what is to be
    recorded differs from one run to the next, and ``UsageError`` for a file that cannot be read.
    """
    from pytest_trainloop.instruments.baselines.capture import captured

    place = evidence.baseline
    if place is None:
        raise CannotDecide("no file for a baseline is given", needs="baseline=")
    if place.is_to_be_recorded:
        first = captured(evidence)
        new = replace(first, own=replace(first.own, repeatable=is_exact(evidence, first)))
        place.text = text_of(thinned(new))
        with contextlib.suppress(UsageError):
            return (trajectory_of(place.read(), place.shown, place.repair) if place.is_there else None), new
        return None, new
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


def is_exact(evidence: Evidence, first: Trajectory) -> bool:
    """Make a trajectory once more: whether its course in the loop's own precision is the same bit for bit.

    Raises ``Unreliable`` where two runs under one seed differ by more than rounding.
    """
    from pytest_trainloop.instruments.baselines.capture import captured

    again = captured(evidence, first.made)
    if first.double is None or again.double is None:
        a, b = first.own, again.own
    else:
        a, b = first.double, again.double
    if difference := next(_differences(a, b, ROUNDED[a.precision]), ""):
        raise Unreliable(
            f"two runs under one seed differ: {difference}. What cannot be repeated has no baseline: see determinism"
        )
    return not next(_differences(first.own, again.own, 0.0), "")


def _differences(a: Course, b: Course, rounded: float) -> Iterator[str]:
    """What differs between two courses by more than this relative difference, in words."""

    def close(x: float, y: float, size: float = 0.0) -> bool:
        equal = x == y or (math.isnan(x) and math.isnan(y))
        return equal or abs(x - y) <= rounded * max(abs(x), abs(y), size)

    def same(x: Digest, y: Digest) -> bool:
        return close(x.norm, y.norm) and close(x.ordered or 0.0, y.ordered or 0.0, x.norm)

    for name, tensor in a.tensors.items():
        if name not in b.tensors or not same(tensor.start, b.tensors[name].start):
            yield f"the initial {name}"
    for number, (ours, theirs) in enumerate(zip(a.batches, b.batches, strict=False), 1):
        if [(leaf.path, leaf.shape) for leaf in ours] != [(leaf.path, leaf.shape) for leaf in theirs]:
            yield f"the shapes of batch {number}"
            break
        for x, y in zip(ours, theirs, strict=True):
            if not same(x.values, y.values):
                yield f"{x.path} of batch {number}"
    for one, two in zip(a.steps, b.steps, strict=False):
        for what, mine, others in (("loss", one.losses, two.losses), ("learning rate", one.lrs, two.lrs)):
            for p, q in zip(mine, others, strict=False):
                if not close(p, q):
                    yield f"the {what} of step {one.number} ({p:.9g}, then {q:.9g})"
        largest = max((digest.norm for digest in one.gradients.values()), default=0.0)
        for name in one.gradients.keys() & two.gradients.keys():
            if not close(one.gradients[name].norm, two.gradients[name].norm, largest):
                yield f"the gradient of {name} at step {one.number}"
    if len(a.steps) != len(b.steps):
        yield f"{len(a.steps)} optimizer steps, then {len(b.steps)}"


def given(file: str | os.PathLike[str] | None, update: bool | Literal["new"], plan: Plan) -> BaselineFile | None:
    """The file, None for none. Raises ``UsageError`` for what can be no baseline, before any loop runs."""
    if update not in (True, False, "new"):
        raise UsageError(f'check_loop got update={update!r}; True, False or "new" is needed')
    if file is None:
        if update:
            raise UsageError("check_loop got update= without baseline=, the file to write")
        return None
    if not isinstance(file, (str, os.PathLike)):
        raise UsageError(f"check_loop got baseline={a(file)}; the path of a file is needed")
    path = Path(file)
    if not str(file) or path.is_dir():
        raise UsageError(f"check_loop got baseline={str(file)!r}, a folder; the path of a file is needed")
    chosen = CHECK in plan.checks and CHECK not in plan.skip
    if update and not chosen:
        raise UsageError(f"check_loop got update=, and only= or skip= leaves out the check {CHECK}, which records")
    made = BaselineFile(path=path, shown=str(file), mode="new" if update == "new" else "update" if update else "check")
    if chosen and made.is_there and not made.is_to_be_recorded:
        trajectory_of(made.read(), made.shown, made.repair)
    return made


def store(file: BaselineFile | None, results: Sequence[Result]) -> None:
    """Write what the check recorded, where it passed. Raises ``UsageError`` where the file cannot be written."""
    if file is None or file.text is None or not any(r.check == CHECK and r.outcome == "passed" for r in results):
        return
    try:
        write(file.path, file.text)
    except OSError as error:
        raise UsageError(f"the baseline {file.shown} cannot be written: {error.strerror or error}") from None
