"""Batch norms of an average whose statistics do not follow: those of its start stay while its weights move."""

from __future__ import annotations

import linecache
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.target_networks.causes import found
from pytest_trainloop.checks.wiring.target_networks.writes import Memory, WeightWrites, memory_of
from pytest_trainloop.instruments.tracing.arguments import bound_arguments
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.runs.run import fit_then_evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence

_COLLECTS = re.compile("update_bn|bn_update|reset_running_stats|recalibrat")
"""What collects the statistics of an average, as its code names it."""

LEAST_UPDATES = 3
"""Updates of an average before a pass of it is looked at: a copy may be made once."""


@dataclass(slots=True)
class Norm:
    """The statistics of one batch norm that trains: as they are, and before its first pass."""

    mean: torch.Tensor
    variance: torch.Tensor
    first: tuple[torch.Tensor, torch.Tensor]

    @property
    def moved(self) -> bool:
        return not (torch.equal(self.mean, self.first[0]) and torch.equal(self.variance, self.first[1]))


@dataclass(slots=True)
class Updates:
    """Updates of the weight of an average, and passes in evaluation mode of the batch norm that it belongs to."""

    source: Memory
    name: str
    place: Place
    count: int = 0
    stale: int = 0
    """Passes with the statistics of the start, which those of the source have left."""
    fresh: int = 0
    """Passes with others."""
    unset: bool = False
    """Whether these are 0 and 1, as a batch norm is made."""
    variances: tuple[float, float] = field(default=(0.0, 0.0))
    """In the mean: of the average, and of its source."""


class AverageStatistics(WeightWrites):
    """The watched run with an eye on batch norms, and the declared ``evaluate`` behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: dict[Memory, Updates] = {}
        self._norms: dict[Memory, Norm] = {}

    @classmethod
    def of(cls, evidence: Evidence) -> AverageStatistics:
        seen = cls()
        evidence.rerun(replace(evidence.plan(), fit=fit_then_evaluate), contexts=seen.contexts)
        return seen

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) == "batch_norm":
            with self.watch.suspended():
                given = bound_arguments(func, args, kwargs)
                self._normed(*(given.get(word) for word in ("weight", "running_mean", "running_var", "training")))
        return super().call(name, func, args, kwargs)

    def _normed(self, weight: Any, mean: Any, variance: Any, training: Any) -> None:
        memory = memory_of(weight) if isinstance(weight, torch.Tensor) else None
        if memory is None or not isinstance(mean, torch.Tensor) or not isinstance(variance, torch.Tensor):
            return
        if training:
            self._norms.setdefault(memory, Norm(mean, variance, (mean.clone(), variance.clone())))
            return
        updates = self.updates.get(memory)
        source = None if updates is None else self._norms.get(updates.source)
        if updates is None or source is None or updates.count < LEAST_UPDATES or not source.moved:
            return
        if not (torch.equal(mean, source.first[0]) and torch.equal(variance, source.first[1])):
            updates.fresh += 1
            return
        updates.stale += 1
        updates.unset = not bool(mean.any()) and bool((variance == 1).all())
        updates.variances = (float(variance.double().mean()), float(source.variance.double().mean()))

    def averaged(self, memory: Memory, source: Memory, place: Place) -> None:
        known = self.updates.setdefault(memory, Updates(source, self.name(source), place))
        known.count += 1


def statistics_left_behind(evidence: Evidence) -> Iterator[Finding]:
    """Averages that are evaluated with the statistics of their start. It is a fault where these are the 0 and 1 that a
    batch norm is made with; those of a trained start may be near enough, and a file that names ``update_bn`` may call
    it behind the loop."""
    lines: dict[Place, list[Updates]] = defaultdict(list)
    for updates in evidence.shared(AverageStatistics.of).updates.values():
        if updates.stale and not updates.fresh:
            lines[updates.place].append(updates)
    for place, of_line in lines.items():
        unset = all(updates.unset for updates in of_line)
        names = tuple(dict.fromkeys(updates.name.rpartition(".")[0] or updates.name for updates in of_line))
        first = of_line[0]
        kept, now = first.variances
        facts = {"passes": first.stale, "updates": first.count, "kept": kept, "now": now, "several": len(names) > 1}
        later = _COLLECTS.search("".join(linecache.getlines(place.file)))
        level = "fault" if unset and later is None else "advice"
        yield found("statistics_left_behind", place, names, "" if unset else "of a start", level=level, **facts)
