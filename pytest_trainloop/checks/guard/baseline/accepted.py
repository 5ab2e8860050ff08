"""What accepts a difference from the baseline, and what is told of one that is accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.guard.baseline.findings import COMMAND
from pytest_trainloop.checks.guard.baseline.judging import comparable, compare
from pytest_trainloop.errors import CannotDecide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.baselines.trajectory import Trajectory
    from pytest_trainloop.finding import Finding


def with_command(finding: Finding, repair: str, command: str) -> Finding:
    """The finding with the command that records this loop's baseline alone; ``repair`` is that of its cause."""
    return replace(finding, repair=(finding.repair or repair).replace(COMMAND, command))


def changes(old: Trajectory, new: Trajectory) -> tuple[str, ...]:
    """What the old baseline would have said of the loop as it is, a sentence a finding; no further run is made.

    On another environment, or made in another way, the two are not compared: how far rounding reaches there would take
    further runs.
    """
    if apart := list(_apart(old, new)):
        return tuple(apart)
    if comparable(old, new):
        return ()
    try:
        return tuple(dict.fromkeys(_as_change(finding.summary) for finding in compare(old, new)))
    except CannotDecide:
        return ()


def _as_change(summary: str) -> str:
    """The sentence once the baseline is the new one."""
    for then, now in (
        ("in the baseline it is", "it was"),
        ("; in the baseline", "; it was"),
        ("in the baseline", "before"),
    ):
        summary = summary.replace(then, now)
    return summary


def _apart(old: Trajectory, new: Trajectory) -> Iterator[str]:
    """How the two were made otherwise."""
    for what, then, now in (
        ("seed", old.made.seed, new.made.seed),
        ("batches of one pass", old.made.count, new.made.count),
        ("torch", old.environment.torch, new.environment.torch),
        ("device", old.environment.device, new.environment.device),
        ("threads", old.environment.threads, new.environment.threads),
        ("instructions of the CPU", old.environment.cpu, new.environment.cpu),
    ):
        if then != now:
            yield f"{what}: {now}, {then} before"
