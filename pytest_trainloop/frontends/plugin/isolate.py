"""``--trainloop-isolate``: the checks of each loop in a process of its own. One that dies is an error of one check.

The process is pytest on the items of one loop. It writes each report to a file when it is made, as pytest gives it to
other processes, so that the reports before a death are there.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.frontends.plugin import bundle, deaths
from pytest_trainloop.frontends.plugin.collect import marked_function
from pytest_trainloop.frontends.plugin.nodeids import loop_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LINES = 12
"""Of what a process wrote: the innermost frames where faulthandler wrote them, else the end."""


class Inside:
    """In the process of a loop: writes which items begin, and their reports."""

    def __init__(self, config: pytest.Config, file: str) -> None:
        self._config = config
        self._file = Path(file).open("wb")  # noqa: SIM115 - open until the process ends, however it ends

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def _write(self, thing: Any) -> None:
        pickle.dump(thing, self._file)
        self._file.flush()


class Isolated:
    """In the process of the session: starts a process for each loop, and tells its reports as those of the items."""

    def __init__(self, config: pytest.Config, variable: str) -> None:
        self._config = config
        self._variable = variable
        self._reports: dict[str, list[pytest.TestReport]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not _loop(item):
            return self._test(item, nextitem)
        if item.nodeid not in self._reports:
            self._run([other for other in item.session.items if _loop(other) == _loop(item)])
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports[item.nodeid]:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _test(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test as if no loop's item came behind it: none is set up here, nor ends what the test leaves to it."""
        if nextitem is None or not _loop(nextitem):
            return None
        items = item.session.items
        nextitem = next((other for other in items[items.index(nextitem) :] if not _loop(other)), None)
        done: bool | None = item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        return done

    def _run(self, items: Sequence[pytest.Item]) -> None:
        """Run the items of one loop, again without those that were reported where the process dies."""
        left, died = list(items), []
        while left:
            begun, code, output = self._process([item.nodeid for item in left])
            left = [item for item in left if item.nodeid not in self._reports]
            if not left:
                return
            first = next((item for item in left if item.nodeid == begun), left[0])
            died.append(first.nodeid)
            report = deaths.died(first.nodeid, first.location, code, begun=first.nodeid == begun)
            if output:
                report.sections.append(("output of the process", output))
            self._reports[first.nodeid] = [report]
            left.remove(first)
            if first.nodeid != begun or len(died) == deaths.AT_MOST:
                for item in left:
                    self._reports[item.nodeid] = [deaths.left_out(item.nodeid, item.location, died)]
                return

    def _process(self, nodeids: Sequence[str]) -> tuple[str, int, str]:
        """Take the reports of items from a process: the item that it began last, its exit code, and the end of what it
        wrote."""
        begun = ""
        with tempfile.TemporaryDirectory(prefix="trainloop-", ignore_cleanup_errors=True) as folder:
            file, output = Path(folder, "reports"), Path(folder, "output")
            with output.open("wb") as stream:
                code = subprocess.run(
                    [sys.executable, "-m", "pytest", *self._arguments(nodeids, folder)],
                    check=False,
                    cwd=self._config.invocation_params.dir,
                    env={**os.environ, self._variable: str(file)},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                ).returncode
            made: dict[str, list[pytest.TestReport]] = {}
            for thing in _read(file):
                if isinstance(thing, str):
                    begun = thing
                else:
                    report = self._config.hook.pytest_report_from_serializable(config=self._config, data=thing)
                    made.setdefault(report.nodeid, []).append(report)
                    if report.when == "teardown":
                        self._reports[report.nodeid] = made[report.nodeid]
            written = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        # Once an item has begun, pytest keeps what is written, and only faulthandler's frames come through.
        first = next((number for number, line in enumerate(written) if line.startswith("Current thread")), -LINES)
        return begun, code, "\n".join(written[first:][:LINES] if first >= 0 or not begun else [])

    def _arguments(self, nodeids: Sequence[str], folder: str) -> Iterator[str]:
        config = self._config
        yield from (str(config.rootpath / nodeid) for nodeid in nodeids)
        yield from (*bundle.session_of(config).options, "--trainloop", f"--rootdir={config.rootpath}")
        yield from (f"--trainloop-only={names}" for names in config.getoption("trainloop_only") or ())
        for name in ("card", "update", "update_new", "bundle", "report"):
            option, given = f"--trainloop-{name.replace('_', '-')}", config.getoption(f"trainloop_{name}")
            if given:
                yield option if given is True else f"{option}={given}"
        yield from () if config.inipath is None else ("-c", str(config.inipath))
        yield from ("-k", "", "-m", "", "-q", "--no-header", "--no-summary", "-o", f"cache_dir={folder}/cache")
        yield f"--basetemp={folder}/temporary"
        yield from ["-n0"] if hasattr(config.option, "dist") else []


def _loop(item: pytest.Item) -> str:
    """The loop of an item; empty for an ordinary test."""
    found = marked_function(item)
    return "" if found is None else loop_of(item.nodeid, found[0])


def _read(file: Path) -> Iterator[Any]:
    """What a process wrote, up to where it died."""
    if not file.exists():
        return
    with file.open("rb") as stream:
        while True:
            try:
                yield pickle.load(stream)
            except (EOFError, pickle.UnpicklingError):
                return
