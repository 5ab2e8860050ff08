"""Outcomes: the report of a result to pytest, and the result as data on the item."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core.errors import CheckFailed
from pytest_trainloop.core.finding import Result
from pytest_trainloop.core.report.entry import Entry
from pytest_trainloop.core.report.text import failure_text
from pytest_trainloop.declare.knobs import KNOBS, without_default
from pytest_trainloop.frontends.plugin.collect import marked_function
from pytest_trainloop.frontends.plugin.nodeids import NO_CHECKS, loop_of

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

PROPERTY = "trainloop"
"""The key in an item's user properties; the value is one JSON string, which JUnit XML and xdist take as it is."""

_RESULT = pytest.StashKey[Result]()


def settle(item: pytest.Function, result: Result) -> None:
    """End the item's call phase as the result asks."""
    __tracebackhide__ = True
    item.stash[_RESULT] = result
    if result.outcome in ("skipped", "unreliable"):
        pytest.skip(skip_reason(result))
    if result.outcome in ("failed", "error"):
        _raise_in(item.obj, result, CheckFailed(failure_text(result, causes(result.check)), [result]))


def _raise_in(function: Any, result: Result, error: CheckFailed) -> None:
    """Raise in a frame of the user's function, where ``--pdb`` opens then, with ``result`` at hand. The frames in which
    the fault was seen are gone: what was kept of them is text."""
    __tracebackhide__ = True
    user = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(user, "__code__", None)
    if code is None:
        raise error
    lines = "\n" * (code.co_firstlineno - 1) + "raise error"
    raising = compile(lines, code.co_filename, "exec", dont_inherit=True).replace(co_name=code.co_name)
    exec(raising, user.__globals__, {"result": result, "error": error})


def entries_in(report: pytest.TestReport) -> list[Entry]:
    """The results that a report carries."""
    return [Entry.from_json(json.loads(str(value))) for name, value in report.user_properties if name == PROPERTY]


def skip_reason(result: Result) -> str:
    return f"unreliable: {result.reason}" if result.outcome == "unreliable" else result.reason


def causes(check: str) -> Mapping[str, str]:
    from pytest_trainloop.core import registry

    known = registry.registered()
    return known[check].proofs if check in known else {}


def location(item: pytest.Item) -> tuple[str, int]:
    """Where a skip is reported: at the user's test, not here."""
    path, line, _ = item.location
    return path, (line or 0) + 1


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    found = marked_function(item)
    if found is None or found[0] in NO_CHECKS:
        if found is not None and isinstance(report.longrepr, tuple):
            report.longrepr = (*location(item), report.longrepr[2])
        return report
    if report.when == "setup" and not report.passed:
        result = _never_called(item, found[0], report, call)
    elif report.when == "call":
        result = _show(item, report, found[0], call)
    else:
        return report
    entry = Entry(loop=loop_of(item.nodeid, found[0]), nodeid=item.nodeid, result=result)
    kept = [pair for pair in item.user_properties if pair[0] != PROPERTY]  # a plugin may run an item again
    # JUnit XML reads the teardown report, whose properties come from the item; the other readers read this report.
    item.user_properties[:] = report.user_properties[:] = [*kept, (PROPERTY, json.dumps(entry.to_json()))]
    return report


def _show(item: pytest.Item, report: pytest.TestReport, check: str, call: pytest.CallInfo[None]) -> Result:
    result = item.stash.get(_RESULT, None)
    if result is None:
        if report.skipped and isinstance(report.longrepr, tuple):  # by the user's own function
            return Result(check=check, outcome="skipped", reason=report.longrepr[2].removeprefix("Skipped: "))
        reason = call.excinfo.exconly() if call.excinfo else "the check gave no result"
        return Result(check=check, outcome="error", reason=reason)
    del item.stash[_RESULT]
    if result.outcome == "xfailed" and report.passed:
        report.outcome, report.wasxfail = "skipped", result.reason
    elif result.outcome in ("skipped", "unreliable") and report.skipped and not hasattr(report, "wasxfail"):
        report.longrepr = (*location(item), f"Skipped: {skip_reason(result)}")
    elif result.outcome in ("failed", "error") and report.failed:
        report.longrepr = failure_text(result, causes(check))
        if result.mistake and item.config.get_verbosity() > 0:  # frames of this package tell a user nothing
            report.longrepr += f"\n\n{result.mistake}"
    elif hasattr(report, "wasxfail") and report.skipped:  # pytest's own xfail marker
        return result.with_outcome("xfailed", report.wasxfail)
    elif report.failed:  # pytest's own strict xfail marker on a check that passed
        return result.with_outcome("failed", report.longreprtext)
    return result


_FIRST_ERROR = pytest.StashKey[dict[str, tuple[str, str]]]()
"""The first item of each loop whose setup failed, and how: what a fixture raises there meets every check of it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    found = marked_function(item)
    errors = item.config.stash.get(_FIRST_ERROR, {})
    if found is not None and (loop := loop_of(item.nodeid, found[0])) in errors:
        first, reason = errors[loop]
        if first != item.nodeid:
            pytest.skip(f"{reason} (see {first})")


def _never_called(item: pytest.Item, check: str, report: pytest.TestReport, call: pytest.CallInfo[None]) -> Result:
    """A skip mark, or a fixture that skipped, failed or does not exist, before the function was called."""
    if isinstance(report.longrepr, tuple):
        return Result(check=check, outcome="skipped", reason=report.longrepr[2].removeprefix("Skipped: "))
    if hasattr(report, "wasxfail"):
        return Result(check=check, outcome="xfailed", reason=report.wasxfail)
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, pytest.FixtureLookupError) and error.argname in KNOBS and isinstance(item, pytest.Function):
        reason = str(without_default(item.function, error.argname))
        report.longrepr = reason
    elif isinstance(error, pytest.FixtureLookupError):
        reason = f"fixture {error.argname!r} not found"
    else:
        last = (report.longreprtext.strip() or "the setup failed").splitlines()[-1]
        reason = f"setup failed: {last}"
    item.config.stash.setdefault(_FIRST_ERROR, {}).setdefault(loop_of(item.nodeid, check), (item.nodeid, reason))
    return Result(check=check, outcome="error", reason=reason)
