"""Calls of the project's functions that evaluate while ``fit`` runs, found by what happens inside them."""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.as_caller import is_stand_in
from pytest_trainloop.recording.events import Backward, Forward, Step
from pytest_trainloop.recording.mistakes import unnoticed
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import CodeType, FrameType

    from pytest_trainloop.recording.events import Event
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch

    Key = tuple[CodeType, tuple[tuple[str, object], ...]]
    """A function with its arguments that are switches or names: one that trains and evaluates is two."""

_OTHERWISE_CALLED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class CallsInFit:
    """Notes what the record holds of each call; ``evaluations`` are those that only evaluate, each time."""

    def __init__(self) -> None:
        self._spans: dict[Key, list[tuple[int, int]]] = {}

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        events = watch.record.events
        began: list[tuple[Key, int]] = []

        def enter(frame: FrameType) -> None:
            began.append((key_of(frame), len(events)))

        def leave(_frame: FrameType) -> None:
            key, first = began.pop()
            if first < len(events) and watch.full:
                self._spans.setdefault(key, []).append((first, len(events)))

        return (profiled(watch, enter, leave),)

    def evaluations(self, record: Record) -> tuple[frozenset[Key], bool]:
        """Without gradients and in evaluation mode, of a model that trains elsewhere in the run. Where no function only
        evaluates, whether there are such forward passes."""
        trains = frozenset(i for f in record.root_forwards() if f.answered and f.training for i in f.below)
        found = set()
        for key, spans in self._spans.items():
            inside = [record.events[first:last] for first, last in spans]
            of_training = any(isinstance(e, Forward) and e.below & trains for events in inside for e in events)
            if of_training and not any(_trains(event) for events in inside for event in events):
                found.add(key)
        return frozenset(found), any(not _trains(f) and bool(f.below & trains) for f in record.root_forwards())


def key_of(frame: FrameType) -> Key:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = ((name, frame.f_locals.get(name)) for name in names)
    return code, tuple((name, value) for name, value in given if isinstance(value, (bool, str, type(None))))


@contextlib.contextmanager
def profiled(watch: Watch, enter: Callable[[FrameType], None], leave: Callable[[FrameType], None]) -> Iterator[None]:
    """Call ``enter`` and ``leave`` as a function of the project's begins and as it ends.

    A profiler that is at work (the user's) is left alone: then nothing is seen.
    """
    if sys.getprofile() is not None:
        yield
        return
    frames: list[FrameType] = []

    @unnoticed
    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            own = layer(code.co_filename) == 2 and not code.co_flags & _OTHERWISE_CALLED and not is_stand_in(code)
            if own and not watch.is_suspended:
                frames.append(frame)
                enter(frame)
        elif event == "return" and frames and frames[-1] is frame:
            frames.pop()
            leave(frame)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _trains(event: Event) -> bool:
    if isinstance(event, Forward):
        return event.grad_enabled or event.training or bool(event.answered)
    return isinstance(event, (Backward, Step))
