"""``--trainloop-benchmark``: an item for each loop that times its steps, through the fixture of pytest-benchmark.

``fit`` cannot be called a step at a time. It runs as a whole, a clock is read after each of its steps, and the fixture
is given the times one by one, through its own ``pedantic`` and a timer that moves on by what was measured. Whatever
reads its results (the table, ``--benchmark-save``, ``--benchmark-compare-fail``, ``--benchmark-json``) finds what it
always finds.
"""

from __future__ import annotations

import contextlib
import pkgutil
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core.errors import CannotDecide, TimeRanOut, TrainLoopError
from pytest_trainloop.frontends.plugin.collect import HIDDEN
from pytest_trainloop.frontends.plugin.nodeids import STEP_TIME

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.judging.battery import Subject


class Replay:
    """The timer of the fixture: its ``now`` is moved on by ``advance``, which takes the place of a round."""

    __name__ = "step_clock"
    __module__ = "pytest_trainloop"

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prepare(item: pytest.Function) -> None:
    """Have pytest-benchmark take a timing item for a benchmark of its own, with a timer that replays."""
    if not any(mark.args == (STEP_TIME,) for mark in item.iter_markers(HIDDEN)):
        return
    item.fixturenames = [*item.fixturenames, "benchmark"]  # of this item: the checks of the loop share the list
    mark = item.get_closest_marker("benchmark")
    given = {} if mark is None else dict(mark.kwargs)
    item.stash[_CLOCK] = given.get("timer")
    item.stash[_REPLAY] = replay = Replay()
    item.add_marker(pytest.mark.benchmark(**{**given, "timer": replay}), append=False)


def not_measured(config: pytest.Config) -> str:
    """Why pytest-benchmark measures nothing in this session, in words; empty where it measures."""
    if config.getoption("benchmark_skip"):
        return ""  # its items are skipped, with the reason
    if config.getoption("benchmark_disable") and not config.getoption("benchmark_enable"):
        return "--benchmark-disable is given"
    if config.getoption("dist", "no") != "no":
        return "tests run at the same time under -n, which slows them down; run the benchmarks without it"
    return ""


_CLOCK = pytest.StashKey[Any]()
"""The timer of the project's own ``benchmark`` marker, or None."""

_REPLAY = pytest.StashKey[Replay]()


def take(item: pytest.Function, subject: Subject) -> None:
    """Time the loop and hand the rounds to the fixture; skip where there is nothing to time.

    Raises ``UsageError`` and ``UserCodeError`` as a check's runs do.
    """
    from pytest_trainloop.runs.timing.step_times import StepTimer, Wanted

    benchmark: Any = item.funcargs["benchmark"]
    try:
        timer = StepTimer(subject.evidence)
        if not benchmark.enabled:
            benchmark(timer.once)
            return
        found = timer.measured(
            Wanted(
                rounds=_option(item, "min_rounds"),
                seconds=float(_option(item, "max_time")),
                clock=_clock(item),
                collects_garbage=not _option(item, "disable_gc"),
            )
        )
    except (CannotDecide, TimeRanOut) as reason:
        pytest.skip(str(reason))
    benchmark.extra_info.update(_extra(found))
    left = iter(found.seconds)
    replay = item.stash[_REPLAY]

    def one_round() -> None:
        seconds = next(left, None)
        if seconds is None:
            timer.once()  # --benchmark-cprofile calls it once more, for a look inside
        else:
            replay.now += seconds

    benchmark.pedantic(one_round, rounds=len(found.seconds))


def fail(item: pytest.Function, text: str) -> None:
    """Fail the item, and have the fixture know it."""
    __tracebackhide__ = True
    benchmark: Any = item.funcargs["benchmark"]

    def target() -> None:
        raise TrainLoopError

    with contextlib.suppress(TrainLoopError):
        benchmark.pedantic(target)
    pytest.fail(text, pytrace=False)


def _option(item: pytest.Function, name: str) -> Any:
    """What the project's ``benchmark`` marker says, or the command line."""
    mark = item.get_closest_marker("benchmark")
    given = {} if mark is None else mark.kwargs
    return given.get(name, item.config.getoption(f"benchmark_{name}"))


def _clock(item: pytest.Function) -> Callable[[], float]:
    named = str(item.config.getoption("benchmark_timer"))
    clock: Callable[[], float] = item.stash[_CLOCK] or pkgutil.resolve_name(named)
    return clock


def _extra(found: Any) -> dict[str, Any]:
    import torch

    return {
        "batches_per_round": round(found.batches, 3),
        "device": found.device,
        "peak_memory_bytes": found.peak_bytes,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
