"""A stand-in for the runner, the conftest of the plugin's own test sessions: no torch, no training.

The marked function returns what the checks shall say: a dict from check to ``Result``, or an exception to raise.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core import registry
from pytest_trainloop.core.finding import Finding, Result, UserError
from pytest_trainloop.core.registry import Cause, Check
from pytest_trainloop.judging import battery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PAGE = "{headline}.\n\nWhat it holds\n    Something that must be true.\n"


def _check(name: str, family: Any, headline: str, **causes: str) -> Check:
    return Check(
        name=name,
        decide=lambda evidence: [],
        family=family,
        rank=1,
        needs=frozenset(),
        causes={slug: Cause(proof) for slug, proof in causes.items()},
        page=PAGE.format(headline=headline),
        module="fake",
    )


CHECKS = {
    check.name: check
    for check in (
        _check(
            "step_order", "wiring", "Steps read fresh gradients", stale="a gradient is consumed twice", lost="none is"
        ),
        _check(
            "accumulation", "batch", "Splits give one gradient", not_divided="the loss is not divided by the number"
        ),
        _check(
            "overfit", "learning", "One batch can be learnt", stuck="the loss stays", unused="the input is not used"
        ),
    )
}


class Subject:
    evidence = None
    seconds_left = float("inf")

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *,
        settings: battery.Settings,
        knobs: Mapping[str, str] | None = None,
        judges: str = "loop",
        baseline: object = None,
    ) -> None:
        self.baseline = baseline
        self.name, self.make, self.log = name, make, os.environ["FAKE_LOG"]
        _log("subject", name, knobs, settings.seed, settings.timeout, settings.device)

    def bind(self, make: Callable[..., Any]) -> None:
        self.make = make

    def announce(self, checks: Mapping[str, Any]) -> None:
        self.announced = dict(checks)

    def drop(self, name: str) -> None:
        self.announced.pop(name, None)

    def run_check(self, name: str, *, options: Mapping[str, Any] | None = None, reporter: str = "") -> Result:
        said = self.make()
        _log("check", self.name, name, options, reporter, os.environ.get("PYTEST_XDIST_WORKER"))
        answer = said.get(name) if isinstance(said, dict) else said
        if isinstance(answer, BaseException):
            raise answer
        rates = ({"optimizer": "SGD", "groups": [{"lr": [0.1] * 12, "moved_by": []}]},)
        return answer or Result(check=name, outcome="passed", seconds=0.25, steps=4, learning_rates=rates)

    def __del__(self) -> None:
        _log("gone", self.name, file=self.log)


def _log(*what: Any, file: str = "") -> None:
    with Path(file or os.environ["FAKE_LOG"]).open("a", encoding="utf-8") as stream:
        print(*what, file=stream)


def fault(check: str, cause: str, summary: str = "it is wrong by 4.00", **fields: Any) -> Result:
    level = fields.pop("level", "fault")
    found = Finding(check=check, cause=cause, summary=summary, level=level, **fields)
    return failed(found) if level == "fault" else Result(check=check, outcome="passed", findings=(found,))


def failed(*findings: Finding) -> Result:
    return Result(check=findings[0].check, outcome="failed", findings=findings, seconds=0.25, steps=4)


def skipped(check: str, reason: str = "TrainLoop.fit is None", outcome: Any = "skipped") -> Result:
    return Result(check=check, outcome=outcome, reason=reason)


def raised(check: str) -> Result:
    error = UserError(
        stage="running fit", summary="ValueError: bad", traceback='  File "train.py", line 3\n    fit()\n'
    )
    return Result(check=check, outcome="error", reason="running fit raised ValueError: bad", error=error)


def stopped(check: str) -> Result:
    return Result(check=check, outcome="error", reason=f"{check} was stopped; please report it", mistake="OUR FRAMES")


battery.Subject = Subject  # type: ignore[assignment, misc]
registry.registered = lambda: CHECKS
