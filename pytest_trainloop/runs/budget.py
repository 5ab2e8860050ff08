"""The seconds that all checks of one loop may take together.

No verdict follows from it: a check whose further runs do not fit is not looked at, and says so. The watched run is no
part of it, since nothing can be said of a loop without it.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from pytest_trainloop.errors import OutOfBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEAST = 0.01
"""Seconds that a run is given at least: a timer of 0 never rings."""


class Budget:
    """What is left of so many ``seconds``; the time inside ``counted()`` is spent, that of other loops is not."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self._spent = 0.0
        self._since: float | None = None
        self._over: OutOfBudget | None = None
        self.needed: Callable[[], float] = lambda: math.inf
        """An estimate of the seconds that would do; infinite where there is none."""

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """The time in here is spent; once where it is entered twice."""
        if self._since is not None:
            yield
            return
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._spent, self._since = self.spent, None

    @property
    def spent(self) -> float:
        """Seconds spent so far."""
        return self._spent + (0.0 if self._since is None else time.perf_counter() - self._since)

    @property
    def left(self) -> float:
        """Seconds that one more run may take."""
        return max(self.seconds - self.spent, LEAST)

    def over(self) -> OutOfBudget | None:
        """Why no further run is made, in the same words for every check; None where there is time left."""
        if self._over is None and self.spent >= self.seconds:
            self._over = OutOfBudget(self.seconds, self.needed())
        return None if self._over is None else OutOfBudget(self._over.seconds, self._over.needed)

    def require(self) -> None:
        """Raise ``OutOfBudget`` where no time is left."""
        if over := self.over():
            raise over
