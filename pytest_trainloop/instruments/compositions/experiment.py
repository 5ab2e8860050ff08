"""One step of a loop, several times over. Each *arm* starts from the same weights, in float64, without randomness and
with checkpoints as plain calls. Arms differ in one thing: the batch, or a mode that watches or patches calls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide, Unreliable
from pytest_trainloop.instruments.gradients.compare import Agreement, agreement, by_tensor, optimizers
from pytest_trainloop.instruments.gradients.tolerances import RESEEDED, ROUNDING
from pytest_trainloop.instruments.gradients.vectors import Gradient, consumed, vectors
from pytest_trainloop.runs.checkpoint_bypass import switched, without
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.outside_draws import rng_line
from pytest_trainloop.runs.same_start import SameStart, from_same_start

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from contextlib import AbstractContextManager

    from pytest_trainloop.instruments.tracing.mode import WatchingMode
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one arm gives: the gradient that the step of each optimizer reads, or why there is none."""

    gradients: dict[int, Gradient]
    refused: str
    loss: float
    """The first value that backward is called on."""
    backward: str
    """The line that calls it."""

    @property
    def reached(self) -> int:
        """How many gradients are not zero."""
        return sum(bool(entries.any()) for gradient in self.gradients.values() for entries in gradient.values())


@dataclass(frozen=True, slots=True)
class Difference:
    """Two arms compared, by the optimizer for which they differ most."""

    agreement: Agreement
    losses: tuple[float, float]
    """Of the second arm and of the first."""
    parameters: int
    precision: str

    @property
    def bound(self) -> float:
        """Within which two orders of summation agree."""
        return ROUNDING * torch.finfo(getattr(torch, self.precision)).eps

    @property
    def equal(self) -> bool:
        return self.agreement.difference <= self.bound

    @property
    def within_float32(self) -> bool:
        """Whether a table or a constant in float32 may be all that differs."""
        return self.agreement.difference <= ROUNDING * torch.finfo(torch.float32).eps

    def is_factor(self, factor: float) -> bool:
        """Whether the second gradient is exactly this times the first."""
        return self.agreement.cosine > 1 - self.bound and abs(self.agreement.ratio / factor - 1) <= self.bound


class Experiment:
    """The arms of one loop, each made once. ``batches`` says in a reason what their batches are.

    Raises ``CannotDecide`` where the loop makes no optimizer step.
    """

    def __init__(self, evidence: Evidence, batches: str) -> None:
        self.evidence = evidence
        self.precision = "float64"
        seen = evidence.run()
        if not seen.rounds:
            raise CannotDecide("the loop makes no optimizer step, so that no gradient is used")
        self.window = max(1, round(seen.items / seen.rounds))
        """Batches that the loop takes before it steps."""
        self._batches = batches
        self._start = SameStart()
        self._made: dict[tuple[Hashable, ...], Outcome] = {}

    def forget(self, first: Hashable) -> None:
        """Make the arms again whose keys begin with this."""
        self._made = {key: made for key, made in self._made.items() if key[0] != first}

    def in_float32(self) -> None:
        """From now on in float32: a kernel of the project's own may take no other dtype."""
        self.precision, self._start = "float32", SameStart()
        self._made.clear()

    def arm(
        self,
        key: tuple[Hashable, ...],
        batch: Callable[[], Any],
        mode: WatchingMode | None = None,
        *,
        then: Callable[[], Any] | None = None,
        fit_seed: int | None = None,
    ) -> Outcome:
        """The step over this batch, for each batch that the loop takes before it steps; under ``mode``, which derives
        from ``NoRandomness``. With ``then`` the second step, over another batch. The key names the arm: it is made
        once, and again under each mode that is given."""
        if mode is not None or key not in self._made:
            steps = [batch] if then is None else [batch, then]
            plan = from_same_start(
                self.evidence.plan(), self._start, lambda _loop: [b for each in steps for b in [each()] * self.window]
            )

            def contexts(watch: Watch) -> Iterator[AbstractContextManager[Any]]:
                yield switched(without)
                yield from (NoRandomness(),) if mode is None else mode.contexts(watch)

            record = self.evidence.rerun(
                plan,
                contexts=contexts,
                fit_seed=fit_seed,
                double=self.precision == "float64",
                before_item=getattr(mode, "before_item", plan.before_item),
                enough=lambda record: record.rounds >= len(steps),
                may_raise=True,
            )
            self._made[key] = self._outcome(record, len(steps) - 1)
        return self._made[key]

    def _outcome(self, record: Record, step: int) -> Outcome:
        low = [p.name for p in record.parameters if p.dtype in ("float16", "bfloat16")]
        gradients, refused = dict[int, Gradient](), ""
        if record.raised is not None:
            refused = f"fit raised {record.raised.summary} on {self._batches}"
        elif (self.precision == "float64" and not record.double) or low:
            refused = f"the loop computes in a low precision all the same ({', '.join((*record.lower, *low)[:1])})"
        else:
            gradients = {o: g for o in optimizers(record) if (g := consumed(record, o, step))}
            refused = "" if gradients else "the loop makes no optimizer step on these rows"
        loss = next((root.value for b in record.backwards() for root in b.roots), math.nan)
        return Outcome(gradients, refused, loss, next((str(b.place) for b in record.backwards()), ""))

    def difference(self, one: Outcome, other: Outcome) -> Difference | None:
        """None where one of them is refused, or no gradient comes in either."""
        agreements = {
            o: agreement(*vectors([one.gradients[o], other.gradients[o]]))
            for o in sorted(one.gradients.keys() & other.gradients.keys())
            if any(bool(g.any()) for g in (*one.gradients[o].values(), *other.gradients[o].values()))
        }
        if not agreements:
            return None
        worst = max(agreements, key=lambda o: agreements[o].difference)
        return Difference(agreements[worst], (other.loss, one.loss), len(one.gradients[worst]), self.precision)

    def not_finite(self, *arms: Outcome) -> str:
        """The reason where no entry of any gradient of these arms is finite."""
        found = [entries for arm in arms for gradient in arm.gradients.values() for entries in gradient.values()]
        finite = not found or any(bool(entries.isfinite().all()) for entries in found)
        return "" if finite else f"the gradient of {self._batches} is not finite"

    def by_tensor(self, one: Outcome, other: Outcome) -> dict[str, Agreement]:
        """How far two arms agree at each parameter."""
        both = (o for o in one.gradients if o in other.gradients)
        return {name: each for o in both for name, each in by_tensor(one.gradients[o], other.gradients[o]).items()}

    def require_repeatable(self, key: tuple[Hashable, ...], batch: Callable[[], Any], again: Outcome) -> None:
        """Raise ``Unreliable`` where an arm differs from the same one again (under a mode that watches, say),
        ``CannotDecide`` where it does under another seed."""
        first = self.arm(key, batch)
        found = self.difference(first, again)
        if found is not None and not found.equal:
            raise Unreliable("two identical runs of the loop differ: see determinism, and seed what draws there")
        found = self.difference(first, self.arm((*key, "reseeded"), batch, fit_seed=RESEEDED))
        if found is not None and not found.equal:
            raise CannotDecide(
                f"the loop draws random numbers from python's or numpy's generators{rng_line(self.evidence)}: draw "
                "with torch"
            )
