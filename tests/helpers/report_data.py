"""The data of JSON reports, made up, for those who show it."""

from __future__ import annotations

from typing import Any

from pytest_trainloop.core.finding import Finding, Result, UserError
from pytest_trainloop.core.report import Report
from pytest_trainloop.core.report.entry import Entry
from pytest_trainloop.core.report.json import document, environment

TRAIN = """\
def train(model, optimizer, batches):
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
"""

TEST = """\
import pytest

@pytest.mark.trainloop
def test_gpt():
    ...
"""


def stale(**given: Any) -> Finding:
    """A fault with all that one can have."""
    fields: dict[str, Any] = {
        "check": "step_order",
        "cause": "not_zeroed",
        "summary": "2 weights are stepped with old gradients",
        "measured": "11 of 12 steps",
        "shown_by": "they are bit-identical",
        "culprits": ("0.weight", "0.bias"),
        "kinds": ("parameter", "parameter"),
        "where": "train.py:5   optimizer.step()",
        "change": "train.py:4   loss.backward()",
        "repair": "optimizer.zero_grad() before this line",
        "explains": ("overfit_one_batch",),
    }
    return Finding(**{**fields, **given})


def plain(check: str, cause: str, **given: Any) -> Finding:
    """A finding without a line."""
    return Finding(**{"check": check, "cause": cause, "summary": f"{cause} was found", **given})


def result(*findings: Finding, check: str = "", outcome: Any = "", **given: Any) -> Result:
    """The result of a check; failed where it has a fault."""
    bad = any(finding.level == "fault" for finding in findings)
    outcome = outcome or ("failed" if bad else "passed")
    return Result(check=check or findings[0].check, outcome=outcome, findings=findings, **given)


def raised(traceback: str = "", check: str = "finite") -> Result:
    error = UserError(stage="fit", summary="ValueError: no data", traceback=traceback)
    return Result(check=check, outcome="error", reason="fit raised ValueError: no data", error=error)


def report(loops: dict[str, list[Result]], at: str = "test_train.py:3") -> dict[str, Any]:
    """The data of a report on these loops, each of a test at this line."""
    entries = [
        Entry(loop=loop, nodeid=f"{loop}[{found.check}]", result=found) for loop, own in loops.items() for found in own
    ]
    file, _, line = at.partition(":")
    tests = {entry.nodeid: (file, int(line)) for entry in entries} if at else {}
    return document(Report(tuple(entries)), environment(device="cpu", seed=0), tests=tests)
