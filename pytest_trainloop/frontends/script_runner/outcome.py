"""How the command ends: its exit status, and what it gives to others than its terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.report import Report
from pytest_trainloop.core.report.alerts import Alert
from pytest_trainloop.core.report.json import document, environment
from pytest_trainloop.core.report.lines import Line, Places
from pytest_trainloop.core.report.section import checked_nothing
from pytest_trainloop.views.outputs import github
from pytest_trainloop.views.outputs.written import Output, html_file, json_file, sarif_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_trainloop.core.report.section import Line as PageLine
    from pytest_trainloop.frontends.script_runner.options import Options

FAULT, NOTHING = 1, 2


def refuse(sentence: str) -> int:
    """Say why nothing is judged; the status for it."""
    sys.stderr.write(f"pytest_trainloop: {sentence}\n")
    sys.stderr.flush()
    return NOTHING


@dataclass(frozen=True, slots=True)
class Outcome:
    """Writes the results of one script where they were asked for: files, and the runner of GitHub Actions."""

    options: Options
    folder: Path
    """The one that the command was called in."""
    name: str
    """The script, as the report calls its loop."""
    script: Path

    def tell(self, report: Report, own_failure: str = "") -> list[PageLine]:
        """Write the files that were asked for; what the terminal is to say of them."""
        data = self._document(report, own_failure)
        lines = [line for output in self._outputs() if (line := output.write(data))]
        return [*lines, *self._tell_runner(data, own_failure, checked_nothing(report.entries))]

    def tell_nothing(self, own_failure: str, why: str) -> list[PageLine]:
        """For a script that did not train: notify the runner, and write its failure to the data."""
        data = self._document(Report(()), own_failure)
        lines = [json_file(self.folder / self.options.json).write(data)] if self.options.json and own_failure else []
        return [*filter(None, lines), *self._tell_runner(data, own_failure, why)]

    def _outputs(self) -> Iterator[Output]:
        options, folder = self.options, self.folder
        if options.json:
            yield json_file(folder / options.json)
        if options.sarif:
            yield sarif_file(folder / options.sarif, lambda: Places(folder))
        if options.report:
            yield html_file(folder / options.report, (folder,))

    def _document(self, report: Report, failure: str) -> dict[str, Any]:
        inside = self.script.is_relative_to(self.folder)
        file = self.script.relative_to(self.folder) if inside else self.script
        ran = environment(device="auto", seed=0)
        return document(
            report, ran, tests={entry.nodeid: (file.as_posix(), 1) for entry in report.entries}, failure=failure
        )

    def _tell_runner(self, data: dict[str, Any], own_failure: str, nothing: str) -> list[PageLine]:
        if not github.is_runner():
            return []
        places = Places(self.folder)
        found = github.alerts_of(data, places)
        if own_failure:
            summary = own_failure.partition("\n")[0]
            at = places.at(Line.of_traceback(own_failure)) or places.at(Line(str(self.script), 1))
            found.insert(0, Alert(level="error", summary=summary, text=own_failure, loops=(self.name,), at=at))
        return github.tell(data, found, nothing=nothing)
