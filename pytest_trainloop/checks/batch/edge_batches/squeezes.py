"""Which axes each ``squeeze`` of the project removes, and runs in which it removes others.

Without a dim it removes every axis of size 1, the row axis among them once a batch has one row; ``squeeze(0)`` does so
by name. A call is identified by its instruction and by how many calls came from there before.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here, layer
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_trainloop.recording.events import Place

Key = tuple[str, int, int]
"""The file and the instruction of a call, and how many calls came from there before it."""


@dataclass(frozen=True, slots=True)
class SqueezeCall:
    """One call of ``squeeze``."""

    shape: tuple[int, ...]
    """Of the input."""
    removed: frozenset[int]
    call: str
    """As the user writes it: ``squeeze(0)``."""
    place: Place

    @property
    def output_shape(self) -> tuple[int, ...]:
        return tuple(size for axis, size in enumerate(self.shape) if axis not in self.removed)


class Squeezes(WatchingMode):
    """``calls`` are those of one run. Those that ``instead`` holds remove the axes that they removed there."""

    def __init__(self, instead: Mapping[Key, SqueezeCall] | None = None) -> None:
        super().__init__()
        self._instead = instead or {}
        self._passed: Counter[tuple[str, int]] = Counter()
        self.calls: dict[Key, SqueezeCall] = {}

    def active(self) -> bool:
        """Inside steps and backward passes too: each call is counted, and does what it did in the other run."""
        return not self.watch.is_suspended

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in ("squeeze", "squeeze_"):
            return passed_on(func, args, kwargs)
        frame = sys._getframe(2)
        if not layer(frame.f_code.co_filename):
            return passed_on(func, args, kwargs)  # torch's own calls
        tensor = args[0] if args else kwargs["input"]
        at = frame.f_code.co_filename, frame.f_lasti
        key = (*at, self._passed[at])
        self._passed[at] += 1
        dims = _dims(args, kwargs)
        call = f"{name}({', '.join(map(str, dims))})" if dims else f"{name}()"
        with self.watch.suspended():
            place = here()[0]
        self.calls[key] = SqueezeCall(tuple(tensor.shape), _removed(tuple(tensor.shape), dims), call, place)
        other = self._instead.get(key)
        if other is None or len(other.shape) != tensor.dim():
            return passed_on(func, args, kwargs)
        kept = tuple(sorted(other.removed))
        return func(tensor, kept) if kept else tensor

    def removed_rows(self, others: Mapping[Key, SqueezeCall], rows: int) -> dict[Key, SqueezeCall]:
        """The calls that removed an axis which they keep in a run over ``rows`` rows, and which has there one entry or
        more for each row."""
        found = {}
        for key, mine in self.calls.items():
            theirs = others.get(key)
            if theirs is None or len(theirs.shape) != len(mine.shape):
                continue
            more = mine.removed - theirs.removed
            if more and theirs.removed <= mine.removed and all(theirs.shape[d] % rows == 0 for d in more):
                found[key] = mine
        return found


def _dims(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    given: Any = args[1:] if len(args) > 1 else kwargs.get("dim", ())
    if len(args) == 2 and isinstance(args[1], (tuple, list)):
        given = args[1]
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _removed(shape: tuple[int, ...], dims: tuple[int, ...]) -> frozenset[int]:
    named = {d % len(shape) for d in dims} if shape and all(isinstance(d, int) for d in dims) else set()
    return frozenset(d for d, size in enumerate(shape) if size == 1 and (not dims or d in named))
