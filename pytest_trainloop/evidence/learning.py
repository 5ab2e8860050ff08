"""Whether a loop learns one fixed batch, and what keeps it from it (RULINGS R6).

A loss is judged only where it is one: the loop has a single one, it comes again with its seed while no weight moves,
and it changes by what its gradients say. What has none of these (policy gradients, moving targets, annealed weights)
is not called a fault, whatever its curve looks like.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.evidence.curve import level, repeats, rising, still_falls
from pytest_trainloop.evidence.onebatch import REFERENCE_RATES, REFERENCE_STEPS, STILL_STEPS
from pytest_trainloop.evidence.ratios import typical
from pytest_trainloop.observe.events import GradWrite

if TYPE_CHECKING:
    from pytest_trainloop.evidence.onebatch import Curve, OneBatch
    from pytest_trainloop.observe.record import Record

LEARNED, STUCK = 0.5, 0.25
"""Share of the way from the start to what plain Adam reaches: from here on a loop learns, below that it may not."""

SAME = 0.01
"""Share of that way up to which two ends are one (RULINGS R6: right loops at least 0.05, faults at most 0.003)."""

TOO_SMALL = 1e-5
"""Update relative to the weights below which nothing moves (RULINGS R7)."""

TOO_LARGE = 1.0
"""Update relative to the weights that leaves nothing of where they began."""

WORK = 1 / 3
"""How far the change of a loss may lie from what its gradients say, relative to it: where half of the dependence is
cut off by a stop-gradient they tell half of it, and the trapezoid rule errs by less on such steps."""

LITTLE = 0.05
"""Share of the first loss that plain Adam must take off it before anything can be learned of the loop's own steps."""


@dataclass(frozen=True, slots=True)
class Learning:
    """What came of it, in losses.

    ``progress`` is the share of the way from ``start`` to ``reference`` that the loop went in ``steps`` steps;
    ``ratio`` is the typical update relative to the weights; ``falling`` tells that the loss still fell, ``by_hand``
    that weights or gradients are also written by hand.
    """

    steps: int
    start: float
    end: float
    reference: float
    rate: float
    ratio: float
    falling: bool
    by_hand: bool

    @property
    def progress(self) -> float:
        way = self.start - self.reference
        return (self.start - self.end) / way if math.isfinite(self.end) else -math.inf

    @property
    def hopeless(self) -> bool:
        """Whether there is next to no way to go."""
        return self.start - self.reference < LITTLE * abs(self.start)

    @property
    def diverged(self) -> bool:
        return self.progress < -LITTLE

    @property
    def too_far(self) -> bool:
        """Whether steps lead away from the start, or are so large that nothing comes of them."""
        return self.diverged or (self.ratio >= TOO_LARGE and not self.falling and not self.learned)

    @property
    def learned(self) -> bool:
        return self.progress >= LEARNED

    @property
    def stuck(self) -> bool:
        """Nothing is coming of this loop: it goes nowhere, or by steps that change nothing."""
        return self.too_far or (self.progress < STUCK and (not self.falling or self.ratio < TOO_SMALL))


def single_loss(record: Record) -> None:
    """Raise ``CannotDecide`` where no one loss is lowered."""
    if not record.consuming_steps():
        raise CannotDecide("no optimizer step was seen; what the loop lowers cannot be followed")
    if not any(b.roots for b in record.of_backward()):
        raise CannotDecide("nothing is backpropagated; what the loop lowers cannot be followed")
    held = record.held
    reached = {frozenset(o for i in b.arrivals for o in held.get(i, ())) for b in record.backwards()}
    if len(reached - {frozenset()}) > 1 and sum(o.steps > 0 for o in record.optimizers) > 1:
        raise CannotDecide("several losses are backpropagated for several optimizers; there is no single loss")


def require_a_curve(curve: Curve) -> None:
    """Raise ``CannotDecide`` for a run that was too short to tell, or whose rates were still rising."""
    if curve.record.raised is not None:
        raise CannotDecide(f"on one fixed batch fit raised {curve.record.raised.summary} after {curve.steps} steps")
    if curve.ended or curve.steps < STILL_STEPS:
        raise CannotDecide(
            f"fit ends by itself, and {curve.steps} steps are too few to tell; let it go on as long as there are "
            "batches, or raise its number of steps for this test"
        )
    if rising(curve.rates):
        raise CannotDecide(
            f"the rate still rises after {curve.steps} steps ({curve.rates[-1]:.1e}); shorten the warm-up for this test"
        )


def learning(batch: OneBatch, seconds: float) -> Learning:
    """What plain Adam and the loop make of the batch. Raises ``CannotDecide`` where that says nothing."""
    curve = batch.curve
    require_a_curve(curve)
    needed = batch.seconds(STILL_STEPS + len(REFERENCE_RATES) * REFERENCE_STEPS)
    if needed > seconds:
        raise CannotDecide(
            f"the loss is not halved after {curve.steps} steps, and a reference would take {needed:.0f} s of "
            f"{seconds:g}; allow them with overfit_one_batch={{'seconds': {math.ceil(needed)}}}"
        )
    still = batch.still
    if still.steps < STILL_STEPS or not repeats(still.losses):
        raise CannotDecide(
            "what is backpropagated changes from step to step while no weight moves (an annealed weight, a source "
            "that no seed reaches, samples of its own)"
        )
    reference = best(batch)
    return Learning(
        steps=curve.steps,
        start=still.start,
        end=curve.end,
        reference=reference[0],
        rate=reference[1],
        ratio=typical(batch.ratios.seen),
        falling=still_falls(curve.losses),
        by_hand=_by_hand(batch.seen),
    )


def best(batch: OneBatch) -> tuple[float, float]:
    """The lowest end of the references, and its rate. Raises ``CannotDecide`` where the loss is no function of the
    weights with these gradients, or has no floor."""
    curves = {rate: batch.reference(rate) for rate in REFERENCE_RATES}
    ends = {rate: c.end for rate, c in curves.items() if math.isfinite(c.end) and c.steps >= REFERENCE_STEPS // 2}
    if not ends:
        raise CannotDecide("plain Adam does not lower the loss either: it is not finite under it")
    if not any(_adds_up(c) for c in curves.values()):
        raise CannotDecide(
            "what is backpropagated does not change as its gradients say (a policy gradient, a target that moves, a "
            "part held fixed): how low it is says nothing"
        )
    rate = min(ends, key=lambda r: ends[r])
    curve = curves[rate]
    if ends[rate] < 0 and level(curve.losses, curve.steps * 2 // 3) - ends[rate] > 0.1 * (curve.start - ends[rate]):
        raise CannotDecide("the loss has no floor that plain Adam comes to; how far the loop got cannot be told")
    return ends[rate], rate


def _adds_up(curve: Curve) -> bool:
    """Whether the loss changed by what its gradients say."""
    scale = max(abs(curve.done), SAME * abs(curve.losses[0]) if curve.losses else 0.0)
    return abs(curve.done - curve.expected) <= WORK * scale


def _by_hand(record: Record) -> bool:
    """Whether weights or gradients are also written by hand: noise that is added, projections, own averages."""
    held = record.held
    writes = any(w.by_hand or (w.how == "altered" and "add" in w.by) for w in record.of(GradWrite))
    return writes or any(i in held for i in record.moved_by_hand())
