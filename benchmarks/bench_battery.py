"""The whole default battery on the character GPT of the examples: seconds, and the loop's own optimizer steps.

The first battery of a process pays torch's own imports (the optimizer module loads the compiler); the second is the
figure.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop import check_loop

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "char_gpt"))


def test_battery_on_char_gpt(benchmark: Any, figures: Callable[..., None]) -> None:
    from test_char_gpt import test_gpt as make

    check_loop(make)
    batch = make().batch
    loop = make()
    began = time.process_time()
    loop.fit([batch] * 17)
    bare = time.process_time() - began
    began = time.process_time()
    report = benchmark.pedantic(check_loop, args=(make,), rounds=3)
    spent = (time.process_time() - began) / 3
    steps = sum(result.steps for result in report.results)
    figures(
        f"battery on char_gpt: {spent:.2f} s of processor time, {steps} own steps; 17 bare steps take {bare:.2f} s",
        seconds=spent,
        steps=steps,
    )
