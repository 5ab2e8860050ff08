"""What the installed but unused plugin adds to the start of pytest, over an empty plugin: whole processes, interleaved.

Figures are in milliseconds: the median of the differences of neighbouring runs, in wall time and in processor time.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BOUND = 3.0
ROUNDS = 60

EMPTY = '''
"""An empty plugin. PYTEST_DONT_REWRITE"""

def pytest_configure(config): ...
'''
PLUGINS = {"empty": "empty_plugin", "trainloop": "pytest_trainloop.frontends.plugin"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "empty_plugin.py").write_text(EMPTY, encoding="utf-8")
    (tmp_path / "test_plain.py").write_text("def test_plain(): ...\n", encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return tmp_path


def run(project: Path, plugin: str) -> tuple[float, float]:
    """Wall and processor milliseconds of one session."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", plugin]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))},
        **{"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(project)},
    }
    used = _children()
    began = time.perf_counter()
    subprocess.run(command, cwd=project, env=environment, check=True, stdout=subprocess.DEVNULL)
    return 1e3 * (time.perf_counter() - began), 1e3 * (_children() - used)


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_start_of_pytest_with_the_unused_plugin(benchmark: Any, project: Path, figures: Callable[..., None]) -> None:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in PLUGINS}

    def one_round() -> None:
        names = list(PLUGINS) if len(taken["empty"]) % 2 else list(reversed(PLUGINS))
        for name in names:
            taken[name].append(run(project, PLUGINS[name]))

    for plugin in PLUGINS.values():  # bytecode is written in the first run
        run(project, plugin)
    benchmark.pedantic(one_round, rounds=ROUNDS)
    wall, cpu = (
        statistics.median(b[i] - a[i] for a, b in zip(taken["empty"], taken["trainloop"], strict=True)) for i in (0, 1)
    )
    base = statistics.median(a[0] for a in taken["empty"])
    figures(
        f"start-up: +{wall:.1f} ms wall, +{cpu:.1f} ms processor over {base:.0f} ms (bound {BOUND:g} ms)",
        added_wall_ms=wall,
        added_cpu_ms=cpu,
        empty_wall_ms=base,
    )
