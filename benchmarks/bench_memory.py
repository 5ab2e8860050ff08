"""Peak memory of an observed run against the bare run. Linux only. ``scripts/memory.py`` measures each check.

The observed run and the bare one have a process each. Their peak is the process's high-water mark (``VmHWM``), reset
once torch is imported and the model is built. ``growth`` is what lies above the resident memory at that moment;
``whole`` is the ratio of the high-water marks themselves.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

BOUND = 1.10
ROUNDS = 5
SIZES = {
    "gpt_of_11m": {"layers": 6, "width": 384, "context": 64, "rows": 4},
    "many_small_tensors": {"layers": 48, "width": 64, "context": 32, "rows": 4},
}
STEPS = {"bare": 12, "full": 12, "light": 36, "bare_long": 36}


def resident(name: str) -> float:
    """A line of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def measure(side: str, size: str) -> dict[str, float]:
    """One run in this process: the resident memory before, and the high-water mark of the steps."""
    import torch
    from loops import gpt

    from pytest_trainloop.recording.watch import Watch

    torch.set_num_threads(1)
    loop = gpt(**SIZES[size])
    before = resident("VmRSS")
    _reset_peak()  # the high-water mark
    if side.startswith("bare"):
        for _ in range(STEPS[side]):
            loop.step()
    else:
        with Watch({"": loop.model}, [loop.optimizer]):
            for _ in range(STEPS[side]):
                loop.step()
    return {"before": before, "peak": resident("VmHWM")}


def in_a_process(side: str, size: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, side, size], cwd=Path(__file__).parent, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory(benchmark: Any, figures: Callable[..., None], size: str) -> None:
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in STEPS}

    def one_round() -> None:
        for side in STEPS:
            taken[side].append(in_a_process(side, size))

    benchmark.pedantic(one_round, rounds=ROUNDS)
    peak = {side: statistics.median(run["peak"] for run in runs) for side, runs in taken.items()}
    growth = {side: statistics.median(run["peak"] - run["before"] for run in runs) for side, runs in taken.items()}
    for side, bare in (("full", "bare"), ("light", "bare_long")):
        figures(
            f"memory, {size}, {STEPS[side]} steps to the {side} density: {peak[side] / peak[bare]:.3f} x whole,"
            f" {growth[side] / growth[bare]:.3f} x growth over {growth[bare]:.0f} MiB (bound {BOUND:g})",
            **{f"{side}_whole": peak[side] / peak[bare], f"{side}_growth": growth[side] / growth[bare]},
        )


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(*sys.argv[1:])))
