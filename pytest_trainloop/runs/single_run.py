"""The evidence of one run that cannot be repeated: the interface of ``Evidence`` over the record of ``observe()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pytest_trainloop.core.errors import CannotDecide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record

T = TypeVar("T")


class SingleRun:
    """What ``observe()`` saw: ``record``, and the ``instruments`` that were open meanwhile, by kind."""

    repeatable = False
    offers = frozenset({"fit", "run"})

    def __init__(self, record: Record, instruments: Mapping[Callable[..., Any], Any] | None = None) -> None:
        self.knobs: Mapping[str, str] = {}
        self._record = record
        self._shared = dict(instruments or {})

    def declared(self, name: str) -> None:
        """Code that is only observed declares nothing."""

    def root_causes(self, check: str) -> Sequence[Finding]:
        return ()

    def run(self, **knobs: Any) -> Record:
        self._record.require_no_mistake()
        return self._record

    def shared(self, kind: Callable[[Any], T]) -> T:
        if kind not in self._shared:
            self._shared[kind] = kind(self)
        made: T = self._shared[kind]
        return made

    def release(self) -> None:
        """No run was made, and none follows."""

    def plan(self, **knobs: Any) -> NoReturn:
        _refuse()

    def rerun(self, plan: Any = None, /, **changes: Any) -> NoReturn:
        _refuse()

    def fresh_loop(self, *, other_seed: int = 0) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise CannotDecide("this takes further runs of the loop: return a TrainLoop from a marked test")
