"""``--trainloop-update`` and ``--trainloop-update-new``: baselines are recorded in the items, and written at the end.

What an item recorded travels on its report to the process that writes: under xdist the controller. Files that belong to
no test are looked for where tests are collected.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.declare.baseline_file import BaselineFile, Done, Mode, write
from pytest_trainloop.frontends.plugin import stored
from pytest_trainloop.frontends.plugin.collect import RefusedItem, marked_function
from pytest_trainloop.frontends.plugin.nodeids import loop_of, of_check
from pytest_trainloop.frontends.plugin.settings import read_selections, read_settings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

CHECK = "baseline"
"""The check whose item records."""

_REPORTED = "trainloop_baseline"
"""The attribute of a test report that carries what was recorded, as text: a property would go to JUnit XML too."""

_STRAYS = "trainloop_strays"
"""The key in what a worker of xdist gives back."""

_RECORDED = pytest.StashKey[BaselineFile]()


def mode_of(config: pytest.Config) -> Mode:
    """What this session does with baselines."""
    if config.getoption("trainloop_update"):
        return "update"
    return "new" if config.getoption("trainloop_update_new") else "check"


def file_of(item: pytest.Item, loop: str) -> BaselineFile:
    """The file of a loop's baseline."""
    on_cuda = read_settings(item.config).device.startswith("cuda")
    path = stored.file_of(item, loop, stored.ON_CUDA if on_cuda else stored.BASELINE)
    return BaselineFile(
        path=path,
        shown=stored.shown(path, item.config.rootpath),
        mode=mode_of(item.config),
        command=f"pytest --trainloop --trainloop-only={CHECK} --trainloop-update {_argument(item)}",
        first="pytest --trainloop --trainloop-update-new",
        flag="--trainloop-update-new",
    )


def _argument(item: pytest.Item) -> str:
    """What chooses the item that records this baseline alone, as one would type it where pytest was called."""
    found, nodeid = marked_function(item), item.nodeid
    if found is not None:
        one_item = of_check(nodeid, found[0], CHECK)
        alone = loop_of(nodeid, found[0])
        nodeid = one_item if "[" in alone.partition("::")[2] else alone  # without parameters the function will do
    file = os.path.relpath(item.path, item.config.invocation_params.dir)
    return shlex.quote("::".join((Path(file).as_posix(), nodeid.partition("::")[2])))


def note(item: pytest.Item, file: BaselineFile | None) -> None:
    """Keep what the item recorded for its report."""
    if file is not None and file.text is not None:
        item.stash[_RECORDED] = file


class Collected:
    """Where items are made and run: puts what was recorded on reports, and looks for files without a test."""

    def __init__(self) -> None:
        self.strays: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        file = item.stash.get(_RECORDED, None)
        if report.when == "call" and report.passed and file is not None:
            setattr(report, _REPORTED, json.dumps({"file": file.shown, "text": file.text, "changes": file.changes}))
            del item.stash[_RECORDED]
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Before -k and its like take items away. A collection that met an error says nothing of what is not there."""
        if not config.getoption("lf", False) and not session.testsfailed and _is_chosen(config):
            self.strays = [stored.shown(file, config.rootpath) for file in _without_test(config, items)]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        given_back = getattr(session.config, "workeroutput", None)
        if given_back is not None:
            given_back[_STRAYS] = self.strays


def _is_chosen(config: pytest.Config) -> bool:
    """Whether the ini file and the command line leave the check among those that run."""
    chosen = [selection.only for selection in read_selections(config) if selection.only is not None]
    return all(any(fnmatchcase(CHECK, pattern) for pattern in only) for only in chosen)


def _without_test(config: pytest.Config, items: Iterable[pytest.Item]) -> list[Path]:
    """The stored files that belong to no test, in the folders of modules that were collected whole, and the folders of
    modules that are gone."""
    names: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        found = marked_function(item)
        names[item.path].add(stored.name_of(loop_of(item.nodeid, found[0]) if found else item.nodeid, item.name))
    parts = {(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args if "::" in arg}
    parts |= {item.path.resolve() for item in items if isinstance(item, RefusedItem)}
    strays = []
    for folder in sorted({stored.folder_of(module).parent for module in names}):
        for inside in sorted(folder.iterdir()) if folder.is_dir() else ():
            module = folder.parent / f"{inside.name}.py"
            whole = module in names and module.resolve() not in parts
            if inside.is_dir() and (whole or not module.exists()):
                strays += _unnamed(inside, names.get(module, set()))
    return strays


def _unnamed(folder: Path, names: set[str]) -> list[Path]:
    """The files of one folder that carry no name of these."""
    suffixes = (stored.CARD, stored.ON_CUDA, stored.BASELINE)
    found = []
    for file in sorted(folder.iterdir()):
        suffix = next((suffix for suffix in suffixes if file.name.endswith(suffix)), "")
        if suffix and not file.name.startswith(".") and file.name.removesuffix(suffix) not in names:
            found.append(file)
    return found


class Baselines:
    """The baselines of a session, in the process that writes them."""

    def __init__(self, config: pytest.Config, collected: Collected) -> None:
        self._root = config.rootpath
        self._mode = mode_of(config)
        self._texts: dict[str, str] = {}
        self._changes: dict[str, list[str]] = {}
        self._done: dict[str, Done] = {}
        self._failed: dict[str, str] = {}
        self._collected = collected
        self._strays: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        carried = getattr(report, _REPORTED, None)
        if carried is not None:
            recorded = json.loads(carried)
            self._texts[recorded["file"]] = recorded["text"]
            self._changes[recorded["file"]] = recorded["changes"]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        given_back = getattr(node, "workeroutput", None) or {}  # a worker that crashed has none
        self._strays.update(given_back.get(_STRAYS, ()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.getoption("collectonly"):
            return
        for file, text in sorted(self._texts.items()):
            try:
                self._done[file] = write(self._root / file, text)
            except OSError as error:
                self._failed[file] = error.strerror or str(error)
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if config.getoption("collectonly"):
            return
        lines = list(self._lines())
        if lines:
            terminalreporter.write_sep("-", "baselines")
        for text, colour in lines:
            terminalreporter.write_line(text, **colour)

    def _lines(self) -> Generator[tuple[str, dict[str, bool]]]:
        for file, done in self._done.items():
            changes = self._changes[file] if done == "updated" else []
            yield f"{done:<10} {file}{': ' if changes else ''}{''.join(changes[:1])}", {}
            for change in changes[1:]:
                yield f"{'':<10} {change}", {}
        for file, reason in self._failed.items():
            yield f"not written: {file}: {reason}", {"red": True, "bold": True}
        if self._mode == "update" and not self._texts:
            yield f"no baseline was recorded: the check {CHECK} of no selected loop passed", {"yellow": True}
        for file in sorted({*self._strays, *self._collected.strays}):
            yield f"belongs to no test: {file}; delete it, or rename it as its test", {"yellow": True}
