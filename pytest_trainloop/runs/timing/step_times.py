"""The time between two optimizer steps of the loop's own ``fit``.

It is what a training takes from one step to the next, with all that the project does between them: logging, the
transfer of a loss, the schedule. Only one hook of torch's optimizers is added, which reads the clock; what it does
itself (waiting for the device, copying the next batches) is taken off. Each ``fit`` is that of a fresh loop and counts
100 steps at most: a batch that is seen for longer is learned by heart, and then takes the time of weights and gradients
that no training has (subnormal numbers, NaN).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide, UserCodeError
from pytest_trainloop.core.finding import UserError
from pytest_trainloop.core.whose import project_may_raise
from pytest_trainloop.core.wording import count
from pytest_trainloop.runs.timing.tensor_memory import TensorMemory
from pytest_trainloop.runs.timing.unwatched import UnwatchedFit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

WARM_UP = 3
"""Rounds at the beginning of each ``fit`` that do not count: the first allocates the optimizer's state, and what is
compiled is compiled for the first shape, then once more for shapes that vary."""

MOST_ROUNDS = 100
"""Rounds of one ``fit`` that count, at most."""

FITS = 10
"""Times the seconds to be measured after which no further ``fit`` is begun: it may take long to build a loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How much is measured: at least ``rounds``, and ``seconds`` in all."""

    rounds: int = 5
    seconds: float = 1.0
    clock: Callable[[], float] = time.perf_counter
    collects_garbage: bool = True
    """Whether Python's collector runs meanwhile."""

    def met_with(self, rounds: int, seconds: float, more_rounds: int, more_seconds: float) -> bool:
        """Whether these and those are enough."""
        return self.met(rounds + more_rounds, seconds + more_seconds)

    def met(self, rounds: int, seconds: float) -> bool:
        return rounds >= self.rounds and seconds >= self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What was measured of a loop."""

    seconds: tuple[float, ...]
    """The time of each round: from one step to the next of the optimizer that steps least often."""
    batches: float
    """Batches that the loop takes in a round."""
    device: str
    peak_bytes: int | None
    """The most memory that was in use at once: on CUDA all that was allocated, on a CPU that of tensors; None where it
    could not be counted."""


class StepTimer:
    """Times the steps of one loop.

    Raises ``CannotDecide`` where there is nothing to time, ``UserCodeError`` where ``fit`` raises, and what a watched
    run raises.
    """

    def __init__(self, evidence: Evidence) -> None:
        if "fit" not in evidence.offers:
            raise CannotDecide("TrainLoop.fit is not given: there is no step of the project's own", needs="fit=")
        record = evidence.run()
        if record.raised is not None:
            raised = record.raised
            raise UserCodeError(UserError(stage="fit", summary=raised.summary, traceback=raised.traceback))
        if record.rounds < 2:
            made = f"{count(record.rounds, 'optimizer step')} in {count(record.items, 'batch')}"
            raise CannotDecide(f"fit makes {made}; what lies between two steps is timed")
        steps = [optimizer.steps for optimizer in record.optimizers if optimizer.steps > 1]
        self._batches = record.items / min(steps)
        most = max(math.ceil(self._batches * (WARM_UP + MOST_ROUNDS)) + 1, evidence.plan().count)
        self._fit = UnwatchedFit(evidence, most, warm_up=WARM_UP, most=MOST_ROUNDS, optimizers=len(steps))

    def once(self) -> None:
        """Run a few steps."""
        self._fit.run(time.perf_counter, lambda rounds, _seconds: rounds >= 1, ready=False)

    def measured(self, wanted: Wanted) -> StepTimes:
        """The times of as many rounds as are wanted, from as many calls of ``fit`` as they take."""
        times: list[float] = []
        until = time.monotonic() + FITS * wanted.seconds
        with _collector(on=wanted.collects_garbage), _cuda_memory() as allocated:
            while not wanted.met(len(times), sum(times)) and (len(times) < wanted.rounds or time.monotonic() < until):
                rounds, seconds = len(times), sum(times)
                found = self._fit.run(wanted.clock, functools.partial(wanted.met_with, rounds, seconds))
                if not found:
                    break
                times += found
        if not times:
            raise CannotDecide("no step could be timed: fit makes less than two where nothing watches it")
        peak = self._tensor_memory() if self._fit.device == "cpu" else allocated()
        return StepTimes(seconds=tuple(times), batches=self._batches, device=self._fit.device, peak_bytes=peak)

    def _tensor_memory(self) -> int | None:
        """The peak of a few rounds more; None where they do not run while operations are seen."""
        memory = TensorMemory()

        @contextlib.contextmanager
        def counted(loop: TrainLoop) -> Iterator[None]:
            memory.hold([[*members.parameters(m), *members.buffers(m)] for m in loop.modules.values()])
            with torch.compiler.set_stance("force_eager"), memory:
                yield

        with project_may_raise():  # it may not run while operations are seen
            self._fit.run(time.perf_counter, lambda rounds, _seconds: rounds >= 1, around=counted, ready=False)
            return memory.peak
        return None


@contextlib.contextmanager
def _collector(*, on: bool) -> Iterator[None]:
    """Collect before, and leave Python's collector out meanwhile where that is asked for."""
    before = gc.isenabled()
    gc.collect()
    if not on:
        gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def _cuda_memory() -> Iterator[Callable[[], int | None]]:
    """A function that gives the peak of the block, summed over devices; None without CUDA."""
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    yield lambda: sum(map(torch.cuda.max_memory_allocated, devices)) if devices else None
