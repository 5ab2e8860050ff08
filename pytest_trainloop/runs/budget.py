"""The seconds that all checks of one loop may take together.

No verdict follows from it: a check whose further runs do not fit is not looked at, and says so. The watched run is no
part of it, since nothing can be said of a loop without it.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from pytest_trainloop.core.errors import OutOfBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEAST_SECONDS = 0.01
"""Seconds that a run is given at least: a timer of 0 never rings."""

SLOWED = 4
"""How many times as long as alone a loop may take on a machine that is busy with other work, before that counts."""


class Budget:
    """What is left of so many ``seconds``; the time inside ``counted()`` is spent, that of other loops is not.

    What other processes take of the machine is not spent either, as far as the processor time of this one tells: a
    quarter of the time by the clock counts in any case, since a loop may wait for a device, a disk or a process.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self._before = (0.0, 0.0)
        self._since: tuple[float, float] | None = None
        self._over: OutOfBudget | None = None
        self.needed: Callable[[], float] = lambda: math.inf
        """An estimate of the seconds that would do; infinite where there is none."""

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """The time in here is spent; once where it is entered twice."""
        if self._since is not None:
            yield
            return
        self._since = _now()
        try:
            yield
        finally:
            self._before, self._since = self._taken(), None

    def _taken(self) -> tuple[float, float]:
        """Seconds by the clock and of the processor, all threads together."""
        if self._since is None:
            return self._before
        wall, processor = (b + now - since for b, now, since in zip(self._before, _now(), self._since, strict=True))
        return wall, processor

    @property
    def spent(self) -> float:
        """Seconds spent so far."""
        wall, processor = self._taken()
        return min(wall, max(processor, wall / SLOWED))

    @property
    def left(self) -> float:
        """Seconds by the clock that one more run may take, where the machine stays as busy as it was."""
        spent = self.spent
        slowed = self._taken()[0] / spent if spent > 0 else 1.0
        return max((self.seconds - spent) * min(max(slowed, 1.0), SLOWED), LEAST_SECONDS)

    def over(self) -> OutOfBudget | None:
        """Why no further run is made, in the same words for every check; None where there is time left."""
        return self.ended() if self._over is not None or self.spent >= self.seconds else None

    def ended(self) -> OutOfBudget:
        """Why a run was stopped that had taken all the time there was left."""
        if self._over is None:
            self._over = OutOfBudget(self.seconds, self.needed())
        return OutOfBudget(self._over.seconds, self._over.needed)

    def require(self) -> None:
        """Raise ``OutOfBudget`` where no time is left."""
        if over := self.over():
            raise over


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
