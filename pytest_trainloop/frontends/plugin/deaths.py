"""A process that died in a check: the reports of that check, and of those that are left out after it."""

from __future__ import annotations

import json
import shlex
import signal
from typing import TYPE_CHECKING

import pytest

from pytest_trainloop.core.finding import Result
from pytest_trainloop.core.report.entry import Entry
from pytest_trainloop.frontends.plugin.nodeids import NO_CHECKS, check_in, loop_of
from pytest_trainloop.frontends.plugin.outcomes import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Sequence

AT_MOST = 2
"""Deaths in one loop: where ``fit`` always dies, each further check would cost a process and tell nothing new."""


def died(
    nodeid: str, place: tuple[str, int | None, str], code: int | None, alone: str = "", *, begun: bool = True
) -> pytest.TestReport:
    """The report of an item whose process ended with this code; ``alone`` are options to run it in this process."""
    how = ""
    if code is not None:
        names = {int(number): number.name for number in signal.Signals}
        how = f" ({names.get(-code, f'signal {-code}') if code < 0 else f'exit code {code}'})"
    hint = ", which the system sends when memory runs out" if how == " (SIGKILL)" else ""
    what = "died in this check" if begun else "of this loop ended before this check"
    look = f"to look further, run it in one process: pytest --trainloop {alone}{shlex.quote(nodeid)}"
    result = Result(check=check_in(nodeid), outcome="error", reason=f"the process {what}{how}{hint}; {look}")
    return _report(nodeid, place, result)


def left_out(nodeid: str, place: tuple[str, int | None, str], deaths: Sequence[str]) -> pytest.TestReport:
    """The report of an item that is not run, since processes died in others of its loop."""
    checks = " and in ".join(check_in(death) for death in deaths)
    reason = f"not run: the process ended in {checks} (see {deaths[0]})"
    return _report(nodeid, place, Result(check=check_in(nodeid), outcome="skipped", reason=reason))


def _report(nodeid: str, place: tuple[str, int | None, str], result: Result) -> pytest.TestReport:
    path, line, _ = place
    skipped = result.outcome == "skipped"
    entry = Entry(loop=loop_of(nodeid, result.check), nodeid=nodeid, result=result)
    return pytest.TestReport(
        nodeid=nodeid,
        location=(path, line, nodeid.partition("::")[2]),
        keywords={},
        outcome="skipped" if skipped else "failed",
        longrepr=(path, (line or 0) + 1, f"Skipped: {result.reason}") if skipped else result.reason,
        when="call",
        user_properties=[] if result.check in NO_CHECKS else [(PROPERTY, json.dumps(entry.to_json()))],
    )
