"""The keys that a project gives in each group of its optimizers, before torch fills in the others."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer

from pytest_trainloop.core.errors import CannotDecide, TrainLoopError
from pytest_trainloop.recording.construction import maker
from pytest_trainloop.recording.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


class GivenGroups:
    """For one run, of each optimizer by its number."""

    def __init__(self, added: Callable[[Any], None] = lambda optimizer: None) -> None:
        self.keys: dict[int, list[frozenset[str]]] = {}
        """The keys of each group."""
        self.built: dict[int, str] = {}
        """The line that built the optimizer."""
        self._noted: dict[int, tuple[Any, list[frozenset[str]], str]] = {}
        self._added = added

    @classmethod
    def of(cls, evidence: Evidence) -> GivenGroups:
        """Those of a run of one step; none where the loop does not run so."""
        found = cls()
        if evidence.repeatable:
            with contextlib.suppress(TrainLoopError, CannotDecide):
                evidence.rerun(
                    around=found.watching,
                    contexts=lambda watch: (found.numbering(watch),),
                    enough=lambda r: r.rounds >= 1,
                    may_raise=True,
                )
        return found

    def group(self, optimizer: int, number: int) -> frozenset[str] | None:
        """The keys of one group; None where it was not seen to be added."""
        groups = self.keys.get(optimizer, [])
        return groups[number] if number < len(groups) else None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around building and ``fit``."""
        with Patches() as patches:
            patches.put(Optimizer, "add_param_group", self._noting)
            yield

    @contextlib.contextmanager
    def numbering(self, watch: Watch) -> Iterator[None]:
        """Around ``fit``."""
        try:
            yield
        finally:
            for index, optimizer in watch.optimizers.indexed():
                _, self.keys[index], self.built[index] = self._noted.get(id(optimizer), (None, [], ""))
            self._noted.clear()

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_param_group(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            group = args[0] if args else kwargs.get("param_group")
            given = frozenset(str(key) for key in group) if isinstance(group, dict) else frozenset()
            original(optimizer, *args, **kwargs)
            known = self._noted.setdefault(id(optimizer), (optimizer, [], str(maker(optimizer) or "")))
            known[1].append(given)
            self._added(optimizer)

        return add_param_group
