"""Figures of the benchmarks: kept in pytest-benchmark's JSON as ``extra_info`` and printed at the end of the
session."""

from __future__ import annotations

import platform
import statistics
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def figures(request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., None]:
    """Keep figures by name, and one line of text on them for the end of the session."""

    def keep(line: str, **values: float) -> None:
        benchmark.extra_info.update({name: round(value, 4) for name, value in values.items()})
        request.config.stash.setdefault(_LINES, []).append(line)

    return keep


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section("figures")
        terminalreporter.line(f"python {platform.python_version()}, torch {torch.__version__}, 1 thread")
        for line in lines:
            terminalreporter.line(line)


def medians(samples: dict[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}
