"""The user's line at which a value changes while a function runs."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.reach.copies import same_bits
from pytest_trainloop.reach.slots import MISSING, Entries, Hooks
from pytest_trainloop.reach.walker import quiet, walk
from pytest_trainloop.recording.mistakes import unnoticed
from pytest_trainloop.recording.source import NOWHERE, layer, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType

    from pytest_trainloop.reach.copies import Copy
    from pytest_trainloop.reach.snapshot import Snapshot
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

MOST_LINES = 20_000
"""Lines after which it is given up: an evaluation over a whole data set."""

MOST_WALKS = 400
"""Lines at which the loop is walked for what was not there before."""

MOST_PATHS = 4
"""Paths that are looked at."""


class Probe:
    """Tells whether one of some leaves is no longer as it was in a snapshot of the same loop."""

    def __init__(self, paths: Collection[str], before: Snapshot, watch: Watch) -> None:
        chosen = list(paths)[:MOST_PATHS]
        self._loop = before.walked.loop
        self._watch = watch
        known = [before.copies[path] for path in chosen if path in before.copies]
        self._switches = [copy for copy in known if copy.place.kind == "switch"]
        self._known = [copy for copy in known if copy.place.kind != "switch"]
        self._appearing = {path for path in chosen if path not in before.copies}
        self._parameters = [
            before.object(path.removesuffix(".grad"))
            for path in self._appearing
            if path.endswith(".grad") and path.removesuffix(".grad") in before.places
        ]
        if self._parameters:
            self._appearing = set()
        self._walks = 0

    def changed(self) -> bool:
        if any(c.place.slot is not None and c.place.slot.get() != c.value for c in self._switches):  # quiet() sets one
            return True
        with self._watch.suspended(), quiet():
            if any(map(_is_other, self._known)) or any(p.grad is not None for p in self._parameters):
                return True
            if not self._appearing or self._walks >= MOST_WALKS:
                return False
            self._walks += 1
            return not self._appearing.isdisjoint(walk(self._loop).leaves)


def _is_other(known: Copy) -> bool:
    slot, was = known.place.slot, known.place.value
    above = known.place.within
    while above is not None:
        if not isinstance(above.slot, (Entries, Hooks, type(None))) and above.slot.get() is not above.value:
            return True
        above = above.within
    now = was if slot is None else slot.get()
    if isinstance(slot, (Entries, Hooks)):
        return len(now) != len(known.kept)
    if isinstance(now, torch.Tensor) and isinstance(known.value, torch.Tensor):
        return not same_bits(now, known.value)
    if now is MISSING or type(now) is not type(was):
        return True
    if hasattr(now, "tobytes") and hasattr(known.value, "tobytes"):
        return bool(now.tobytes() != known.value.tobytes())
    return now is not was and bool(now != was)


class ChangedAt:
    """Asks ``changed`` at each of the user's lines; ``place`` is the line after which it was True first."""

    def __init__(self, changed: Callable[[], bool]) -> None:
        self._changed = changed
        self._left = MOST_LINES
        self._last: dict[FrameType, int] = {}
        self._before: tuple[FrameType, int] | None = None
        self.place: Place = NOWHERE

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the call. A debugger, or a measurement of coverage, misses what runs in it."""
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)
            self._ask()
            self._last.clear()
            self._before = None

    @unnoticed
    def _on_call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if self._left <= 0 or self.place is not NOWHERE or layer(frame.f_code.co_filename) != 2:
            return None
        return self._on_line

    @unnoticed
    def _on_line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        self._left -= 1
        if self._left <= 0 or self.place is not NOWHERE:
            return None
        self._ask()
        if event == "return":
            self._last.pop(frame, None)
            back = frame.f_back
            while back is not None and back not in self._last:
                back = back.f_back
            self._before = None if back is None else (back, self._last[back])
        else:
            self._last[frame] = frame.f_lineno
            self._before = (frame, frame.f_lineno)
        return self._on_line

    def _ask(self) -> None:
        """Whether the line before this event changed it."""
        if self._before is None or self.place is not NOWHERE or not self._changed():
            return
        frame, line = self._before
        self.place = place_of(frame.f_code.co_filename, line)
