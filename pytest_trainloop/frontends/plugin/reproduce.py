"""What the script of a bundle does: find the project, run the one check in it, and say whether it fails as it did.

Exit codes: 1 while it fails, 0 once it passes, 2 where that could not be found out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_trainloop.frontends.plugin.bundle import BATCH
from pytest_trainloop.frontends.plugin.outcomes import entries_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Result


_USAGE = """\
usage: python reproduce.py [ROOT]

Runs {test} in the project and says whether {name} is there.
ROOT is the project's root directory; without it the project is looked for around this script, around the current
folder, and where it was. Exit codes: 1 it is there, 0 it is gone, 2 that could not be found out.
"""


class Seen:
    """Collects the results of one check, and why tests could not be collected."""

    def __init__(self, check: str, batch: Path | None) -> None:
        self._check = check
        self._batch = batch
        self.results: list[Result] = []
        self.refusal = ""
        self.skip = ""

    def pytest_configure(self, config: pytest.Config) -> None:
        if self._batch is not None:
            config.stash[BATCH] = self._batch

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.refusal:
            lines = [line.removeprefix("E").strip() for line in report.longreprtext.strip().splitlines()]
            self.refusal = f"{report.nodeid or 'the tests'} cannot be collected: {lines[-1] if lines else ''}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.results += [entry.result for entry in entries_in(report) if entry.result.check == self._check]
            if report.skipped and isinstance(report.longrepr, tuple):
                self.skip = report.longrepr[2].removeprefix("Skipped: ")


def main(
    script: str,
    *,
    test: str,
    check: str,
    cause: str,
    options: Sequence[str],
    root: str,
    folder: str,
    ini: str,
    batch: str,
) -> int:
    """Run the check again; the arguments are those of ``bundles.folder.files``. Returns the exit code."""
    given = sys.argv[1:]
    if len(given) > 1 or any(word.startswith("-") for word in given):
        asked = given in (["-h"], ["--help"])
        (sys.stdout if asked else sys.stderr).write(_USAGE.format(name=_name(check, cause), test=test))
        return 0 if asked else 2
    project = _project(Path(script).resolve().parent, test.partition("::")[0], root, given)
    if project is None:
        tried = f"in {given[0]}" if given else "around this folder, around the current one, or where it was"
        return _undecided(
            f"there is no {test.partition('::')[0]} {tried}; give the project's root directory: "
            "python reproduce.py ROOT"
        )
    called = project / folder if (project / folder).is_dir() else project
    os.chdir(called)
    sys.path[0] = str(called)  # as python -m pytest has it
    arguments = [f"{project / test}", f"--rootdir={project}", *options, "--trainloop", "-q", "--no-header", "-rN"]
    arguments += ["-c", str(project / ini)] if ini and (project / ini).is_file() else []
    arguments += ["-k", "", "-m", ""]
    arguments += ["-n0"] if importlib.util.find_spec("xdist") else []
    arguments += ["--color=yes"] if sys.stdout.isatty() else []
    on_own = Path(script).resolve().parent / batch if batch else None
    if on_own is not None and on_own.is_file():
        seen, text, _ = _run(arguments, check, on_own)
        if any(_is_it(result, cause) for result in seen.results):
            sys.stdout.write(f"{text}\n{_name(check, cause)} is there, on the batch in {batch}\n")
            return 1
    seen, text, refused = _run(arguments, check, None)
    if not seen.results:
        if refused.startswith("not found: "):
            refused = f"there is no {test} in {project} any more"
        return _undecided(seen.refusal or refused or seen.skip or f"{test} did not run {check}")
    return _judged(seen.results[-1], cause, text, Path(script).resolve().parent / "environment.json")


def _project(here: Path, file: str, root: str, given: Sequence[str]) -> Path | None:
    """The root directory of the project: the folder that has the test file."""
    around = (here, *here.parents, Path.cwd(), *Path.cwd().parents, Path(root))
    tried = [Path(given[0]).resolve()] if given else around
    return next((folder for folder in tried if (folder / file).is_file()), None)


def _run(arguments: Sequence[str], check: str, batch: Path | None) -> tuple[Seen, str, str]:
    """What was seen in a session of pytest, what it wrote, and its one sentence where it refused."""
    seen, written, refused = Seen(check, batch), io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as cache:
        own = ["-o", f"cache_dir={cache}"]  # what the project's next --lf runs is not changed
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(refused):
            pytest.main([*arguments, *own], plugins=[seen])
    lines = [line for line in refused.getvalue().splitlines() if line.strip() and not line.startswith(" ")]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    return seen, written.getvalue().rstrip(), errors[-1].removeprefix("E ").strip() if errors else ""


def _is_it(result: Result, cause: str) -> bool:
    if not cause:
        return result.outcome in ("failed", "error")
    return result.outcome == "failed" and any(fault.cause == cause for fault in result.faults)


def _judged(result: Result, cause: str, text: str, environment: Path) -> int:
    """Say what came of it, and give the exit code."""
    name = _name(result.check, cause)
    if _is_it(result, cause):
        sys.stdout.write(f"{text}\n{name} is there\n")
        return 1
    if result.outcome in ("failed", "error"):
        others = ", ".join(fault.cause for fault in result.faults) or result.reason
        sys.stdout.write(f"{text}\n{name} is gone, but {result.check} still fails: {others}\n")
        return 1
    if result.outcome == "xfailed":
        sys.stdout.write(f"{name} is there, and expected: {result.reason}\n")
        return 1
    if result.outcome == "passed":
        sys.stdout.write(f"{name} is gone: {result.check} passes{''.join(_differences(environment))}\n")
        return 0
    return _undecided(f"{result.check} was not decided: {result.reason}")


def _differences(environment: Path) -> Iterator[str]:
    """What is another here than where the check failed."""
    try:
        then = json.loads(environment.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    here = {"python": platform.python_version(), "torch": _version("torch"), "platform": platform.platform()}
    other = [f"{name} {then.get(name)}" for name, value in here.items() if then.get(name) != value]
    if other:
        yield f"; it failed under {', '.join(other)}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _name(check: str, cause: str) -> str:
    return f"{check}:{cause}" if cause else f"the failure of {check}"


def _undecided(sentence: str) -> int:
    sys.stderr.write(f"reproduce.py: {sentence}\n")
    return 2
