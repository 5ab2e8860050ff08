"""``--trainloop-bundle``: a folder for each root cause, with a script that runs its check on its loop again.

What only the process of the test knows (the record, the smallest batch) is written there, to a temporary folder that
its report names. The rest is written at the end of the session, when the root causes are known, by one process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core.report import files as whole_files
from pytest_trainloop.core.report.entry import by_loop, entries_of
from pytest_trainloop.core.report.section import Line
from pytest_trainloop.frontends.plugin.outcomes import causes
from pytest_trainloop.frontends.plugin.settings import read_settings
from pytest_trainloop.views.repro.folder import Session, failures, files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_trainloop.core.finding import Result
    from pytest_trainloop.frontends.plugin.collect import MarkedFunction
    from pytest_trainloop.judging.battery import Subject
    from pytest_trainloop.views.repro.folder import Failure

OPTION = "--trainloop-bundle"

PROPERTY = "trainloop-bundle"
"""The key in an item's user properties; the value is the temporary folder."""

BATCH = pytest.StashKey[Path]()
"""Of the configuration: the file with the batch that loops are judged on in place of their own."""

RECORD, SMALLEST, SHOWS = "record.txt", "batch.pt", "batch.shows"

_FILES = ("--trainloop-json", "--trainloop-sarif", "--trainloop-report", OPTION, "--junitxml", "--junit-xml", "--cov")
_DROPPED = (
    *_FILES,
    *("--trainloop-only", "--trainloop-card", "--trainloop-update", "--trainloop-benchmark", "--trainloop-isolate"),
    *("--trainloop-seed", "--trainloop-timeout", "--trainloop-device", "--hypothesis-seed", "--rootdir"),
    *("--config-file", "--inifile"),
    *("--lf", "--last-failed", "--ff", "--failed-first", "--nf", "--new-first", "--sw", "--stepwise", "--maxfail"),
    *("--exitfirst", "--pdb", "--trace", "--benchmark", "--dist", "--numprocesses", "--tx", "--durations", "--color"),
    *("--verbose", "--quiet", "--no-header", "--no-summary", "--tb", "--deselect", "--ignore", "--pyargs", "--capture"),
)
"""Long options that choose tests, shape or write what is reported, or that a script gives itself."""

_TAKE_A_WORD = ("-k", "-m", "-n", "-c", "-r")
"""Short ones, with a word of their own or behind them."""

_FLAGS = set("xvqslh")


def folder_of(config: pytest.Config) -> Path | None:
    """The folder that is asked for. Raises ``pytest.UsageError`` for what is none."""
    given = config.getoption("trainloop_bundle")
    if given is None:
        return None
    if not config.getoption("trainloop"):
        raise pytest.UsageError(f"{OPTION} keeps failures of loops that are run: it is needed with --trainloop")
    folder: Path = config.invocation_params.dir / given
    if not given or (folder.exists() and not folder.is_dir()):
        raise pytest.UsageError(f"{OPTION} is {given!r}, {'a file' if given else 'nothing'}; a folder is needed")
    if refusal := whole_files.refusal(folder / "reproduce.py"):
        raise pytest.UsageError(f"{OPTION} is {given!r}, {refusal}")
    return folder


def note(
    item: pytest.Function,
    result: Result,
    subject: Subject,
    marked: MarkedFunction,
    on_batch: Callable[[Path], Result],
) -> None:
    """Write what only this process knows of a failure; ``on_batch`` judges the loop on the batch in a file."""
    if item.config.getoption("trainloop_bundle") is None or result.outcome not in ("failed", "error"):
        return
    folder = Path(tempfile.mkdtemp(prefix="trainloop-bundle-"))
    item.user_properties.append((PROPERTY, str(folder)))
    if marked.judges == "loss":
        return
    from pytest_trainloop.core.errors import TrainLoopError
    from pytest_trainloop.views.repro.record_text import record_text
    from pytest_trainloop.views.repro.smallest import keep

    def causes_on(file: Path) -> list[str]:
        return [fault.cause for fault in on_batch(file).faults]

    with contextlib.suppress(TrainLoopError):
        record = getattr(subject.evidence, "watched", None)
        if record is not None:
            (folder / RECORD).write_text(record_text(record, item.config.rootpath), encoding="utf-8")
        composed = next((f for f in result.faults if f.composition is not None), None)
        if composed is None or composed.composition is None:
            return
        if keep(subject.evidence, composed.composition, folder / SMALLEST, causes_on, composed.cause):
            (folder / SHOWS).write_text(composed.cause, encoding="utf-8")


class Bundles:
    """Collects the temporary folders of a session and writes the bundles at its end."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._parts: dict[str, Path] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, folder in report.user_properties if report.when == "call" else ():
            if name == PROPERTY:
                self._parts[report.nodeid] = Path(str(folder))

    def write(self, document: Mapping[str, Any]) -> Line | None:
        """Write a folder for each root cause; what the terminal shall say of them."""
        found = [failure for _, entries in by_loop(entries_of(document)) for failure in failures(entries)]
        session = session_of(self._config)
        try:
            for failure in found:
                self._write(failure, session, document["environment"])
        except OSError as error:
            return Line(f"{OPTION} was not written: {error}", "loud")
        finally:
            for part in self._parts.values():
                shutil.rmtree(part, ignore_errors=True)
        if not found:
            return None
        first = os.path.relpath(self._folder / found[0].folder / "reproduce.py", self._config.invocation_params.dir)
        others = f", and {len(found) - 1} more there" if len(found) > 1 else ""
        return Line(f"to see a failure again: python {first}{others}")

    def _write(self, failure: Failure, session: Session, environment: Mapping[str, Any]) -> None:
        folder = self._folder / failure.folder
        part = self._parts.get(failure.entry.nodeid)
        batch = ""
        for name in (RECORD, SMALLEST):
            (folder / name).unlink(missing_ok=True)  # of an earlier session
            if part is not None and (part / name).is_file():
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(part / name, folder / name)
        if part is not None and (part / SHOWS).is_file():
            batch = SMALLEST if (part / SHOWS).read_text(encoding="utf-8") == failure.cause else ""
        proofs = causes(failure.entry.result.check)
        for name, text in files(failure, session, environment, proofs, batch=batch).items():
            whole_files.write(folder / name, text)


def session_of(config: pytest.Config) -> Session:
    """How this session was called."""
    root, called = config.rootpath, config.invocation_params.dir
    settings = read_settings(config)
    options = [
        *kept([str(word) for word in config.invocation_params.args], [str(arg) for arg in config.args]),
        f"--trainloop-seed={settings.seed}",
        f"--trainloop-timeout={settings.timeout:g}",
        f"--trainloop-device={settings.device}",
        *([f"--hypothesis-seed={settings.hypothesis_seed}"] if settings.hypothesis_seed else []),
    ]
    return Session(
        root=str(root),
        folder=Path(os.path.relpath(called, root)).as_posix(),
        ini="" if config.inipath is None else Path(os.path.relpath(config.inipath, root)).as_posix(),
        options=tuple(options),
    )


def kept(words: Sequence[str], tests: Sequence[str]) -> Iterator[str]:
    """The words of a command line that bear on what a test does: not those that name tests, choose among them, or say
    what is reported and written."""
    left = iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        if word in tests or word == "--trainloop":
            continue
        if word.startswith("--"):
            if name.startswith(_DROPPED):
                if not equals and name in _WITH_A_WORD:
                    next(left, None)
                continue
        elif word.startswith(_TAKE_A_WORD):
            if len(word) == 2:
                next(left, None)
            continue
        elif word.startswith("-") and set(word[1:]) <= _FLAGS:
            continue
        yield word


_WITH_A_WORD = {
    *(*_FILES, "--trainloop-only", "--trainloop-seed", "--trainloop-timeout", "--trainloop-device"),
    *("--hypothesis-seed", "--rootdir", "--config-file", "--maxfail", "--dist", "--numprocesses", "--tx"),
    *("--durations", "--color", "--tb", "--deselect", "--ignore", "--capture"),
} - {"--cov"}
"""Of the dropped options, those whose value may be the next word."""
