"""What the command prints after the script's own output: what pytest would."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, TextIO

from pytest_trainloop.core.registry import registered
from pytest_trainloop.core.report.section import section
from pytest_trainloop.core.report.text import failure_texts
from pytest_trainloop.frontends.script_runner.words import BROKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.core.report import Report
    from pytest_trainloop.core.report.section import Line
    from pytest_trainloop.recording.watch import Watch

MOST_FILES = 12

_OPEN = ("  skipped  ", "  needs ")
"""The lines of checks that take further runs of the loop: one sentence closes the page for them all."""

_COLOURS = {"good": "32", "bad": "31", "warn": "33", "loud": "31;1"}


class Page:
    """Prints to where the standard output went when the command began: a script may redirect it."""

    def __init__(self, out: TextIO, name: str, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._out = out
        self._name = name
        self._coloured = out.isatty() and not os.environ.get("NO_COLOR")
        self.remarks: list[str] = []

    def steps(self, watch: Watch, *, stopped: bool, failed: bool) -> None:
        """The heading, and how much was seen."""
        self._rule("trainloop")
        steps, passes = watch.record.steps, watch.backward_passes
        seen = f"{steps} optimizer step{'s' * (steps != 1)}"
        if not steps:
            seen = f"{passes} backward pass{'es' * (passes != 1)} and no optimizer's step"
        how = (
            "then it was stopped (--steps=N for more)" if stopped else "then it failed" if failed else "to its own end"
        )
        self._say(f"{self._name}: {seen} watched, {how}")
        for remark in self.remarks:
            self._say(f"  {remark}")

    def failed(self, sentence: str) -> None:
        """The script's own failure."""
        self._say(f"{self._name}: {sentence}", "bad")

    def report(self, report: Report) -> None:
        """The failure texts, then the closing section."""
        bad = [r for r in report.results if r.outcome in ("failed", "error")]
        if bad:
            self._say("")
            self._say(failure_texts(bad, {r.check: registered()[r.check].proofs for r in bad}))
            self._say("")
        for line in section(report.entries, name_all=self._verbose):
            if self._verbose or BROKEN in line.text or not line.text.startswith(_OPEN):
                self._say(line.text, line.style)

    def files(self, written: Sequence[str]) -> None:
        """The files that the script wrote."""
        if written:
            more = len(written) - MOST_FILES
            shown = ", ".join(written[:MOST_FILES]) + (f" and {more} more" if more > 0 else "")
            self._say(f"  files the script wrote: {shown}")

    def wrote(self, file: str, data: str, *, runs_script: bool) -> None:
        """What ``--write-test`` made: the test, and where there is one the file of ``data`` that it reads."""
        read = f" and {data}, the data that it reads" if data else ""
        self._say(f"  wrote {file}{read}; run it by pytest --trainloop {file}", "good")
        if runs_script:
            self._say("  it runs the script once; its first lines say what a loop for all checks would take")

    def closing(self, count: int, *, written: bool) -> None:
        """What lets this number of skipped checks decide."""
        if count and not written:
            these = f"the {count} skipped checks run" if count > 1 else "the skipped check runs"
            self._say(
                f"  {these} a loop again, with one thing changed each time (-v names {'them' if count > 1 else 'it'}): "
                "--write-test=FILE writes the test that hands it over"
            )

    def written(self, lines: Sequence[Line]) -> None:
        """What is said of the files that the command wrote."""
        for line in lines:
            self._say(f"  {line.text}", line.style)
        self.flush()

    def flush(self) -> None:
        """Let what was said be seen."""
        self._out.flush()

    def _rule(self, title: str) -> None:
        width = shutil.get_terminal_size().columns
        self._say("\n" + f" {title} ".center(width, "="))

    def _say(self, text: str, style: str = "plain") -> None:
        colour = _COLOURS.get(style) if self._coloured else None
        self._out.write((f"\033[{colour}m{text}\033[0m" if colour else text) + "\n")
