"""Whether it matters that a row axis was squeezed away: the same run with that axis left in.

The proof has three parts. The loop goes through on one row once the call takes out what it takes out of a full batch.
As it is, it does not, or it gives another gradient. And with the axis left in, single rows are what they are among
others: the gradient of two rows is the sum of those of each alone, or a mean of them, in float64 and with
nothing drawn. Where rows interact, one row may not be meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.edge_batches.squeezes import Squeezes
from pytest_trainloop.gradients.compare import Agreement, agreement, optimizers
from pytest_trainloop.gradients.tolerances import ROUNDING
from pytest_trainloop.gradients.vectors import combination, consumed, vectors
from pytest_trainloop.runs.no_randomness import Still
from pytest_trainloop.runs.same_start import SameStart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.checks.batch.edge_batches.runs import Edges, Outcome
    from pytest_trainloop.checks.batch.edge_batches.squeezes import Key, Squeeze

_BOUND = ROUNDING * 2.0**-52
SEPARABLE = 1e-9
"""Of the gradient of two rows, what may lie outside the span of the rows' own
(docs/how-it-decides.md#accumulation-as-weights)."""

TOLD_APART = 1e-7
"""What weights are good to: the residual over the smallest singular value at which they are told apart (span.py)."""


@dataclass(frozen=True, slots=True)
class Lost:
    """``squeezes`` are the calls that matter; ``raised`` is what one row ends in, or ``ratio`` and ``cosine`` compare
    its gradient to the one with the axis left in. ``weights`` are those of two rows in the gradient of both."""

    squeezes: tuple[Squeeze, ...]
    raised: str
    raised_at: str
    ratio: float
    cosine: float
    weights: tuple[float, ...]


def proven(edges: Edges, lost: Mapping[Key, Squeeze], whole: Mapping[Key, Squeeze]) -> Lost | None:
    """None where it makes no difference, or where one row may not be meant."""
    one = edges.one_row()
    if one.by_hand or not (one.raised or one.record.steps):
        return None
    mended = edges.outcome("1 row", edges.taken(edges.plain[:1]), Squeezes(whole).contexts)
    if not mended.fine or not mended.record.steps:
        return None
    exact = _Exact(edges)
    left_in = exact.run([0], whole)
    apart = None if one.raised else _apart(left_in, exact.run([0], {}))
    if not left_in.fine or (apart is not None and apart.difference <= _BOUND):
        return None
    weights = _weights(exact, left_in, whole)
    if weights is None or not exact.holds:
        return None
    chosen = _that_matter(exact, lost, left_in, whole)
    if apart is None:
        return Lost(chosen, one.raised, one.where, 1.0, 1.0, weights)
    return Lost(chosen, "", "", apart.ratio, apart.cosine, weights)


class _Exact:
    """Runs in float64 from one start, with nothing drawn; rows are numbered among those in which something counts.
    ``holds`` until one of them is not in float64 throughout."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self._start = SameStart()
        self.holds = True

    def run(self, rows: Sequence[int], instead: Mapping[Key, Squeeze]) -> Outcome:
        squeezes = Squeezes(instead)
        outcome = self._edges.outcome(
            "rows",
            self._edges.taken([self._edges.plain[row] for row in rows]),
            lambda watch: (Still(), *squeezes.contexts(watch)),
            prepare=self._start,
            double=True,
        )
        self.holds = self.holds and not outcome.raised and outcome.record.double
        return outcome


def _apart(expected: Outcome, got: Outcome) -> Agreement:
    """The first gradients consumed, of the optimizer whose differ most."""
    found = [
        agreement(*vectors([consumed(o.record, n, 0) or {} for o in (expected, got)]))
        for n in optimizers(expected.record)
    ]
    return max(found, key=lambda a: a.difference, default=Agreement(1.0, 1.0, 0.0))


def _weights(exact: _Exact, first: Outcome, whole: Mapping[Key, Squeeze]) -> tuple[float, ...] | None:
    """How two rows weigh in the gradient of both; None where that is no sum of theirs."""
    second, both = exact.run([1], whole), exact.run([0, 1], whole)
    if not (second.fine and both.fine):
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
    """Whether they are those of a sum over rows, or of a mean: what one row gives depends on no other (the returns of a
    rollout do, and are numbers that weigh its steps)."""
    mean = all(w > 0 for w in weights) and abs(sum(weights) - 1) <= TOLD_APART
    return mean or all(abs(w - 1) <= TOLD_APART for w in weights)


def _that_matter(
    exact: _Exact, lost: Mapping[Key, Squeeze], left_in: Outcome, whole: Mapping[Key, Squeeze]
) -> tuple[Squeeze, ...]:
    """Those that are enough, each by itself, for the same gradient; all of them where none is."""
    sites: dict[tuple[str, int], Squeeze] = {}
    for (file, instruction, _), squeeze in lost.items():
        sites.setdefault((file, instruction), squeeze)
    if len(sites) == 1:
        return tuple(sites.values())
    enough = []
    for site, squeeze in sites.items():
        mended = exact.run([0], {key: there for key, there in whole.items() if key[:2] == site})
        if mended.fine and _apart(left_in, mended).difference <= _BOUND:
            enough.append(squeeze)
    return tuple(enough or sites.values())
