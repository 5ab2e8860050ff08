"""Whether a loop learns one fixed batch, and what keeps it from it.

See docs/how-it-decides.md#one-fixed-batch.

A loss is judged only where it is one: the loop has a single one, it comes again with its seed while no weight moves,
and it changes by what its gradients say. What has none of these (policy gradients, moving targets, annealed weights)
is not called a fault, whatever its curve looks like.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.loss_curve import level, repeats, rising, still_falls
from pytest_trainloop.checks.learning.one_batch import LITTLE, REFERENCE_LRS, REFERENCE_STEPS, STILL_STEPS, TOO_SMALL
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.recording.events import GradWrite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.learning.one_batch import Curve, OneBatch
    from pytest_trainloop.recording.record import Record

LEARNED, STUCK = 0.5, 0.25
"""Share of the way from the start to what plain Adam reaches: from here on a loop learns, below that it may not."""

SAME = 0.01
"""Share of that way up to which two ends are one (right loops have at least 0.05, faults at most 0.003)."""

TOO_LARGE = 1.0
"""Update relative to the weights that leaves nothing of where they began."""

UPHILL = -0.05
"""Mean cosine below which steps lead up the gradient: those of gradient descent, Adam and their kin have one above
zero at every step, and only momentum on its way back up a valley has less for a while."""

DECAYED = 0.01
"""Share of its peak below which a rate has decayed."""

WORK = 1 / 3
"""How far the change of a loss may lie from what its gradients say, relative to it: where half of the dependence is
cut off by a stop-gradient they tell half of it, and the trapezoid rule errs by less on such steps."""


@dataclass(frozen=True, slots=True)
class Learning:
    """What came of it, in losses: at the ``start``, at the ``end`` of ``steps`` steps, under the best ``reference``.

    ``ratio`` is the largest update relative to the weights, ``peak`` the largest rate, ``descent`` the mean cosine
    between steps and the way down the gradient; ``falling`` tells that the loss still fell, ``decayed`` that the rate
    is next to nothing in the end, ``assigns`` that the loop also writes weights or gradients itself.
    """

    steps: int
    start: float
    end: float
    reference: float
    lr: float
    ratio: float
    descent: float
    peak: float
    falling: bool
    decayed: bool
    assigns: bool

    @property
    def progress(self) -> float:
        """The share of the way from the start to the reference that the loop went; NaN where there is none to go."""
        if self.hopeless:
            return math.nan
        return (self.start - self.end) / (self.start - self.reference) if math.isfinite(self.end) else -math.inf

    @property
    def hopeless(self) -> bool:
        """Whether there is next to no way to go."""
        way = self.start - self.reference
        return way <= 0 or way < LITTLE * abs(self.start)

    @property
    def learned(self) -> bool:
        return self.progress >= LEARNED

    @property
    def diverged(self) -> bool:
        return self.progress < -LITTLE

    @property
    def too_far(self) -> bool:
        """Whether the loss rises, or does not change after steps as large as the weights."""
        return self.diverged or (self.ratio >= TOO_LARGE and not self.falling and not self.learned)

    @property
    def nowhere(self) -> bool:
        """Whether the loop has gone next to nowhere, and goes no further."""
        return self.progress < STUCK and not self.falling

    @property
    def is_stuck(self) -> bool:
        return self.progress < STUCK and self.start - self.end < LITTLE * abs(self.start)

    @property
    def too_small(self) -> bool:
        """Whether nothing happens, by steps that change nothing."""
        return self.is_stuck and self.ratio < TOO_SMALL

    @property
    def astray(self) -> bool:
        """Whether steps lead up the gradient: no rate and no patience can help."""
        return (self.is_stuck or self.diverged) and self.descent < UPHILL


def single_loss(record: Record) -> None:
    """Raise ``CannotDecide`` where no one loss is lowered."""
    if not record.innermost_steps():
        raise CannotDecide("no optimizer step was seen; what the loop lowers cannot be followed")
    if not any(b.roots for b in record.autograd_passes()):
        raise CannotDecide("nothing is backpropagated; what the loop lowers cannot be followed")
    held = record.held
    reached = {frozenset(o for i in b.arrivals for o in held.get(i, ())) for b in record.backwards()}
    if len(reached - {frozenset()}) > 1 and sum(o.steps > 0 for o in record.optimizers) > 1:
        raise DoesNotApply("several losses are backpropagated for several optimizers; there is no single loss")


def require_a_curve(curve: Curve) -> None:
    """Raise ``CannotDecide`` for a run that was too short to tell, or whose rates were still rising."""
    if curve.record.raised is not None:
        raise CannotDecide(f"on one fixed batch fit raised {curve.record.raised.summary} after {curve.steps} steps")
    if curve.ended or curve.steps < STILL_STEPS:
        raise CannotDecide(
            f"fit ends by itself, and {curve.steps} steps are too few to tell; let it go on as long as there are "
            "batches, or raise its number of steps for this test",
            needs="more steps",
        )
    if rising(curve.lrs):
        raise CannotDecide(
            f"the rate still rises after {curve.steps} steps ({curve.lrs[-1]:.1e}); shorten the warm-up for the test",
            needs="a shorter warm-up",
        )


def learning(batch: OneBatch) -> Learning:
    """What plain Adam and the loop make of the batch. Raises ``CannotDecide`` where that says nothing."""
    curve = batch.curve
    require_a_curve(curve)
    still = batch.still
    if still.steps < STILL_STEPS or not repeats(still.losses):
        raise CannotDecide(
            "what is backpropagated changes from step to step while no weight moves (an annealed weight, a source "
            "that no seed reaches, samples of its own)"
        )
    reference = best(batch)
    if not batch.reached:
        raise CannotDecide("no gradient arrives at what the optimizers step (copies of the weights, kept by hand)")
    return Learning(
        steps=curve.steps,
        start=still.start,
        end=curve.end,
        reference=reference[0],
        lr=reference[1],
        ratio=batch.ratios.largest,
        descent=batch.ratios.descent,
        peak=max((r for r in curve.lrs if not math.isnan(r)), default=math.nan),
        falling=still_falls(curve.losses),
        decayed=_decayed(curve.lrs),
        assigns=_assigns(batch.seen),
    )


def best(batch: OneBatch) -> tuple[float, float]:
    """The lowest end of the references, and its rate. Raises ``CannotDecide`` where the loss is no function of the
    weights with these gradients, or has no floor."""
    curves = {lr: batch.reference(lr) for lr in REFERENCE_LRS}
    ends = {lr: c.end for lr, c in curves.items() if math.isfinite(c.end) and c.steps >= REFERENCE_STEPS // 2}
    if not ends:
        raise CannotDecide("plain Adam does not lower the loss either: it is not finite under it")
    if not any(_adds_up(c) for c in curves.values()):
        raise CannotDecide(
            "what is backpropagated does not change as its gradients say under plain Adam (a policy gradient, a target "
            "that moves, a part held fixed, or steps too large for this model): how low it is says nothing"
        )
    lr = min(ends, key=lambda r: ends[r])
    curve = curves[lr]
    if ends[lr] < 0 and level(curve.losses, curve.steps * 2 // 3) - ends[lr] > 0.1 * (curve.start - ends[lr]):
        raise CannotDecide("the loss has no floor that plain Adam comes to; how far the loop got is not known")
    return ends[lr], lr


def _adds_up(curve: Curve) -> bool:
    """Whether the loss changed by what its gradients say."""
    scale = max(abs(curve.done), SAME * abs(curve.losses[0]) if curve.losses else 0.0)
    return abs(curve.done - curve.expected) <= WORK * scale


def _decayed(lrs: Sequence[float]) -> bool:
    known = [lr for lr in lrs if not math.isnan(lr)]
    return bool(known) and known[-1] < DECAYED * max(known)


def _assigns(record: Record) -> bool:
    """Whether weights or gradients are also written by hand: noise that is added, projections, own averages."""
    held = record.held
    writes = any(w.assigns or (w.how == "altered" and "add" in w.by) for w in record.of(GradWrite))
    return writes or any(i in held for i in record.moved_outside_steps())
