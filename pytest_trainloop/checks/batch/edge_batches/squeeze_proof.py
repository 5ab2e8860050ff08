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
from pytest_trainloop.gradients.compare import Agreement, agreement, optimizers
from pytest_trainloop.gradients.tolerances import ROUNDING
from pytest_trainloop.gradients.vectors import combination, consumed, vectors
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.same_start import SameStart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.checks.batch.edge_batches.runs import Edges, Outcome
    from pytest_trainloop.checks.batch.edge_batches.squeezes import Key, SqueezeCall

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
    edges.outcome("whole", edges.taken(list(range(edges.count))), whole.contexts)
    removed, kept = one.squeezes.removed_rows(whole.calls, edges.count), whole.calls
    if not removed or one.raised_by_loop or not (one.raised or one.record.steps):
        return None
    with_axis = edges.outcome("1 row", edges.taken(edges.counting[:1]), Squeezes(kept).contexts)
    if not with_axis.ok or not with_axis.record.steps:
        return None
    exact = _Float64Runs(edges)
    first = exact.run([0], kept)
    change = None if one.raised else _difference(first, exact.run([0], {}))
    if not first.ok or (change is not None and change.difference <= _BOUND):
        return None
    weights = _weights(exact, first, kept)
    if weights is None or not exact.hold:
        return None
    calls = _that_matter(exact, removed, first, kept)
    if change is None:
        return SqueezedRow(calls, one.raised, one.where, 1.0, 1.0, weights)
    return SqueezedRow(calls, "", "", change.ratio, change.cosine, weights)


class _Float64Runs:
    """Runs in float64 from one start, with nothing drawn; rows are numbered among those in which something counts.
    They ``hold`` until one of them is not in float64 throughout."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self._start = SameStart()
        self.hold = True

    def run(self, rows: Sequence[int], instead: Mapping[Key, SqueezeCall]) -> Outcome:
        squeezes = Squeezes(instead)
        outcome = self._edges.outcome(
            "rows",
            self._edges.taken([self._edges.counting[row] for row in rows]),
            lambda watch: (NoRandomness(), *squeezes.contexts(watch)),
            prepare=self._start,
            double=True,
        )
        self.hold = self.hold and not outcome.raised and outcome.record.double
        return outcome


def _difference(expected: Outcome, got: Outcome) -> Agreement:
    """The first gradients consumed, of the optimizer whose differ most."""
    found = [
        agreement(*vectors([consumed(o.record, n, 0) or {} for o in (expected, got)]))
        for n in optimizers(expected.record)
    ]
    return max(found, key=lambda a: a.difference, default=Agreement(1.0, 1.0, 0.0))


def _weights(exact: _Float64Runs, first: Outcome, kept: Mapping[Key, SqueezeCall]) -> tuple[float, ...] | None:
    """How two rows weigh in the gradient of both; None where that is no sum or mean over rows."""
    second, both = exact.run([1], kept), exact.run([0, 1], kept)
    if not (second.ok and both.ok):
        return None
    weights: tuple[float, ...] | None = None
    for n in optimizers(both.record):
        sides = vectors([consumed(o.record, n, 0) or {} for o in (both, first, second)])
        if not bool(sides[0].any()):
            continue
        found = combination(sides[0], sides[1:])
        if found is None or found.residual > SEPARABLE or not _of_rows(found.weights):
            return None
        weights = weights or found.weights
    return weights


def _of_rows(weights: tuple[float, ...]) -> bool:
    """Whether they are those of a sum over rows, or of a mean: no row depends on another, as the returns of a rollout
    do, which are numbers that weigh its steps."""
    mean = all(w > 0 for w in weights) and abs(sum(weights) - 1) <= CLOSE
    return mean or all(abs(w - 1) <= CLOSE for w in weights)


def _that_matter(
    exact: _Float64Runs, removed: Mapping[Key, SqueezeCall], first: Outcome, kept: Mapping[Key, SqueezeCall]
) -> tuple[SqueezeCall, ...]:
    """The calls that are each alone enough for the same gradient; all of them where none is."""
    sites: dict[tuple[str, int], SqueezeCall] = {}
    for (file, instruction, _), squeeze in removed.items():
        sites.setdefault((file, instruction), squeeze)
    if len(sites) == 1:
        return tuple(sites.values())
    enough = []
    for site, squeeze in sites.items():
        with_axis = exact.run([0], {key: there for key, there in kept.items() if key[:2] == site})
        if with_axis.ok and _difference(first, with_axis).difference <= _BOUND:
            enough.append(squeeze)
    return tuple(enough or sites.values())
