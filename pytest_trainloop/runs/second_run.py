"""The watched run made a second time, with everything on that looks at each of its calls.

Every check that looks at all steps of the loop would make such a run of its own. The first of them that asks makes one
for all that are to come.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from pytest_trainloop.core.errors import OwnMistake

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


class Listener(Protocol):
    """Looks at a run and changes nothing in it."""

    @classmethod
    def listening(cls, evidence: Evidence, /) -> Listener:
        """One for the run that is to be made."""

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What the run is made in."""

    def take_batch(self, number: int, item: Any) -> None:
        """Called with each batch before ``fit`` gets it."""


L = TypeVar("L", bound=Listener)


class SecondRun:
    """To be asked for by ``evidence.shared(SecondRun)``."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._heard: dict[type[Listener], Listener] = {}
        self.record: Record | None = None
        """The record of the last such run."""

    def heard(self, kind: type[L]) -> L:
        """The listener of this kind, after the run. Raises as ``Evidence.rerun`` does."""
        if kind not in self._heard:
            asked = [cast("type[Listener]", pkgutil.resolve_name(name)) for name in self._evidence.listeners()]
            kinds = [other for other in asked if other not in self._heard and other is not kind]
            try:
                self._run([kind, *kinds])
            except OwnMistake:
                if not kinds:
                    raise
                self._run([kind])  # it may be another listener's
        return cast("L", self._heard[kind])

    def _run(self, kinds: Iterable[type[Listener]]) -> None:
        listeners = {kind: kind.listening(self._evidence) for kind in kinds}

        def contexts(watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
            return [context for listener in listeners.values() for context in listener.contexts(watch)]

        def take(number: int, item: Any) -> None:
            for listener in listeners.values():
                listener.take_batch(number, item)

        self.record = self._evidence.rerun(contexts=contexts, before_item=take)
        self._heard |= listeners
