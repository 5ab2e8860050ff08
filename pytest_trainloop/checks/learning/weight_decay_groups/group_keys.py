"""The keys that a project gives in each group of its optimizers, before torch fills in the others."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer

from pytest_trainloop.errors import CannotDecide, TrainLoopError
from pytest_trainloop.recording.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


class GroupKeys:
    """For one run; ``keys`` are those of each group, by optimizer and number."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, int], frozenset[str]] = {}
        self._noted: dict[int, tuple[Any, list[frozenset[str]]]] = {}

    @classmethod
    def of(cls, evidence: Evidence) -> GroupKeys:
        """Those of a run of one step; none where the loop does not run so."""
        found = cls()
        if evidence.repeatable:
            with contextlib.suppress(TrainLoopError, CannotDecide):
                evidence.rerun(
                    around=found.watching, contexts=found.contexts, enough=lambda r: r.rounds >= 1, may_raise=True
                )
        return found

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with Patches() as patches:
            patches.put(Optimizer, "add_param_group", self._noting)
            yield

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._reading(watch),)

    @contextlib.contextmanager
    def _reading(self, watch: Watch) -> Iterator[None]:
        try:
            yield
        finally:
            for index, optimizer in watch.optimizers.indexed():
                _, groups = self._noted.get(id(optimizer), (None, []))
                self.keys.update({(index, number): keys for number, keys in enumerate(groups)})
            self._noted.clear()

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_param_group(optimizer: Any, param_group: Any, *args: Any, **kwargs: Any) -> Any:
            keys = frozenset(param_group) if isinstance(param_group, dict) else frozenset()
            self._noted.setdefault(id(optimizer), (optimizer, []))[1].append(keys)
            return original(optimizer, param_group, *args, **kwargs)

        return add_param_group
