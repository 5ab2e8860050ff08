"""Terms of the loss of which one is a sum over rows and another a mean.

With every row twice a mean stays and a sum doubles: what g(S, S) has more than g(S) is the gradient of the sums, s, and
what is left of g(S) that of the means, m. It is so where two rows confirm it: of rows a and b the sums give s_a + s_b,
and the means a weighted mean of m_a and m_b. A penalty on weights is no mean over rows: its m is the same for each row.
Rows that interact confirm nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.accumulation_equivalence.weights import CLOSE
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.compositions.step_gradients import StepGradients
from pytest_trainloop.compositions.step_runs import separable
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.compare import agreement
from pytest_trainloop.gradients.vectors import combination, vectors
from pytest_trainloop.recording.events import LossCall
from pytest_trainloop.recording.source import here
from pytest_trainloop.tracing.arguments import floats
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.compositions.step_gradients import StepGradient
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

SAME = 1e-9
"""Relative difference up to which a term's value counts as the same, or as doubled."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """A call that makes one number of several, with that number."""

    op: str
    place: str
    value: float


@dataclass(frozen=True, slots=True)
class Terms:
    """That the gradient is a mean over rows in one part, and a sum in another."""

    once: Composition
    twice: Composition
    change: float
    """The relative difference that the second time makes."""
    summed: tuple[Reduction, Reduction] | None
    """The last one whose value doubles, once and twice; None where none was seen."""
    averaged: tuple[Reduction, Reduction] | None
    """The last one whose value stays."""


def terms_apart(evidence: Evidence) -> Terms | None:
    """None where all terms of the loss grow alike with the rows, or where it cannot be seen."""
    if _one_mean_each(evidence.run()):
        return None
    try:
        gradients = evidence.shared(StepGradients.of)
        rows = gradients.cut.valid.order[-2:]
        if len(rows) < 2 or not _grow_otherwise(gradients, rows):
            return None
        other = gradients.along_other_axis(evidence)
        if other is not None and not _grow_otherwise(other, other.cut.valid.order[-2:]):
            return None  # a sum over time, if time comes first
        seen = [Reductions(), Reductions()]
        once, twice = Composition(rows[:1]), Composition(rows[:1] * 2)
        for made_of, reductions in zip((once, twice), seen, strict=True):
            gradients.at(made_of, contexts=(reductions.contexts,))
    except CannotDecide:
        return None
    change = gradients.differ(gradients.at(once), gradients.at(twice))
    pairs = list(zip(*(s.found for s in seen), strict=False)) if len({len(s.found) for s in seen}) == 1 else []
    summed, averaged = (
        next((p for p in reversed(pairs) if abs(p[1].value - n * p[0].value) <= SAME * abs(p[1].value) > 0), None)
        for n in (2, 1)
    )
    return Terms(once, twice, change, summed, averaged)


def _one_mean_each(record: Record) -> bool:
    """Whether every backward pass starts from what one call of a loss function gives, which is a mean."""
    means = {call.value for call in record.of(LossCall) if call.reduction == "mean" and call.value is not None}
    roots = [root.value for b in record.backwards() for root in b.roots]
    full = roots[: len(record.of(LossCall))]  # later calls are not recorded
    return bool(full) and means.issuperset(full)


def _grow_otherwise(gradients: StepGradients, rows: Sequence[int]) -> bool:
    a, b = rows
    both = [gradients.at(Composition(made)) for made in ((a, b), (a, b, a, b))]
    for optimizer in both[0].gradients:
        whole, more = _vectors(both, optimizer)
        bound = separable(gradients.bound(*both)) * float(torch.linalg.vector_norm(whole))
        added = more - whole
        if any(float(torch.linalg.vector_norm(v)) <= bound for v in (added, added - whole)):
            continue  # a mean, or a sum
        alone = [gradients.at(Composition(made)) for made in ((a,), (a, a), (b,), (b, b))]
        whole, more, of_a, of_aa, of_b, of_bb = _vectors([*both, *alone], optimizer)
        sums, means = (of_aa - of_a, of_bb - of_b), (2 * of_a - of_aa, 2 * of_b - of_bb)
        found = combination(whole - sums[0] - sums[1], means)
        if (
            float(torch.linalg.vector_norm(more - whole - sums[0] - sums[1])) <= bound
            and agreement(*sums).difference > CLOSE
            and found is not None
            and found.residual <= separable(gradients.bound(*both, *alone))
            and min(found.weights) > 0
            and abs(sum(found.weights) - 1) <= CLOSE
        ):
            return True
    return False


def _vectors(made: Sequence[StepGradient], optimizer: int) -> list[torch.Tensor]:
    """Raises ``CannotDecide`` where one of the gradients is not there, not finite or not in float64."""
    if not all(m.record.double and m.finite and optimizer in m.gradients for m in made):
        raise CannotDecide("the loop does not run on these rows")
    return vectors([m.gradients[optimizer] for m in made])


class Reductions(WatchingMode):
    """The calls of the first window that make one number, with a gradient, of several."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Reduction] = []

    def active(self) -> bool:
        return super().active() and not self.watch.record.steps

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call(name, func, args, kwargs)
        if isinstance(out, torch.Tensor) and out.requires_grad and out.numel() == 1 and _several(args):
            with self.watch.suspended():
                if not floats([out]):
                    return out
                self.found.append(Reduction(name, str(here()[0]), float(out.detach())))
        return out


def _several(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].numel() > 1
