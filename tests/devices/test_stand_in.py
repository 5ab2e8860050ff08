"""The same verdicts on a device that is not the CPU, and over two of them, as on the CPU.

A stand-in with CUDA's rule for tensors of several devices shows on any machine where a check mixes them. It has no
kernels, streams or memory of its own: `tests/cuda` is for a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices.loops import PLACES

pytestmark = [
    pytest.mark.integration,
    pytest.mark.processes,
    pytest.mark.skipif(not (shutil.which("g++") and shutil.which("ninja")), reason="g++ and ninja are needed"),
]

ROOT = Path(__file__).parents[2]

WITHOUT = ("precision_parity",)
"""What the stand-in cannot show: autocast casts nothing there."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand_in")
    script = [sys.executable, "-m", "tests.devices.stand_in", str(folder), str(folder / "verdicts.json")]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        script, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "verdicts.json").read_text())


@pytest.mark.parametrize("place", [place for place in PLACES if place != "cpu"])
def test_every_check_says_what_it_says_on_the_cpu(verdicts, place):
    differ = {
        (loop, check): (expected, there)
        for loop, said in verdicts["cpu"].items()
        for check, expected in said.items()
        if (there := verdicts[place][loop][check]) != expected and check not in WITHOUT
    }
    assert differ == {}


def test_faults_are_found_over_two_devices(verdicts):
    found = {
        name: {cause for _, causes, _ in said.values() for cause in causes} for name, said in verdicts["two"].items()
    }
    assert "probabilities_as_logits" in found["language_model double_softmax"]
