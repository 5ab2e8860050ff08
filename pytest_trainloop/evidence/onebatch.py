"""Runs of a loop on one fixed batch: as it is, with one thing changed, with plain Adam or nothing in place of its
steps (RULINGS R6)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop import batch as nests
from pytest_trainloop.evidence.alike import RowsAlike
from pytest_trainloop.evidence.batches import first_batches
from pytest_trainloop.evidence.curve import PHASES, Losses, factor, halved, kind_of, level, mean, still_falls
from pytest_trainloop.evidence.instead import Adam, Instead, stay
from pytest_trainloop.evidence.preserve import seed_all
from pytest_trainloop.evidence.ratios import Ratios
from pytest_trainloop.observe.events import ScalerCall, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.evidence.instead import Move
    from pytest_trainloop.evidence.run import RunPlan
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.observe.record import Record
    from pytest_trainloop.observe.watch import Watch

    Contexts = Callable[[Watch], Any]
    Progress = Callable[[int, int, float], None]
    """Told of a step, of the most steps that may follow, and of the loss."""

FIRST, MOST = 200, 300
"""Own steps on one batch, and how many while the loss still falls."""

REFERENCE_RATES = (3e-3, 2e-2)
REFERENCE_STEPS = 150
"""Rates and steps of the plain Adam (RULINGS R6)."""

STILL_STEPS = 4 * PHASES
"""Steps of a run in which no weight moves."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One run on one batch: the loss and the largest rate of each step, the record.

    ``done`` is what the loss changed by over the steps that ``expected`` covers: what its gradients say that it
    should have changed by.
    """

    losses: tuple[float, ...]
    rates: tuple[float, ...]
    record: Record
    done: float = math.nan
    expected: float = math.nan

    @property
    def ended(self) -> bool:
        """Whether ``fit`` came back by itself before it made the steps that it was to make."""
        return self.record.ended and not self.record.cut_short and self.steps < FIRST

    @property
    def halved(self) -> bool:
        return halved(self.losses)

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def start(self) -> float:
        return mean(self.losses[:PHASES])

    @property
    def end(self) -> float:
        return level(self.losses)


@dataclass(slots=True)
class OneBatch:
    """The runs, each made when it is first asked for. ``seen`` is the watched run, ``plan`` how it was made; ``own``
    makes a run whose steps count as the loop's own, ``other`` one with something of ours in it; ``progress`` is told
    how far they are."""

    seen: Record
    plan: RunPlan
    own: Callable[[RunPlan], Record]
    other: Callable[[RunPlan], Record]
    progress: Progress = lambda step, most, loss: None
    ratios: Ratios = field(default_factory=Ratios)
    rows: int = 0
    _made: dict[object, Curve] = field(default_factory=dict)
    _alike: RowsAlike | None = None

    @property
    def curve(self) -> Curve:
        """The loop itself, until its loss is halved or its steps are spent."""
        return self._once("own", self.ratios.contexts, Patience(self.progress, FIRST, MOST), self.own)

    def changed(self, name: str, contexts: Contexts) -> Curve:
        """The loop itself with one thing changed."""
        return self._once(name, contexts, Patience(self.progress, FIRST, FIRST), self.other)

    @property
    def still(self) -> Curve:
        """The loop with no weight moving."""
        return self._instead("still", stay, STILL_STEPS)

    def reference(self, rate: float) -> Curve:
        """The loop with plain Adam at this rate in place of its steps."""
        return self._instead(rate, Adam(rate), REFERENCE_STEPS)

    def rows_alike(self, rate: float) -> tuple[Curve, bool]:
        """The same where every row of the model's input is the first, and whether they could be made so."""
        self._alike = self._alike or RowsAlike(self.rows)
        curve = self._instead(("alike", rate), Adam(rate), REFERENCE_STEPS, self._alike.contexts)
        return curve, self._alike.made

    def seconds(self, steps: int) -> float:
        """How long so many further steps take, by what the loop's own took."""
        return self.curve.record.seconds / max(1, self.curve.record.rounds) * steps

    @property
    def spent(self) -> float:
        """How many seconds the runs took that are not the loop's own."""
        return sum(curve.record.seconds for name, curve in self._made.items() if name != "own")

    def _instead(self, name: object, move: Move, steps: int, also: Contexts = lambda watch: ()) -> Curve:
        instead = Instead(move, kind_of(self.seen))
        made = name in self._made
        patience = Patience(self.progress, steps, steps, eager=False)
        curve = self._once(name, lambda watch: (*also(watch), *instead.contexts(watch)), patience, self.other)
        known = [] if made else [at for at in instead.work if at < curve.steps]
        if known:
            scale = next((e for e in curve.record.of(ScalerCall) if e.what == "scale" and e.enabled), None)
            done = curve.losses[max(known)] - curve.losses[0]
            expected = instead.work[max(known)] / (factor(scale) if scale else 1.0)
            curve = self._made[name] = replace(curve, done=done, expected=expected)
        return curve

    def _once(self, name: object, contexts: Contexts, patience: Patience, run: Callable[[RunPlan], Record]) -> Curve:
        if name not in self._made:
            window = max(1, round(self.seen.items / max(1, self.seen.rounds)))
            record = run(
                replace(
                    self.plan,
                    count=window * MOST,
                    read_ahead=None,
                    stream=self._stream,
                    before_item=lambda number: seed_all(self.plan.seed + number % PHASES),
                    prepare=patience.prepare,
                    enough=patience.enough,
                    contexts=contexts,
                )
            )
            losses = Losses(record).read()
            self._made[name] = Curve(tuple(losses), _rates(record), record)
        return self._made[name]

    def _stream(self, loop: TrainLoop) -> Iterator[Any]:
        """The same batch again and again."""
        batch = first_batches(loop, 1)[0] if loop.batch is None else loop.batch
        self.rows = nests.rows(batch)
        return itertools.repeat(batch)


class Patience:
    """When a run on one batch has shown enough: its loss is halved, is not finite any more, or its steps are spent.

    Losses are read every fourth step: on a GPU each reading waits for it.
    """

    def __init__(self, progress: Progress, first: int, most: int, *, eager: bool = True) -> None:
        self._progress, self._first, self._most, self._eager = progress, first, most, eager
        self._losses: Losses | None = None
        self._steps = 0
        self._over = False

    def prepare(self, watch: Watch) -> None:
        self._watch = watch
        self._losses = Losses(watch.record)

    def enough(self, record: Record) -> bool:
        if self._over or record.steps < self._steps + PHASES or self._losses is None:
            return self._over
        self._steps = record.steps
        with self._watch.quietly():
            self._watch.reader.resolve()
        losses = self._losses.read()
        if losses:
            self._progress(len(losses), self._most, losses[-1])
        lost = bool(losses) and not any(map(math.isfinite, losses[-PHASES:]))
        spent = len(losses) >= self._most or (len(losses) >= self._first and not still_falls(losses))
        self._over = lost or spent or (self._eager and halved(losses))
        return self._over


def _rates(record: Record) -> tuple[float, ...]:
    """The largest rate of each step of the optimizer that steps most often."""
    if not record.optimizers:
        return ()
    lead = max(record.optimizers, key=lambda o: o.steps).index
    steps = [s for s in record.of(Step) if s.optimizer == lead and not s.nested]
    return tuple(max((r for r in s.rates if not math.isnan(r)), default=math.nan) for s in steps)
