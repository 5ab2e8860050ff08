"""Accumulation windows: micro-batches cleared inside one, and a window left open at the end of the data. Plain data, no
torch."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.step_order.clearing import cleared_after
from pytest_trainloop.recording.events import GradWrite

if TYPE_CHECKING:
    from pytest_trainloop.recording.events import Backward
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import BackwardOutcome, GradientLedger


@dataclass(frozen=True, slots=True)
class ClearedInside:
    """Micro-batches whose gradients are cleared in every accumulation window."""

    window: Window
    cleared: int
    """Cleared backward passes of the whole run."""
    backwards: int
    """All backward passes of the same line."""
    first: Backward
    """The first of the cleared passes."""
    clearing: GradWrite | None
    """The write that cleared it, where one was seen."""


@dataclass(frozen=True, slots=True)
class Window:
    """Regular windows: the backward passes in one, and how many of these are cleared."""

    size: int
    cleared: int


def cleared_inside(record: Record, ledger: GradientLedger, accumulate: int = 0) -> ClearedInside | None:
    """The micro-batches that are cleared in every accumulation window.

    Passes count as micro-batches where the loop's own knob says how many there are (``accumulate``), or where each has
    a batch of its own: adversarial training and per-sample gradients make several passes over one batch.
    """
    if ledger.assigned or any(w.how == "altered" and "add" in w.by for w in record.of(GradWrite)):
        return None
    by_site: dict[object, list[BackwardOutcome]] = defaultdict(list)
    for outcome in ledger.backwards:
        if outcome.backward.reached:
            by_site[outcome.backward.site].append(outcome)
    for outcomes in by_site.values():
        lost = [b for b in outcomes if b.cleared and not b.consumed and not b.pending]
        window = _window(record, outcomes) if 0 < len(lost) < len(outcomes) else None
        if window is None or any(_moved_after(record, b.backward, b.cleared) for b in lost):
            continue
        own_batches = all(a.backward.item < b.backward.item for a, b in itertools.pairwise(outcomes))
        if (own_batches or window.size == accumulate) and all(b.finite() for b in lost):
            first = lost[0]
            clearing = cleared_after(record, first.backward, first.cleared)
            return ClearedInside(window, len(lost), len(outcomes), first.backward, clearing)
    return None


def _window(record: Record, outcomes: list[BackwardOutcome]) -> Window | None:
    """The window of these passes, where at least three whole ones clear equally many.

    Passes that are kept next to each other are read by one step. Where each has a step of its own, the loop leaves
    steps out, as at a spike of the loss (repaired: step_left_out_by_the_loss_of_a_rank). At the end a short window may
    follow the last whole one.
    """
    groups = [(kept, list(g)) for kept, g in itertools.groupby(outcomes, key=lambda b: bool(b.consumed))]
    if any(_stepped_between(record, a, b) for kept, g in groups[:-1] if kept for a, b in itertools.pairwise(g)):
        return None
    runs = [(kept, len(g)) for kept, g in groups]
    cleared = [n for consumed, n in (runs if runs[-1][0] else runs[:-1]) if not consumed]
    kept = [n for consumed, n in runs if consumed]
    if len(cleared) < 3 or len(set(cleared)) != 1:
        return None
    return Window(cleared[0] + max(set(kept), key=kept.count), cleared[0])


def _stepped_between(record: Record, one: BackwardOutcome, other: BackwardOutcome) -> bool:
    """Whether a step read the gradient of the first pass before the second one began."""
    between = (s for s in record.innermost_steps() if one.backward.at < s.at < other.backward.at)
    return any(one.consumed & set(record.optimizers[s.optimizer].parameters) for s in between)


def _moved_after(record: Record, backward: Backward, parameters: set[int]) -> bool:
    """Whether the parameters changed between this backward pass and the next that reaches them, as in SAM's first
    step."""
    later = (b.at for b in record.backwards() if b.at > backward.at and parameters & set(b.arrivals))
    after = min(later, default=math.inf)
    moves = (m for m in record.moves if m.at > backward.at and parameters & set(m.parameters))
    return any(m.since < after and m.at <= after + 1 for m in moves)
