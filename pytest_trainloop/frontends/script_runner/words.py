"""The results of a watched script in words for someone who has a script, and no test yet."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.core.report import Report
from pytest_trainloop.declare.script import WRITE_A_TEST

if TYPE_CHECKING:
    from collections.abc import Collection

    from pytest_trainloop.core.finding import Result

_OF_A_TEST = re.compile(r"return a TrainLoop (with .*? )?from a marked test")

BROKEN = "please report it"
"""Closes the reason of every check that could not judge for a mistake of its own."""


def in_words(report: Report) -> Report:
    """The report with reasons that name what the author of a script can do: write the test, which serves them all."""
    return Report(tuple(replace(entry, result=_in_words(entry.result)) for entry in report.entries))


def _in_words(result: Result) -> Result:
    if result.outcome != "skipped" or not result.applies:
        return result
    name, equals, value = result.needs.partition("=")
    if value:  # a knob, with its value
        return replace(result, needs="", reason=f"this takes a run with another {name}: {WRITE_A_TEST}")
    return replace(result, needs="" if equals else result.needs, reason=_OF_A_TEST.sub(WRITE_A_TEST, result.reason))


def needing_a_test(report: Report, left_out: Collection[str]) -> list[str]:
    """The checks that would decide in a test: not those that were left out, or that broke."""
    skipped = [r for r in report.results if r.outcome == "skipped" and r.applies and not r.needs]
    return [r.check for r in skipped if r.check not in left_out and BROKEN not in r.reason]
