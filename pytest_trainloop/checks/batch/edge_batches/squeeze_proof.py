"""Whether it matters that a ``squeeze`` removes the row axis of one row: the same run with that axis kept.

The proof has three parts. The loop goes through on one row once the call removes only what it removes from a full
batch. As it is, it does not, or it gives another gradient. And with the axis kept, single rows count as they do among
others: the gradient of two rows is the sum of those of each alone, or a mean of them, in float64 and with nothing
drawn. Where rows interact, one row may not be meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.edge_batches.squeezes import Squeezes
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.compositions.step_gradients import combined
from pytest_trainloop.gradients.compare import Agreement, agreement
from pytest_trainloop.gradients.tolerances import ROUNDING
from pytest_trainloop.gradients.vectors import vectors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager
    from typing import Any

    from pytest_trainloop.checks.batch.edge_batches.runs import Edges
    from pytest_trainloop.checks.batch.edge_batches.squeezes import Key, SqueezeCall
    from pytest_trainloop.compositions.step_gradients import StepGradient
    from pytest_trainloop.recording.watch import Watch

_BOUND = ROUNDING * 2.0**-52

SEPARABLE = 1e-9
"""Share of the gradient of two rows that may lie outside the span of the rows' own
(docs/how-it-decides.md#accumulation-as-weights)."""

CLOSE = 1e-7
"""What weights are good to: the residual over the smallest singular value at which they can be told apart."""


@dataclass(frozen=True, slots=True)
class SqueezedRow:
    """One row that loses its axis, and what comes of that."""

    squeezes: tuple[SqueezeCall, ...]
    """The calls that matter."""
    raised: str
    """What the loop raises on one row, or nothing."""
    raised_at: str
    ratio: float
    """The length of the row's gradient over that with the axis kept."""
    cosine: float
    weights: tuple[float, ...]
    """Those of two rows in the gradient of both, with the axis kept."""


def proven(edges: Edges) -> SqueezedRow | None:
    """None where no ``squeeze`` removes the row axis, where it makes no difference, or where one row may not be
    meant."""
    one = edges.one_row
    if not any(squeeze.removed for squeeze in one.squeezes.calls.values()) or len(edges.counting) < 2:
        return None
    whole = Squeezes()
    edges.outcome("whole", Composition(tuple(range(edges.count))), whole.contexts)
    removed, kept = one.squeezes.removed_rows(whole.calls, edges.count), whole.calls
    if not removed or one.raised_by_loop or not (one.raised or one.record.steps):
        return None
    with_axis = edges.outcome("1 row", edges.first, Squeezes(kept).contexts)
    if not with_axis.ok or not with_axis.record.steps:
        return None
    axis_kept = AxisKept(kept)
    first = edges.gradients.at(edges.first, contexts=(axis_kept,))
    change = None if one.raised else _difference(first, edges.gradients.at(edges.first))
    if not _in_float64(first) or (change is not None and change.difference <= _BOUND):
        return None
    weights = _weights(edges, axis_kept)
    if weights is None:
        return None
    calls = _that_matter(edges, removed, axis_kept)
    if change is None:
        return SqueezedRow(calls, one.raised, one.where, 1.0, 1.0, weights)
    return SqueezedRow(calls, "", "", change.ratio, change.cosine, weights)


@dataclass(frozen=True, eq=False)
class AxisKept:
    """Around a run in which these calls of ``squeeze`` remove what they removed in another one."""

    instead: Mapping[Key, SqueezeCall]

    def __call__(self, watch: Watch) -> Iterable[AbstractContextManager[Any]]:
        return Squeezes(self.instead).contexts(watch)


def _in_float64(*made: StepGradient) -> bool:
    return all(m.record.double and m.finite for m in made)


def _difference(expected: StepGradient, got: StepGradient) -> Agreement:
    """That of the optimizer whose gradients differ most."""
    found = [agreement(*vectors([g, got.gradients.get(n, {})])) for n, g in expected.gradients.items()]
    return max(found, key=lambda a: a.difference, default=Agreement(1.0, 1.0, 0.0))


def _weights(edges: Edges, axis_kept: AxisKept) -> tuple[float, ...] | None:
    """How two rows weigh in the gradient of both; None where that is no sum or mean over rows."""
    both = Composition(tuple(edges.counting[:2]))
    whole, *rows = (
        edges.gradients.at(c, contexts=(axis_kept,)) for c in (both, *(Composition((r,)) for r in both.rows))
    )
    if not _in_float64(whole, *rows):
        return None
    weights: tuple[float, ...] | None = None
    for n, gradient in whole.gradients.items():
        if not any(bool(values.any()) for values in gradient.values()):
            continue
        found = combined(whole, rows, n)
        if found is None or found.residual > SEPARABLE or not _of_rows(found.weights):
            return None
        weights = weights or found.weights
    return weights


def _of_rows(weights: tuple[float, ...]) -> bool:
    """Whether they are those of a sum over rows, or of a mean: no row depends on another, as the returns of a rollout
    do, which are numbers that weigh its steps."""
    mean = all(w > 0 for w in weights) and abs(sum(weights) - 1) <= CLOSE
    return mean or all(abs(w - 1) <= CLOSE for w in weights)


def _that_matter(edges: Edges, removed: Mapping[Key, SqueezeCall], axis_kept: AxisKept) -> tuple[SqueezeCall, ...]:
    """The calls that are each alone enough for the same gradient; all of them where none is."""
    sites: dict[tuple[str, int], SqueezeCall] = {}
    for (file, instruction, _), squeeze in removed.items():
        sites.setdefault((file, instruction), squeeze)
    if len(sites) == 1:
        return tuple(sites.values())
    first = edges.gradients.at(edges.first, contexts=(axis_kept,))
    enough = []
    for site, squeeze in sites.items():
        alone = AxisKept({key: there for key, there in axis_kept.instead.items() if key[:2] == site})
        made = edges.gradients.at(edges.first, contexts=(alone,))
        if _in_float64(made) and _difference(first, made).difference <= _BOUND:
            enough.append(squeeze)
    return tuple(enough or sites.values())
