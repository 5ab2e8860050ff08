"""The first loss that a loop backpropagates, before constant factors: the loss scale of a scaler, the number of
micro-batches that it is divided by, a weight.

Against a declared loss of zero no ratio can be taken. What such a loss is under one seed is chance: it is compared with
zero over ``SEEDS`` seeds, by the mean's distance in standard errors. With 7 degrees of freedom Student's t exceeds
``ERRORS`` once in 50,000 times. Where all seeds give the same, rounding is what is left: a sum of up to 1e3 terms of
size one in float32 misses zero by 1e3 eps at most, a single rounding in half precision by 2 eps.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_names import DIVISIONS, MULTIPLICATIONS, NEGATIONS
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import Lineage, name_of, watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.provenance import Node

SEEDS = 8
ERRORS = 10.0

_FACTORS = MULTIPLICATIONS | DIVISIONS | NEGATIONS


@dataclass(frozen=True, slots=True)
class FirstLoss:
    """``values``: what is backpropagated, and the same before each constant factor. ``rounding``: what may be left of
    a loss that is zero."""

    values: tuple[float, ...]
    rounding: float

    @property
    def plain(self) -> float:
        return self.values[-1]


class _FirstBackward(WatchingMode):
    """Looks at the first tensor that is backpropagated in a run that is made in its ``contexts``."""

    def __init__(self) -> None:
        super().__init__()
        self._lineage = Lineage()
        self.found: FirstLoss | None = None

    def active(self) -> bool:
        return self.found is None and super().active()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if not watched(name):
            return passed_on(func, args, kwargs)
        with self.watch.suspended():
            if name == "backward":
                self._look(list(tensors_in(args[:1], kwargs.get("tensors", ()))))
            parents = self._lineage.before(name, args, kwargs)
        out = passed_on(func, args, kwargs)
        with self.watch.suspended():
            self._lineage.note(self.watch, func, name, args, kwargs, parents, out)
        return out

    def _look(self, roots: list[torch.Tensor]) -> None:
        if len(roots) == 1 and roots[0].numel() == 1:
            eps = torch.finfo(roots[0].dtype).eps
            single = torch.finfo(torch.float32).eps
            self.found = FirstLoss(
                _before_factors(self._lineage.of(roots[0])), 2 * eps if eps > single else 1e3 * single
            )


def _before_factors(node: Node) -> tuple[float, ...]:
    values = [node.value]
    while node.op in _FACTORS:
        trained = [p for p in node.parents if p.history]
        if len(trained) != 1 or math.isnan(trained[0].value):
            break
        node = trained[0]
        values.append(node.value)
    return tuple(values)


@dataclass(frozen=True, slots=True)
class OverSeeds:
    mean: float
    error: float
    rounding: float

    @property
    def is_zero(self) -> bool:
        return abs(self.mean) <= self.rounding + ERRORS * self.error


class FirstLosses:
    """The first loss of the loop, under its own seed and under others."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def under(self, other_seed: int = 0) -> FirstLoss | None:
        """None where it is not one number."""
        looking, seed = _FirstBackward(), self._evidence.plan().seed + other_seed
        self._evidence.rerun(contexts=looking.contexts, enough=lambda r: r.rounds >= 1, seed=seed)
        return looking.found

    def over_seeds(self) -> OverSeeds | None:
        found = [one for s in range(SEEDS) if (one := self.under(s)) is not None]
        if len(found) < SEEDS:
            return None
        plain = [one.plain for one in found]
        error = statistics.stdev(plain) / math.sqrt(SEEDS)
        return OverSeeds(statistics.fmean(plain), error, max(one.rounding for one in found))
