"""A training script as a test: run once by ``python -m pytest_trainloop``, and its results by check."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.finding import Result
from pytest_trainloop.core.report.entry import entries_of
from pytest_trainloop.declare.script import WRITE_A_TEST

if TYPE_CHECKING:
    from pytest_trainloop.declare.script import Script

NEEDS_A_FUNCTION = "a script runs once; this check needs a function that takes batches"

_RUNNER = "GITHUB_ACTIONS"
"""Under this variable the command would tell the runner of its findings: the session that asks for them does."""


class ScriptRun:
    """The results of one script, which is run when the object is made.

    Raises ``UsageError`` where the script cannot be run or nothing trained in it.
    """

    def __init__(self, script: Script, seconds: float) -> None:
        self.failure = ""
        """How the script ended, where it failed by itself: a sentence, with its traceback below."""
        self.late = ""
        """Why nothing is known, where its time ran out."""
        self._reporter = ""
        self._results: dict[str, Result] = {}
        with tempfile.TemporaryDirectory() as folder:
            file, began = Path(folder, "results.json"), time.perf_counter()
            try:
                status, said = run(
                    ["pytest_trainloop", *script.command(f"--trainloop-json={file}")], script.cwd, seconds
                )
            except subprocess.TimeoutExpired:
                self.late = (
                    f"the script did not come to {script.steps} optimizer steps in {seconds:g} s: give Script(steps=) "
                    "fewer, or --trainloop-budget=SECONDS more"
                )
                return
            finally:
                self._seconds = time.perf_counter() - began
            document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if document:
            self._results = {e.result.check: _from_here(e.result, Path(script.cwd)) for e in entries_of(document)}
            self.failure = document.get("failure", "")
        elif status == 2:
            raise UsageError(said.strip().rpartition("pytest_trainloop: ")[2])
        else:
            end = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            self.failure = f"the script {end}\n\n{said.strip()[-2000:]}"

    def of(self, check: str, reporter: str) -> Result:
        """The result of one check. Where the script failed by itself, it is an error in the first check that found no
        fault; the others are skipped and name its ``reporter``."""
        found = self._of(check, reporter)
        seconds, self._seconds = self._seconds, 0.0  # the run counts once, for the first check that asks
        return replace(found, seconds=seconds)

    def _of(self, check: str, reporter: str) -> Result:
        if self.late:
            return Result(check=check, outcome="skipped", reason=self.late, looked_at=False)
        if self.failure and not (check in self._results and self._results[check].faults):
            first, self._reporter = not self._reporter, self._reporter or reporter
            if first:
                return Result(check=check, outcome="error", reason=self.failure)
            reason = f"{self.failure.splitlines()[0]} (see {self._reporter})"
            return Result(check=check, outcome="skipped", reason=reason)
        result = self._results.get(check) or Result(check=check, outcome="skipped", reason=f": {WRITE_A_TEST}")
        before, needed, _ = result.reason.partition(WRITE_A_TEST)
        if needed and before.endswith(": "):
            return replace(result, reason=NEEDS_A_FUNCTION)
        return replace(result, reason=result.reason.replace(WRITE_A_TEST, "return a TrainLoop in place of a Script"))


def _from_here(result: Result, folder: Path) -> Result:
    """The result with lines as they are seen from this working directory: the script was run in another folder."""
    findings = [
        replace(f, where=_line_from_here(f.where, folder), change=_line_from_here(f.change, folder))
        for f in result.findings
    ]
    return replace(result, findings=tuple(findings))


def _line_from_here(line: str, folder: Path) -> str:
    file, colon, rest = line.partition(":")
    path = (folder / file).resolve()
    inside = file and path.is_file() and path.is_relative_to(Path.cwd())
    return f"{path.relative_to(Path.cwd()).as_posix()}{colon}{rest}" if inside else line


def run(words: list[str], cwd: str | os.PathLike[str], seconds: float) -> tuple[int, str]:
    """The exit status of ``python -m`` with these words, and what it wrote to both streams. The processes that it
    starts end with it. Raises ``subprocess.TimeoutExpired``."""
    environment = {name: value for name, value in os.environ.items() if name != _RUNNER}
    running = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = running.communicate(timeout=seconds)
    except BaseException:  # the user's Ctrl-C does not reach a session of its own
        if hasattr(os, "killpg"):
            os.killpg(running.pid, signal.SIGKILL)
        running.kill()
        running.communicate()
        raise
    return running.returncode, said
