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
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_at_init.causes import found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import Lineage, name_of, watched
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_names import DIVISIONS, MULTIPLICATIONS, NEGATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

SEEDS = 8
ERRORS = 10.0

DECLARED = 1.5
"""Factor from a declared initial loss."""

_FACTORS = MULTIPLICATIONS | DIVISIONS | NEGATIONS


def not_as_declared(evidence: Evidence, expected: float) -> Iterator[Finding]:
    backwards = [b for b in evidence.run().backwards() if b.roots]
    if not backwards:
        raise CannotDecide("nothing is backpropagated; the first loss is not known")
    first = backwards[0]
    value = given = sum(root.value for root in first.roots)
    if _as_declared(value, expected):
        return
    values, _ = _first_loss(evidence)
    if any(_as_declared(v, expected) for v in values):
        return
    value = values[-1] if values else value
    facts: dict[str, Any] = {"value": value, "expected": expected, "scaled": bool(value) and value != given}
    facts |= {"factor": given / value if value else math.nan, "ratio": value / expected if expected else math.nan}
    variant = "ratio" if expected else ""
    over = [_first_loss(evidence, seed) for seed in range(SEEDS)] if not expected else []
    if over and all(values for values, _ in over):
        plain = [values[-1] for values, _ in over]
        mean, error = statistics.fmean(plain), statistics.stdev(plain) / math.sqrt(SEEDS)
        if abs(mean) <= max(rounding for _, rounding in over) + ERRORS * error:
            return
        facts, variant = facts | {"mean": mean, "error": error}, "over seeds"
    yield found("not_as_declared", first, ("expected_init_loss",), variant, **facts)


def _as_declared(value: float, expected: float) -> bool:
    """Whether it is of the same sign, and at most half as much again or as little."""
    return value == expected or (value * expected > 0 and 1 / DECLARED <= value / expected <= DECLARED)


def _first_loss(evidence: Evidence, other_seed: int = 0) -> tuple[tuple[float, ...], float]:
    """What is backpropagated first under the loop's seed plus another, and the same before each constant factor; and
    what rounding may leave of a loss that is zero. No values where it is not one number."""
    looking, seed = _FirstBackward(), evidence.plan().seed + other_seed
    evidence.rerun(contexts=looking.contexts, enough=lambda r: r.rounds >= 1, seed=seed)
    return looking.values, looking.rounding


class _FirstBackward(WatchingMode):
    """Looks at the first tensor that is backpropagated in a run that is made in its ``contexts``."""

    def __init__(self) -> None:
        super().__init__()
        self._lineage = Lineage()
        self.values: tuple[float, ...] = ()
        self.rounding = 0.0

    def active(self) -> bool:
        return not self.values and super().active()

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
        if len(roots) != 1 or roots[0].numel() != 1:
            return
        eps, single = torch.finfo(roots[0].dtype).eps, torch.finfo(torch.float32).eps
        self.rounding = 2 * eps if eps > single else 1e3 * single
        node = self._lineage.of(roots[0])
        values = [node.value]
        while node.op in _FACTORS:
            trained = [p for p in node.parents if p.history]
            if len(trained) != 1 or math.isnan(trained[0].value):
                break
            node = trained[0]
            values.append(node.value)
        self.values = tuple(values)
