"""Two threads that train at once: nothing that looks on ends the process, or raises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.two_threads import LOOKING

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("record", "observe") else pytest.mark.corpus)
        for name in ("observe", *LOOKING)
    ],
)
def test_two_threads_that_train_under_a_short_switch_interval(name):
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.helpers.two_threads", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
