"""``trainloop_xfail`` in the ini file: strict over a whole run, since it is about the project and not each loop.

What no loop shows any more is listed at the end, and the session fails. A run of a part of the tests says nothing: what
is expected may be in the rest.
"""

from __future__ import annotations

import glob
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core.report.alerts import Alert
from pytest_trainloop.core.report.lines import Line
from pytest_trainloop.declare.selection import gone
from pytest_trainloop.frontends.plugin.collect import HIDDEN
from pytest_trainloop.frontends.plugin.github import places_of
from pytest_trainloop.frontends.plugin.settings import read_selections

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_trainloop.core.finding import Result

_PARTIAL = "trainloop_partial"
"""The key in what a worker of xdist gives back."""


class Expected:
    """What the ini file expects, and whether all loops of the project are run; also in the workers of xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._partial = False

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._partial |= any(map(_is_ours, items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that fails or skips itself may hold the loop."""
        file = self._config.rootpath / report.nodeid.partition("::")[0]
        if not report.passed and file.is_file():
            self._partial |= "trainloop" in file.read_text(encoding="utf-8", errors="replace")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        given_back = getattr(session.config, "workeroutput", None)
        if given_back is not None:
            given_back[_PARTIAL] = self._partial

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        given_back = getattr(node, "workeroutput", None)
        self._partial |= given_back is None or given_back.get(_PARTIAL, True)  # a worker that crashed gives none

    def gone(self, session: pytest.Session, exitstatus: int, results: Sequence[Result]) -> Mapping[str, str]:
        """The entries that no loop shows any more, with their reasons; none where the run may have missed one."""
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        stopped = session.shouldstop or session.shouldfail
        if not ended or stopped or self._partial or not _asks_for_all(self._config):
            return {}
        return gone(read_selections(self._config)[0].xfail, results)


def sentence(entry: str, reason: str) -> str:
    return (
        f"xfail(strict): {entry} was found in no loop, but is listed as expected ({reason}); "
        "take it out of trainloop_xfail in the ini file"
    )


def alert(config: pytest.Config, entry: str, reason: str) -> Alert:
    """The same at the line of the ini file."""
    text = sentence(entry, reason)
    line = _line_of(config.inipath, entry)
    return Alert(
        level="error", name="trainloop_xfail", summary=text, text=text, loops=(), at=places_of(config).at(line)
    )


def _line_of(file: Path | None, entry: str) -> Line | None:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file is not None else []
    number = next((i for i, line in enumerate(lines, 1) if f"{entry}: " in line), 0)
    return Line(str(file), number, lines[number - 1].strip()) if number else None


def _is_ours(item: pytest.Item) -> bool:
    return item.get_closest_marker(HIDDEN) is not None or "trainloop" in getattr(item, "fixturenames", ())


def _asks_for_all(config: pytest.Config) -> bool:
    """Whether the command asks for all that ``testpaths`` names; without that, for the whole root directory."""
    if config.getoption("lf", False) or config.getoption("ignore", None) or config.getoption("ignore_glob", None):
        return False
    if any("::" in arg for arg in config.args):
        return False
    asked = [(config.invocation_params.dir / arg).resolve() for arg in config.args]
    patterns = [str(config.rootpath / path) for path in config.getini("testpaths")]
    named = [found for pattern in patterns for found in glob.glob(pattern)]  # noqa: PTH207  (as pytest reads them)
    wanted = [config.rootpath / path for path in named] or [config.rootpath]
    return all(any(path.resolve().is_relative_to(above) for above in asked) for path in wanted)
