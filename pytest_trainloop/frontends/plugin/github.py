"""What the runner of GitHub Actions reads: annotations at the user's lines, and the summary of the job.

Under xdist the controller tells it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core.report.alerts import Alert
from pytest_trainloop.core.report.lines import Line as SourceLine
from pytest_trainloop.core.report.lines import Places
from pytest_trainloop.frontends.plugin.outcomes import entries_in
from pytest_trainloop.views.outputs import github
from pytest_trainloop.views.outputs.github import alerts_of

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from pytest_trainloop.core.report.section import Line

ANNOTATOR = "pytest_github_actions_annotate_failures"
"""The plugin that annotates every failed test, where it is installed."""


Refused = dict[str, tuple[str, SourceLine]]


def places_of(config: pytest.Config) -> Places:
    """The files of this session by the names that messages give them."""
    return Places(config.invocation_params.dir, config.rootpath)


def tell(
    config: pytest.Config, document: Mapping[str, Any], refused: Refused, more: Sequence[Alert], nothing: str
) -> list[Line]:
    """Write the commands and the summary; what could not be written, for the terminal.

    ``refused`` has the node id and line of the first marked function that was refused, by the sentence that says why;
    ``more`` is no failure of a test.
    """
    annotated = config.pluginmanager.hasplugin(ANNOTATOR)
    failures = [*_refusals(config, refused), *alerts_of(document, places_of(config))]
    return github.tell(document, failures, more, errors=not annotated, nothing=nothing)


def _refusals(config: pytest.Config, refused: Refused) -> list[Alert]:
    places = places_of(config)
    return [
        Alert(level="error", summary=text, text=text, loops=(nodeid,), at=places.definition(line))
        for text, (nodeid, line) in refused.items()
    ]


class AtTheLine:
    """Has the other plugin annotate our failures at the line to change; alone it would annotate the test."""

    def __init__(self, config: pytest.Config) -> None:
        self._places = places_of(config)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        line = self._line(report) if report.when == "call" and report.failed else None
        path = self._places.find(line) if line else None
        if line is None or path is None or not isinstance(report.longrepr, str):
            return (yield)
        text = report.longrepr
        report.longrepr = _Located((os.path.relpath(path), line.number, text))
        try:
            return (yield)
        finally:
            report.longrepr = text

    def _line(self, report: pytest.TestReport) -> SourceLine | None:
        for entry in entries_in(report):
            raised = entry.result.error
            named = [text for fault in entry.result.faults for text in (fault.change, fault.where)]
            lines = [SourceLine.read(text) for text in named]
            lines += [SourceLine.of_traceback(raised.traceback)] if raised else []
            if first := next(filter(None, lines), None):
                return first
        return None


class _Located(tuple[str, int, str]):
    """File, line and text of a failure, for readers who know such a tuple; for all others its text."""

    def __str__(self) -> str:
        return self[2]

    def toterminal(self, writer: Any) -> None:
        writer.line(self[2])
