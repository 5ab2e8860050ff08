"""The line of a module whose output differs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.baselines.trajectory import Trajectory
    from pytest_trainloop.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


def with_line(finding: Finding, now: Trajectory, evidence: Evidence) -> Finding:
    """The finding with the line to change: that of the loop which calls the model otherwise, the ``forward`` that calls
    a module which is given something else, or that of a module with others inside of it; else the line that makes the
    module."""
    if finding.cause != "output_differs" or "something writes to its weights" in finding.shown_by:
        return finding
    if finding.where:
        return replace(finding, change=finding.where, where="")
    from pytest_trainloop.checks.guard.baseline.reported import Reported
    from pytest_trainloop.tracing.made_at import MadeAt

    made = evidence.shared(MadeAt.of)
    path = finding.culprits[0]
    inside = any(call.path.startswith(f"{path}.") for step in now.own.steps[:1] for call in step.calls or ())
    if "already given something else" in finding.shown_by:
        line = made.forward([evidence.shared(Reported).inside or path.rpartition(".")[0] or path])
    else:
        line = made.forward([path]) if inside else made.module(path)
    return replace(finding, change=line)
