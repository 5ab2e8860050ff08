"""An observed step against the bare step, full and light: ratio of medians over interleaved blocks.

Processor time is the figure to go by where other work shares the machine.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from loops import Calls, Loop, gpt

from pytest_trainloop.recording.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

BOUND = 1.05
BLOCKS = 15
STEPS = 12


def block(loop: Loop) -> list[tuple[float, float]]:
    """Wall and processor seconds of each step."""
    taken = []
    for _ in range(STEPS):
        began, used = time.perf_counter(), time.process_time()
        loop.step()
        taken.append((time.perf_counter() - began, time.process_time() - used))
    return taken


def bare(loop: Loop) -> list[tuple[float, float]]:
    loop.step()
    return block(loop)


def full(loop: Loop) -> list[tuple[float, float]]:
    with Watch({"": loop.model}, [loop.optimizer], full_rounds=2 * STEPS):
        loop.step()
        return block(loop)


def light(loop: Loop) -> list[tuple[float, float]]:
    with Watch({"": loop.model}, [loop.optimizer], full_rounds=1):
        loop.step()
        return block(loop)


SIDES = {"bare": bare, "full": full, "light": light}
SIZES = {
    "over_20_ms": {"layers": 2, "width": 128, "context": 64, "rows": 8},
    "about_2_ms": {"layers": 1, "width": 32, "context": 16, "rows": 6},
}


@pytest.mark.parametrize("size", SIZES)
def test_observed_step(benchmark: Any, figures: Callable[..., None], size: str) -> None:
    torch.set_num_threads(1)
    loop = gpt(**SIZES[size])
    loop.step()
    with Calls() as calls:
        loop.step()
    taken: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    order = list(SIDES)

    def one_round() -> None:
        order.append(order.pop(0))
        for side in order:
            gc.collect()
            taken[side].extend(SIDES[side](loop))

    benchmark.pedantic(one_round, rounds=BLOCKS, warmup_rounds=1)
    wall, cpu = ({side: statistics.median(t[i] for t in taken[side]) for side in SIDES} for i in (0, 1))
    for side in ("full", "light"):
        bound = f" (bound {BOUND:g})" if side == "light" and size == "over_20_ms" else ""
        figures(
            f"step, {side} density: {wall[side] / wall['bare']:.3f} x wall, {cpu[side] / cpu['bare']:.3f} x processor"
            f" over {1e3 * wall['bare']:.1f} ms with {calls.count} calls{bound}",
            **{f"{side}_wall": wall[side] / wall["bare"], f"{side}_cpu": cpu[side] / cpu["bare"]},
        )
