"""Eight loops under ``-n 1`` and ``-n 2``: whole sessions, interleaved, the start of the workers and torch's import
included. Wall time: it says nothing where other work keeps the second core busy, which ``busy`` shows."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BOUND = 0.6
ROUNDS = 3
LOOPS = 8

TEST = """
from declared import project


@pytest.mark.parametrize("loop", range({loops}))
@pytest.mark.trainloop
def test_loop(loop):
    return project("5 ms")()
"""


def session(folder: Path, workers: int) -> float:
    """Wall seconds of one session."""
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV", "PYTHONDONT"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pytest", "--trainloop", "-q", "-p", "no:randomly", "-n", str(workers)],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


def test_two_workers(benchmark: Any, tmp_path: Path, figures: Callable[..., None]) -> None:
    (tmp_path / "test_loops.py").write_text(TEST.format(loops=LOOPS), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    taken: list[tuple[float, float]] = []
    benchmark.pedantic(lambda: taken.append((session(tmp_path, 1), session(tmp_path, 2))), rounds=ROUNDS)
    ratio = statistics.median(two / one for one, two in taken)
    one, two = (statistics.median(pair[i] for pair in taken) for i in (0, 1))
    busy = os.getloadavg()[0]
    figures(
        f"{LOOPS} loops, -n 2 against -n 1: {ratio:.2f} of the time, {two:.1f} s of {one:.1f} s (bound {BOUND:g});"
        f" load {busy:.1f} on {os.cpu_count()} cores",
        ratio=ratio,
        one=one,
        two=two,
    )
