"""The losses of a run, one for each round of optimizer steps. Plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.recording.events import Backward, ScalerCall, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_trainloop.recording.events import Event
    from pytest_trainloop.recording.record import Record

PHASES = 4
"""Seeds that take turns: batch i is run under seed i modulo 4 (common random numbers)."""

SPAN = 12
"""Rounds of a mean: a multiple of the seeds and of any period up to four that a loop may alternate in."""


@dataclass(slots=True)
class Losses:
    """Reads a record that grows: ``read`` may be called as often as one likes.

    What is backpropagated for one step is one loss, the sum of its roots (micro-batches, several heads); of a closure
    that is called several times, the first. Scaled losses are divided by their scale, what is maximized is negated.
    """

    record: Record
    _next: int = 0
    _rounds: list[list[tuple[Backward, ScalerCall | None]]] = field(default_factory=list)
    _open: list[tuple[Backward, ScalerCall | None]] = field(default_factory=list)
    _scale: ScalerCall | None = None
    _step: Step | None = None
    _by_closure: bool = False

    def read(self) -> list[float]:
        """The losses of all rounds that are over."""
        events, kind = self.record.events, kind_of(self.record)
        for event in events[self._next :]:
            self._take(event, kind)
        self._next = len(events)
        sign = -1.0 if any(o.maximizes for o in self.record.optimizers if o.steps) else 1.0
        ended = [*self._rounds, self._open] if self._step is not None and self._open else self._rounds
        return [sign * _value(roots) for roots in ended]

    def _take(self, event: Event, kind: str) -> None:
        if isinstance(event, ScalerCall) and event.what == "scale" and event.enabled:
            self._scale = event
        elif isinstance(event, Step) and not event.nested:
            if self._step is not None and self._by_closure:
                self._close()
            self._step = event
        elif isinstance(event, Backward) and event.kind == kind and event.roots:
            if self._step is not None and event.at < self._step.until:
                self._by_closure = True
                if self._open:
                    return
            elif self._step is not None:
                self._close()
            self._open.append((event, self._scale))

    def _close(self) -> None:
        if self._open:
            self._rounds.append(self._open)
        self._open, self._step, self._by_closure = [], None, False


def kind_of(record: Record) -> Literal["backward", "grad"]:
    """Whether gradients are accumulated by backward, or all taken by ``torch.autograd.grad``."""
    return "backward" if record.backwards() else "grad"


def _value(roots: Sequence[tuple[Backward, ScalerCall | None]]) -> float:
    return sum(sum(root.value for root in b.roots) / (1.0 if scale is None else factor(scale)) for b, scale in roots)


def factor(scale: ScalerCall) -> float:
    """What a loss scaler multiplied by."""
    return scale.factor if math.isfinite(scale.factor) and scale.factor else 1.0


def halved(losses: Sequence[float]) -> bool:
    """Whether each of the last losses is at most half of the first one under the same seed, and that one positive."""
    if len(losses) < 2 * PHASES:
        return False
    last = range(len(losses) - PHASES, len(losses))
    return all(losses[i % PHASES] > 0 and losses[i] <= losses[i % PHASES] / 2 for i in last)


def mean(losses: Iterable[float]) -> float:
    known = list(losses)
    return sum(known) / len(known) if known else math.nan


def level(losses: Sequence[float], at: int | None = None) -> float:
    """The mean of the rounds up to this one (the last, when none is given)."""
    until = len(losses) if at is None else at
    return mean(losses[max(0, until - SPAN) : until])


def repeats(losses: Sequence[float]) -> bool:
    """Whether losses of a run in which no weight moves come again with their seed: to the rounding of float32, which
    kernels that sum in another order each time may show."""
    size = max((abs(v) for v in losses), default=0.0)
    return all(math.isfinite(v) for v in losses) and all(
        abs(losses[i] - losses[i - PHASES]) <= 1e-4 * size for i in range(PHASES, len(losses))
    )


def rising(lrs: Sequence[float]) -> bool:
    """Whether rates still go up in the second half of a run."""
    half = len(lrs) // 2
    return half > 0 and max(lrs[half:]) > 1.1 * max(lrs[:half])


def still_falls(losses: Sequence[float]) -> bool:
    """Whether the loss is below where it began, and the second half brought at least a fifth of what the first did."""
    half = len(losses) // 2
    start, middle, end = mean(losses[:PHASES]), level(losses, half), level(losses)
    return end < min(start, middle, losses[0]) and middle - end > 0.2 * (start - middle)
