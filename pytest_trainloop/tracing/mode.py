"""The base of the modes that look at the torch calls of a watched run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.function_mode import FunctionMode, called_by_sharding, is_aside
from pytest_trainloop.recording.torch_internals import functorch_level, is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording.watch import Watch


class WatchingMode(FunctionMode):
    """Gets the torch calls of a run while it is ``active``; override ``call`` to look at them.

    It stands aside while torch is tracing, and inside the transforms of functorch, where tensors cannot be read.
    ``contexts`` is for a run's plan. Where a mode lives no longer than its watch, it may get that when it is made.
    """

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

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_traced() or is_aside() or called_by_sharding():
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._watch is None or functorch_level() is not None or not self.active():
            return super().call(name, func, args, kwargs or {})
        return self.call(name, func, args, kwargs or {})
