"""The whole default battery on one loop: seconds and own steps, each time in a new process after torch's own imports.

``bare`` is the time of as many steps of the loop without the plugin, in the same process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
MOST_STEPS, MOST_TIMES, MOST_SECONDS = 400, 1.5, 3.0
EXAMPLE = Path(__file__).parents[1] / "examples" / "char_gpt"


def char_gpt() -> Callable[..., Any]:
    sys.path.insert(0, str(EXAMPLE))
    from test_char_gpt import test_gpt

    return test_gpt


def char_gpt_with_adapters() -> Callable[..., Any]:
    sys.path.insert(0, str(EXAMPLE))
    from test_char_gpt import test_gpt_with_adapters

    return test_gpt_with_adapters


def steps_of_2_ms() -> Callable[..., Any]:
    from loops import gpt

    from pytest_trainloop import TrainLoop

    def make() -> TrainLoop:
        loop = gpt(layers=1, width=32, context=16, rows=6)
        return TrainLoop(model=loop.model, optimizer=loop.optimizer, batch=loop.batch, fit=loop.fit)

    return make


LOOPS = {f.__name__: f for f in (char_gpt, char_gpt_with_adapters, steps_of_2_ms)}


def measure(name: str) -> dict[str, float]:
    """One battery in this process."""
    import torch

    from pytest_trainloop import check_loop

    torch.set_num_threads(1)
    make = LOOPS[name]()
    bare = _bare_step(make())  # loads what torch itself loads late
    began, used = time.perf_counter(), time.process_time()
    report = check_loop(make, raises=False)
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    steps = sum(result.steps for result in report.results)
    outcomes = {result.outcome for result in report.results}
    if not outcomes <= {"passed", "skipped"}:
        raise RuntimeError(f"{name}: {report}")
    return {"wall": wall, "cpu": cpu, "steps": steps, "bare_step": bare}


def _bare_step(loop: Any) -> float:
    """Processor seconds of a step that nobody watches: the median of runs of four."""
    batches = [loop.batch] * 4
    taken = []
    for _ in range(8):
        used = time.process_time()
        loop.fit(batches)
        taken.append((time.process_time() - used) / len(batches))
    return statistics.median(taken[1:])


def in_a_process(name: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, name], cwd=Path(__file__).parent, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", LOOPS)
def test_battery(benchmark: Any, figures: Callable[..., None], name: str) -> None:
    taken: list[dict[str, float]] = []
    benchmark.pedantic(lambda: taken.append(in_a_process(name)), rounds=ROUNDS)
    wall, cpu, steps, bare = (statistics.median(t[k] for t in taken) for k in ("wall", "cpu", "steps", "bare_step"))
    bound = f", {MOST_SECONDS:g} s" if name == "steps_of_2_ms" else ""
    figures(
        f"battery, {name}: {wall:.2f} s wall, {cpu:.2f} s processor, {steps:.0f} own steps of {1e3 * bare:.1f} ms:"
        f" {cpu / (steps * bare):.2f} x bare (bounds {MOST_STEPS} steps, {MOST_TIMES:g} x{bound})",
        wall=wall,
        cpu=cpu,
        steps=steps,
        bare_step_ms=1e3 * bare,
        times_bare=cpu / (steps * bare),
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1])))
