"""One ``fit`` of a fresh loop that nothing watches, but for one hook that reads the clock after each step."""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core import members
from pytest_trainloop.core.errors import UserCodeError
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.recording.mode_stack import modes_kept
from pytest_trainloop.runs.batch_stream import generators_kept
from pytest_trainloop.runs.build import build
from pytest_trainloop.runs.guard import Guard, let_go
from pytest_trainloop.runs.loader_workers import workers_ended
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.runs.run import fit_of
from pytest_trainloop.runs.timing.ready_batches import ReadyBatches
from pytest_trainloop.runs.user_traceback import user_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence


SELDOM = 32
"""One step of an optimizer for so many of another is none of each round: that of a phase of its own."""


BEYOND = 25
"""Steps after the end of the batches in which a loop may come back by itself; then one is made to raise."""

STEPS_TO_READY = 100
"""Steps for each batch after which it is made to as well, whatever has been timed."""


class StepClock:
    """Reads a clock after each step of each optimizer, and leaves out what was spent while it was stopped.

    ``optimizers`` are known to step again and again.
    """

    def __init__(
        self, clock: Callable[[], float], synchronize: Callable[[], None], *, warm_up: int, optimizers: int
    ) -> None:
        self._optimizers = optimizers
        self._clock = clock
        self._synchronize = synchronize
        self._warm_up = warm_up
        self._off = 0.0
        self.at: dict[int, list[float]] = {}
        """By optimizer."""

    def read(self, optimizer: Any, meanwhile: Callable[[], None]) -> None:
        """Note a step; ``meanwhile`` is called while the clock is stopped."""
        self._synchronize()
        now = self._clock()
        self.at.setdefault(id(optimizer), []).append(now - self._off)
        meanwhile()
        self._synchronize()
        self._off += self._clock() - now

    def stopped(self, work: Callable[[], Any]) -> Any:
        """The result of ``work``, whose time does not count."""
        began = self._clock()
        try:
            return work()
        finally:
            self._off += self._clock() - began

    @property
    def steps(self) -> int:
        return sum(map(len, self.at.values()))

    @property
    def rounds(self) -> list[float]:
        """The moments of the optimizer that steps least often, of those that step again and again: between two of them
        every one has stepped."""
        most = max(map(len, self.at.values()), default=0)
        again = [at for at in self.at.values() if len(at) >= max(2, most / SELDOM)]
        return min(again, key=len) if len(again) >= self._optimizers else []

    @property
    def spent(self) -> tuple[int, float]:
        """The number of rounds after the warm-up, and their seconds in all."""
        at = self.rounds
        return (len(at) - 1 - self._warm_up, at[-1] - at[self._warm_up]) if len(at) > self._warm_up + 1 else (0, 0.0)

    @property
    def times(self) -> list[float]:
        """The time of each round after the warm-up, which is shorter where there are few rounds."""
        at = self.rounds
        warm = min(self._warm_up, max(len(at) - 2, 0))
        return [after - before for before, after in zip(at[warm:], at[warm + 1 :], strict=False)]


class UnwatchedFit:
    """Calls ``fit`` of fresh loops on ``count`` batches, the first ``warm_up`` rounds of which do not count, and after
    ``most`` rounds more no batch follows. ``optimizers`` are known to step again and again."""

    def __init__(self, evidence: Evidence, count: int, *, warm_up: int, most: int, optimizers: int) -> None:
        self._optimizers = optimizers
        self._evidence = evidence
        self._count = count
        self._warm_up = warm_up
        self._most = most
        self.device = "cpu"
        """Where the weights of the last loop were."""

    def run(
        self,
        clock: Callable[[], float],
        enough: Callable[[int, float], bool],
        *,
        around: Callable[[TrainLoop], contextlib.AbstractContextManager[Any]] = lambda loop: contextlib.nullcontext(),
        ready: bool = True,
    ) -> list[float]:
        """The times of the rounds, until their number and seconds are ``enough``.

        ``around`` is entered for the time of ``fit``. The batches are ``ready`` before, or copied when they are asked
        for.

        Raises ``UserCodeError`` where ``fit`` raises before a round is over.
        """
        plan = self._evidence.plan()
        with workers_ended(), preserved(), modes_kept():
            warnings.simplefilter("ignore")  # they were shown in the watched run
            torch.set_grad_enabled(True)
            loop = build(self._evidence.make, plan.knobs, plan.seed)
            step_clock = StepClock(clock, self._synchronize(loop), warm_up=self._warm_up, optimizers=self._optimizers)
            with generators_kept(loop):
                return self._times(loop, step_clock, enough, lambda: around(loop), ready=ready)

    def _times(
        self,
        loop: TrainLoop,
        clock: StepClock,
        enough: Callable[[int, float], bool],
        around: Callable[[], contextlib.AbstractContextManager[Any]],
        *,
        ready: bool,
    ) -> list[float]:
        plan = self._evidence.plan()
        guard = Guard(plan.timeout)
        over, beyond = False, 0

        def meanwhile() -> None:
            nonlocal over, beyond
            rounds, seconds = clock.spent
            beyond += over
            over = rounds >= self._most or enough(rounds, seconds)
            if ready:
                batches.prepare()
            if beyond > BEYOND or clock.steps > STEPS_TO_READY * self._count or guard.out_of_time():
                guard.stop()

        batches = ReadyBatches(
            loop,
            self._count,
            distinct=plan.count,
            unprepared=clock.stopped,
            spent=lambda: over,
            stepped=lambda: bool(clock.at),
            stop=guard.stop,
            out_of_time=guard.out_of_time,
            read_ahead=plan.read_ahead,
        )
        fit = fit_of(loop)
        if ready:
            batches.prepare()
        seed_all(plan.seed)
        hook = after_steps(lambda optimizer, _args, _kwargs: clock.read(optimizer, meanwhile))
        try:
            with contextlib.closing(batches), around(), _untraced():
                error = guard.call(lambda: fit(batches), lambda: clock.steps, lambda: batches.at_end)
        finally:
            hook.remove()
        if error is not None:
            reraise_ours(error)
        if error is not None and not clock.times:
            raise UserCodeError(user_error(error, "fit"))
        let_go(error)  # after rounds that were timed: a schedule that is over, where a training would have ended
        return clock.times

    def _synchronize(self, loop: TrainLoop) -> Callable[[], None]:
        """What waits for the devices that the model is on."""
        devices = {p.device for module in loop.modules.values() for p in members.parameters(module)}
        others = sorted(str(device) for device in devices if device.type not in ("cpu", "meta"))
        self.device = ", ".join(others) or "cpu"
        return torch.accelerator.synchronize if others and torch.accelerator.is_available() else lambda: None


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Without the tracer of a measurement of coverage."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)
