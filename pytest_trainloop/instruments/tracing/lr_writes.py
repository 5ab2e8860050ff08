"""The lines of the user's that write or read an option of an optimizer's group, in a further run."""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.ours import StandsIn
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.source import here, layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Access:
    """One line that writes or reads a key of a group."""

    optimizer: int
    group: int
    key: str
    place: Place


class LRWrites:
    """Who writes which key of which group, and who reads it: lines of the user's, while ``fit`` runs.

    The groups are dicts that note it, for the length of one further run. Those that ``load_state_dict`` puts in their
    place are plain again.
    """

    def __init__(self) -> None:
        self._notes: dict[tuple[str, int, str, Place], None] = {}
        self._groups: dict[int, dict[str, Any]] = {}
        self._indices: dict[int, tuple[int, int]] = {}
        self._running = False
        self.seen = False
        """Whether the run could be made."""

    @classmethod
    def of(cls, evidence: Evidence) -> LRWrites:
        found = cls()
        if evidence.repeatable:
            with contextlib.suppress(CannotDecide, UsageError, UserCodeError):
                evidence.rerun(around=found._groups_that_note, contexts=found._while_fit_runs)
                found.seen = True
        found._groups.clear()
        return found

    def writes(self, key: str = "lr", *, optimizer: int | None = None, group: int | None = None) -> list[Access]:
        """The lines that write a key, in order."""
        return self._of("write", key, optimizer, group)

    def reads(self, key: str) -> list[Access]:
        return self._of("read", key, None, None)

    def line(self, key: str = "lr", *, optimizer: int | None = None, group: int | None = None) -> str:
        """The first line that writes a key, as text; empty where none is known."""
        return next((str(a.place) for a in self.writes(key, optimizer=optimizer, group=group)), "")

    def _of(self, what: str, key: str, optimizer: int | None, group: int | None) -> list[Access]:
        found = [
            Access(*self._indices[number], name, place)
            for how, number, name, place in self._notes
            if how == what and name == key and number in self._indices
        ]
        return [a for a in found if optimizer in (None, a.optimizer) and group in (None, a.group)]

    @contextlib.contextmanager
    def _groups_that_note(self) -> Iterator[None]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def add_param_group(optimizer: Any, *args: Any, **kwargs: Any) -> None:
                original(optimizer, *args, **kwargs)
                group = optimizer.param_groups[-1]
                if type(group) is dict:
                    noting = optimizer.param_groups[-1] = _Noting(group)
                    noting.note = self._note
                    self._groups[id(noting)] = noting

            return add_param_group

        with patched(Optimizer, "add_param_group", around):
            yield

    def _while_fit_runs(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._running_in(watch),)

    @contextlib.contextmanager
    def _running_in(self, watch: Watch) -> Iterator[None]:
        self._running = True
        try:
            yield
        finally:
            self._running = False
            for index, optimizer in watch.optimizers.indexed():
                for number, group in enumerate(getattr(optimizer, "param_groups", None) or ()):
                    self._indices[id(group)] = (index, number)

    def _note(self, how: str, group: int, key: str) -> None:
        if self._running and _is_of_the_users():
            self._notes.setdefault((how, group, key, here()[0]))


class _Noting(dict[str, Any], StandsIn):
    """A group of an optimizer that tells who writes and who reads it."""

    note: Callable[[str, int, str], None] = staticmethod(lambda how, group, key: None)

    def __setitem__(self, key: str, value: Any) -> None:
        self.note("write", id(self), key)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key in dict(*args, **kwargs):
            self.note("write", id(self), key)
        super().update(*args, **kwargs)

    def __getitem__(self, key: str) -> Any:
        self.note("read", id(self), key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.note("read", id(self), key)
        return super().get(key, default)

    def __reduce__(self) -> Any:
        """A copy, or a pickle, is a plain dict."""
        return dict, (dict(self),)


def _is_of_the_users() -> bool:
    """Whether the nearest caller outside this package and torch's optimizers is a line of the user's or a library's:
    not torch's own scheduler, which has an event."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == LRScheduler.__module__ or name.startswith("torch.optim."):
            return False
        if layer(frame.f_code.co_filename):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
