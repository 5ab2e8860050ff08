"""The closing section and the files of a session, from the reports of all items; under xdist in the controller only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core.report import Report
from pytest_trainloop.core.report.entry import by_loop
from pytest_trainloop.core.report.json import document, environment
from pytest_trainloop.core.report.lines import Line as SourceLine
from pytest_trainloop.core.report.section import Line, checked_nothing, half_looked_at, section
from pytest_trainloop.core.wording import some
from pytest_trainloop.frontends.plugin import expected, github
from pytest_trainloop.frontends.plugin.collect import REFUSED
from pytest_trainloop.frontends.plugin.inifile import paths_taken
from pytest_trainloop.frontends.plugin.outcomes import entries_in
from pytest_trainloop.frontends.plugin.pictures import Pictures
from pytest_trainloop.frontends.plugin.settings import is_strict
from pytest_trainloop.views.outputs.github import is_runner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.core.report.entry import Entry
    from pytest_trainloop.frontends.plugin.bundle import Bundles
    from pytest_trainloop.frontends.plugin.cards import Cards
    from pytest_trainloop.frontends.plugin.expected import Expected
    from pytest_trainloop.judging.battery import Settings
    from pytest_trainloop.views.outputs.written import Output

_COLOURS = {
    "plain": {},
    "good": {"green": True},
    "bad": {"red": True},
    "warn": {"yellow": True},
    "loud": {"red": True, "bold": True},
}


class Ledger:
    """Collects the results of a session and writes them out at its end."""

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        outputs: Sequence[Output | Bundles],
        expectations: Expected,
        cards: Cards | None = None,
    ) -> None:
        self._config = config
        self._settings = settings
        self._outputs = outputs
        self._expected = expectations
        self._gone: Mapping[str, str] = {}
        self._written: list[Line] = []
        self._cards = cards
        self._pictures = Pictures()
        self._entries: dict[str, list[Entry]] = {}
        self._tests: dict[str, tuple[str, int]] = {}
        self._refused: github.Refused = {}
        self._interrupted = False

    def pytest_report_header(self) -> str | None:
        if not self._config.getoption("trainloop"):
            return None
        s = self._settings
        times = f"at most {s.timeout:g} s a run of fit and {s.loop_seconds:g} s a loop"
        return f"trainloop: seed {s.seed}, device {s.device}, {times}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._cards is not None:
            self._cards.note(report)
            self._pictures.note(report)
        file, line, _ = report.location
        self._tests[report.nodeid] = (file.replace("\\", "/"), (line or 0) + 1)
        for name, sentence in report.user_properties:
            if name == REFUSED:
                self._refused.setdefault(str(sentence), (report.nodeid, SourceLine(*self._tests[report.nodeid])))
        if report.when == "call" or (report.when == "setup" and not report.passed):
            found = entries_in(report)
            if found:
                self._entries[report.nodeid] = found

    def _report(self) -> Report:
        from pytest_trainloop.core import registry

        entries = tuple(entry for found in self._entries.values() for entry in found)
        return Report(entries).in_causal_order(list(registry.registered()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        if self._config.getoption("collectonly"):
            return
        if self._cards is not None:
            self._cards.settle()
        self._notice_what_is_gone(session, exitstatus)
        if session.exitstatus == pytest.ExitCode.OK and self._config.getoption("trainloop"):
            nothing = checked_nothing(self._report().entries)
            if (nothing and self._cards is None) or (is_strict(self._config) and self._cut_short()):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        runner = self._config.getoption("trainloop") and is_runner()
        if not self._outputs and not runner:
            return
        data = self._document()
        self._written = [line for output in self._outputs if (line := output.write(data))]
        if runner:
            more = [expected.alert(self._config, entry, reason) for entry, reason in self._gone.items()]
            self._written += github.tell(self._config, data, self._refused, more, self._nothing(self._report()))
        if session.exitstatus == pytest.ExitCode.OK and any(line.style == "loud" for line in self._written):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR  # what was asked for is not there

    def _cut_short(self) -> list[str]:
        """The loops more than half of whose checks there was no time for."""
        loops = by_loop([entry for found in self._entries.values() for entry in found])
        return [loop for loop, entries in loops if not half_looked_at([entry.result for entry in entries])]

    def _notice_what_is_gone(self, session: pytest.Session, exitstatus: int) -> None:
        if self._refused:
            return
        results = [entry.result for found in self._entries.values() for entry in found]
        self._gone = self._expected.gone(session, exitstatus, results)
        if self._gone and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _document(self) -> dict[str, Any]:
        cards = None if self._cards is None else self._cards.to_json()
        ran = environment(device=self._settings.device, seed=self._settings.seed)
        return document(self._report(), ran, cards, self._pictures.to_json(), self._tests)

    def _nothing(self, report: Report) -> str:
        """Why the session checked nothing; empty where it did check something."""
        nothing = checked_nothing(report.entries)
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if not nothing or terminal is None:
            return nothing
        if self._interrupted and not terminal.stats.get("error"):
            return "the session was interrupted"
        if report.entries:
            return nothing
        if self._refused:
            return "every marked function was refused"
        if terminal.stats.get("error"):
            return "the session met errors before any check ran"
        return "the tests failed before any check ran" if terminal.stats.get("failed") else nothing

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for sentence in paths_taken(self._config):
            terminalreporter.write_line(f"trainloop: {sentence}", **_COLOURS["loud"])
        if not self._config.getoption("trainloop") or self._config.getoption("collectonly"):
            self._tell_of_files(terminalreporter)
            return
        report = self._report()
        terminalreporter.write_sep("=", "trainloop")
        verbose = self._config.get_verbosity() > 0
        for line in section(report.entries, name_all=verbose, fold=not verbose):
            terminalreporter.write_line(line.text, **_COLOURS[line.style])
        if nothing := self._nothing(report):
            terminalreporter.write_line(f"trainloop: NOTHING WAS CHECKED: {nothing}", **_COLOURS["loud"])
        if cut := self._cut_short():
            fails = ", which fails (--trainloop-strict)" if is_strict(self._config) else ""
            sentence = f"there was no time for more than half of the checks of {some(cut, most=3)}{fails}"
            terminalreporter.write_line(f"trainloop: {sentence}", **_COLOURS["loud"])
        for entry, reason in self._gone.items():
            terminalreporter.write_line(f"trainloop: {expected.sentence(entry, reason)}", **_COLOURS["loud"])
        for loop, lines in self._cards.shown() if self._cards is not None else ():
            terminalreporter.write_sep("-", f"card of {loop}")
            for text in lines:
                terminalreporter.write_line(text)
        self._tell_of_files(terminalreporter)

    def _tell_of_files(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.getoption("trainloop_benchmark") and not self._config.getoption("collectonly"):
            from pytest_trainloop.frontends.plugin.benchmark import not_measured

            if why := not_measured(self._config):
                terminalreporter.write_line(f"trainloop: nothing was measured: {why}", **_COLOURS["warn"])
        for line in self._written:
            terminalreporter.write_line(f"trainloop: {line.text}", **_COLOURS[line.style])
