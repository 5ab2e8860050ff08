"""The slow tests: those whose call took 0.4 s when they were last timed. ``tests/slow.txt`` lists them.

``pytest -n 2 -m "not corpus and not integration and not processes" --note-slow``, with nothing else running, times the
tests and rewrites the list.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "slow.txt"

SECONDS = 0.4


def listed() -> set[str]:
    """Node ids of the slow tests."""
    return set(FILE.read_text(encoding="utf-8").splitlines())


def mark(items: list[pytest.Item]) -> None:
    slow = listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


class NoteSlow:
    """Writes the list at the end of a session; tests that did not run stay as they were."""

    def __init__(self) -> None:
        self._slow = listed()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            (self._slow.add if report.duration >= SECONDS else self._slow.discard)(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        FILE.write_text("".join(f"{nodeid}\n" for nodeid in sorted(self._slow)), encoding="utf-8")
