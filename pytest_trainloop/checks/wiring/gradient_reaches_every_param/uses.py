"""Where the result of a cut is used, and whether some backward pass is meant to stop at it.

A generator's fakes are detached for the discriminator, and must be. Where the generator's own loss is computed from the
same detached tensor, the repair goes to that line, not to the ``detach()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_trainloop.gradients.dependence import until_stepped
from pytest_trainloop.recording.events import Backward, Step
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.source import here
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.cut_candidates import Candidate

MOST_KEPT = 256
"""Results of the operation that are followed."""


class Wanted(NamedTuple):
    """A result that is used for two backward passes: ``other`` is rightly made without the history that ``wrong``
    lacks."""

    wrong: Place
    """The line that uses it for the parameters that get no gradient."""
    other: Place
    """The backward pass of the other use."""


class _Uses(WatchingMode):
    """The calls that take a result of the candidate, or a view of it: the position and the line of each."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__()
        self._candidate = candidate
        self._results: list[torch.Tensor] = []
        self.found: list[tuple[int, Place]] = []

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = list(tensors_in(args, kwargs))
        out = passed_on(func, args, kwargs)
        place, site = here()
        if (self._candidate.op, self._candidate.site) == (name, site):
            self._keep(out, ())
        elif taken := [t for t in given if any(t is r for r in self._results)]:
            forward = self.watch.thread.forward
            self.found.append((self.watch.tick(), place if forward is None else forward.place))
            self._keep(out, taken)
        return out

    def _keep(self, out: Any, views_of: Sequence[torch.Tensor]) -> None:
        """Follow results, and of later calls those that are views: they hold the same values."""
        for tensor in tensors_in(out):
            if not views_of or any(address(tensor) == address(v) for v in views_of):
                self._results = [*self._results[1 - MOST_KEPT :], tensor]


def wanted_elsewhere(evidence: Evidence, names: Sequence[str], cut: Candidate) -> Wanted | None:
    """The two uses of the cut's result, where one belongs to a backward pass before other optimizers' steps."""
    uses = _Uses(cut)
    record = evidence.rerun(enough=until_stepped(evidence, names), contexts=uses.contexts)
    passes, mine = record.of(Backward), _passes_of(record, names)
    used = [(place, next((b for b in passes if b.at > at), None)) for at, place in uses.found]
    wrong = next((place for place, b in used if b is not None and b.at in mine), None)
    other = next((b.place for _, b in used if b is not None and b.at not in mine and b.arrivals), None)
    return Wanted(wrong, other) if wrong is not None and other is not None else None


def _passes_of(record: Record, names: Sequence[str]) -> set[int]:
    """The positions of the backward passes before a step of the optimizers that hold the names, after all other steps;
    of a pass that torch refused the last one."""
    wanted = {p.index for p in record.parameters if p.name in set(names)}
    holders = {o.index for o in record.optimizers if wanted & set(o.parameters)}
    mine: set[int] = set()
    since: list[int] = []
    for event in record.events:
        if isinstance(event, Backward):
            since.append(event.at)
        elif isinstance(event, Step) and not event.nested:
            mine.update(since if event.optimizer in holders else ())
            since = []
    return mine | set(since)
