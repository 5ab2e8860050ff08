"""The base of the modes that look at the torch calls of a watched run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.torch_internals import functorch_level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording.watch import Watch


class WatchingMode(FunctionMode):
    """Gets the torch calls of a run while it is ``active``; override ``call`` to look at them.

    It is inactive while torch is tracing, and inside the transforms of functorch, where tensors cannot be read.
    ``contexts`` is for a run's plan. Where a mode lives no longer than its watch, it may get that when it is made.
    """

    in_steps = False

    def __init__(self, watch: Watch | None = None) -> None:
        super().__init__()
        self._watch = watch

    @property
    def watch(self) -> Watch:
        """The watch of the run; raises ``RuntimeError`` before and after it."""
        if self._watch is None:
            raise RuntimeError(f"{type(self).__name__} is used outside of its run")
        return self._watch

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What a run is made in."""
        return (self.watching(watch), self)

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        """Around the run. Override it for hooks and for what is to be forgotten at the end."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @contextlib.contextmanager
    def on_while_full(self, watch: Watch) -> Iterator[None]:
        """In place of the mode itself, for one that looks at nothing at light density: it costs nothing there."""
        self.put_on()
        watch.at_light_density.append(self.take_off)
        try:
            yield
        finally:
            self.take_off()

    def active(self) -> bool:
        """Whether calls are looked at now: not while recording is suspended, nor inside an optimizer's step, nor inside
        a backward pass, where a checkpoint makes calls of the forward pass again."""
        watch = self.watch
        thread = watch.thread
        return not (thread.suspended or thread.stepping or watch.backward is not None)

    def looks(self) -> bool:
        """Whether ``call`` gets the calls that are made now."""
        return self._watch is not None and functorch_level() is None and self.active()

    def left(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives that this mode does not look at: another base of the class may."""
        return super().call(name, func, args, kwargs)
