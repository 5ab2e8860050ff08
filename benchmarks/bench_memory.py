"""Peak memory of an observed run, and of the whole battery, against the bare run. Linux only.

The observed run and the bare one have a process each. Their peak is the process's high-water mark (``VmHWM``), reset
once torch is imported and the model is built. ``growth`` is what lies above the resident memory at that moment;
``whole`` is the ratio of the high-water marks themselves.

The battery of one size and two bare steps before it share a process, so that the ratio in a row is taken side by side:

    python benchmarks/bench_memory.py battery            # a table of all sizes
    python benchmarks/bench_memory.py battery 44M        # one size, with a line for each check
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
BATTERIES = {
    "0.03M": {"layers": 1, "width": 32, "context": 16, "rows": 4},
    "0.9M": {"layers": 4, "width": 128, "context": 32, "rows": 4},
    "11.5M": {"layers": 6, "width": 384, "context": 64, "rows": 4},
    "44M": {"layers": 6, "width": 768, "context": 8, "rows": 4},
    "100M": {"layers": 8, "width": 1024, "context": 8, "rows": 4},
}
"""Sizes of the battery's table by their number of parameters; from 44 million on short rows: weights count, not
activations."""

MOST_OF_A_BATTERY = 3.0
"""Times the bare peak, at 100 million parameters."""

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
    _begin_anew()  # the high-water mark
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


def battery(size: str) -> dict[str, Any]:
    """Two bare steps in this process, then each check of the battery: peaks in MiB, and seconds."""
    import time

    import torch
    from loops import gpt

    from pytest_trainloop import TrainLoop
    from pytest_trainloop.core.registry import of
    from pytest_trainloop.judging.battery import Settings, Subject

    torch.set_num_threads(1)

    def make() -> TrainLoop:
        loop = gpt(**BATTERIES[size])
        return TrainLoop(model=loop.model, optimizer=loop.optimizer, batch=loop.batch, fit=loop.fit)

    loop = make()
    count = sum(p.numel() for p in loop.model.parameters())
    _begin_anew()
    loop.fit([loop.batch] * 2)
    bare = resident("VmHWM")
    began = time.process_time()
    loop.fit([loop.batch] * 2)
    step = (time.process_time() - began) / 2
    del loop
    subject = Subject(size, make, settings=Settings(timeout=3600, budget=36_000))
    checks: dict[str, dict[str, Any]] = {}
    for name in of("loop"):
        _begin_anew()
        began = time.process_time()
        result = subject.run_check(name)
        seconds = time.process_time() - began
        checks[name] = {
            "outcome": result.outcome,
            "peak": resident("VmHWM"),
            "left": resident("VmRSS"),
            "seconds": seconds,
            "steps": result.steps,
        }
    return {"parameters": count, "bare": bare, "step": step, "checks": checks}


def _begin_anew() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def table(sizes: list[str]) -> None:
    """Print a row for each size, and for one alone the checks."""
    print("| parameters | bare peak | battery peak | ratio | check at the peak | seconds | own steps |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        found = in_a_process("battery-of", size)
        checks = found["checks"]
        most = max(checks, key=lambda name: checks[name]["peak"])
        peak, bare = checks[most]["peak"], found["bare"]
        seconds, steps = (sum(c[key] for c in checks.values()) for key in ("seconds", "steps"))
        cells = (
            f"{found['parameters'] / 1e6:.2f} M",
            f"{bare:,.0f} MiB",
            f"{peak:,.0f} MiB",
            f"{peak / bare:.2f}",
            f"`{most}`",
            f"{seconds:.0f}",
            f"{steps} of {1e3 * found['step']:.0f} ms",
        )
        print("| " + " | ".join(cells) + " |", flush=True)
        for name, check in checks.items() if len(sizes) == 1 else ():
            print(f"{name:34} {check['outcome']:8} {check['peak']:8,.0f} MiB, {check['left']:6,.0f} left", flush=True)


def main(side: str = "", *rest: str) -> None:
    if side == "battery":
        table(list(rest) or list(BATTERIES))
    elif side == "battery-of":
        sys.stdout.write(json.dumps(battery(*rest)))
    else:
        sys.stdout.write(json.dumps(measure(side, *rest)))


if __name__ == "__main__":
    main(*sys.argv[1:])
