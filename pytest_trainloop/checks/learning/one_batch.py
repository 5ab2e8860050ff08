"""Runs of a loop on one fixed batch: as it is, with one thing changed, with plain Adam or nothing in place of its
steps (docs/how-it-decides.md#one-fixed-batch)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.learning.limits import OWN_STEPS
from pytest_trainloop.checks.learning.loss_curve import (
    PHASES,
    Losses,
    factor,
    halved,
    kind_of,
    level,
    mean,
    still_falls,
)
from pytest_trainloop.checks.learning.reference_adam import Adam, ReferenceSteps, stay
from pytest_trainloop.checks.learning.swapped_rows import OtherRows, all_the_first, each_its_neighbours
from pytest_trainloop.checks.learning.update_sizes import Ratios
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.recording.events import ScalerCall, Step
from pytest_trainloop.runs.batch_stream import first_batch
from pytest_trainloop.runs.process_state import seed_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.checks.learning.reference_adam import Move
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence, Progress
    from pytest_trainloop.runs.run import RunPlan

    Contexts = Callable[[Watch], Any]
    """Called with a step, the most steps that may follow, and the loss."""
    Going = Callable[[Sequence[float], Sequence[float]], bool]
    """Whether losses and rates are those of a loop that needs no further look."""

SURE, FIRST = 100, 200
"""Own steps on one batch after which a loop that goes on well is believed, and all others are judged."""

TOO_SMALL = 2e-6
"""Update relative to the weights below which nothing happens: a hundred thousand steps in one direction move them by a
fifth (docs/how-it-decides.md#update-sizes-and-the-loss-at-initialisation)."""

HELD = 0.1
"""Share of its peak down to which a rate has not decayed yet."""

REFERENCE_LRS = (3e-3, 2e-2)
REFERENCE_STEPS = 150
"""Rates and steps of the plain Adam."""

LITTLE = 0.05
"""Share of the first loss that must be taken off it before anything can be said to be learned."""

IN_VAIN = 160
"""Steps at a rate above zero after which a loss that comes again bit for bit will not change any more: an optimizer of
the project's own may gather for as long (see every_param_moves)."""

ROLLED_STEPS = 24
"""Steps of a run whose rows are moved to their neighbours' places."""

STILL_STEPS = 4 * PHASES
"""Steps of a run in which no weight moves."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One run on one batch: the loss and the largest rate of each step, the record.

    ``done`` is what the loss changed by over the steps that ``expected`` covers: what its gradients say that it
    should have changed by.
    """

    losses: tuple[float, ...]
    lrs: tuple[float, ...]
    record: Record
    done: float = math.nan
    expected: float = math.nan

    @property
    def ended(self) -> bool:
        """Whether ``fit`` came back by itself before it made the steps that it was to make."""
        return self.record.ended and not self.record.cut_short and self.steps < SURE

    @property
    def halved(self) -> bool:
        return halved(self.losses)

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def is_stuck(self) -> bool:
        """Whether the loss fell by less than a twentieth, or is not finite in the end."""
        return not self.start - self.end >= LITTLE * abs(self.start)

    @property
    def start(self) -> float:
        return mean(self.losses[:PHASES])

    @property
    def end(self) -> float:
        return level(self.losses)


class OneBatchRuns:
    """The runs on one fixed batch, by how many own steps they may make; for ``evidence.shared``."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._made: dict[int, OneBatch] = {}

    @property
    def made(self) -> OneBatch | None:
        """Those of the most own steps among all that were asked for."""
        return self._made[max(self._made)] if self._made else None

    def of(self, steps: int = OWN_STEPS) -> OneBatch:
        """Those of this many own steps at most."""
        evidence = self._evidence
        if steps not in self._made:
            seen = evidence.run()
            progress: Progress = lambda *at: evidence.progress(*at)  # noqa: E731  it may be another by then
            self._made[steps] = OneBatch(
                seen,
                evidence.plan(),
                evidence.rerun,
                progress,
                steps,
                own_data=lambda: evidence.shared(makes_own_data),
            )
        return self._made[steps]


@dataclass(slots=True)
class OneBatch:
    """The runs, each made when it is first asked for. ``seen`` is the watched run, ``plan`` how it was made; ``run``
    makes one by a plan; ``progress`` is called with how far they are. ``most`` is how many own steps there are;
    ``reached`` says whether a step of the reference optimizer found a gradient, ``differing`` in how many tensors of
    the batch rows differ, ``own_data`` that the loop reads nothing of that batch."""

    seen: Record
    plan: RunPlan
    run: Callable[[RunPlan], Record]
    progress: Progress
    most: int
    ratios: Ratios = field(default_factory=Ratios)
    own_data: Callable[[], bool] = lambda: False
    rows: int = 0
    differing: int = 0
    _made: dict[object, Curve] = field(default_factory=dict)
    _rows: dict[str, OtherRows] = field(default_factory=dict)
    reached: bool = False

    @property
    def made(self) -> dict[object, Curve]:
        """The runs that were made: the loop as it is is "own", one with plain Adam at a rate is that rate."""
        return dict(self._made)

    @property
    def curve(self) -> Curve:
        """The loop itself, until its loss is halved or its steps are spent."""
        patience = Patience(self.progress, self.most, FIRST, lambda losses, lrs: _going(losses, lrs, self.ratios))
        return self._as_it_is("own", self.ratios.contexts, patience, own_steps=True)

    def changed(self, name: str, contexts: Contexts) -> Curve:
        """The loop itself with one thing changed."""
        return self._as_it_is(name, contexts, Patience(self.progress, FIRST))

    @property
    def going(self) -> bool:
        """Whether the loop lowers its loss by steps that count, at rates that have not decayed: no fault any more,
        however slow it is."""
        return _going(self.curve.losses, self.curve.lrs, self.ratios)

    @property
    def quick(self) -> Curve:
        """The loop with the faster plain Adam in place of its steps, until its loss is halved."""
        return self._instead("quick", Adam(max(REFERENCE_LRS)), Patience(self.progress, REFERENCE_STEPS))

    @property
    def still(self) -> Curve:
        """The loop with no weight moving."""
        return self._instead("still", stay, Steps(self.progress, STILL_STEPS))

    def reference(self, lr: float) -> Curve:
        """The loop with plain Adam at this rate in place of its steps."""
        return self._instead(lr, Adam(lr), Steps(self.progress, REFERENCE_STEPS))

    def with_equal_inputs(self, lr: float) -> tuple[Curve, bool]:
        """The same where every row of the model's input is the first, and whether they could be made so."""
        rows = self._rows.setdefault("equal inputs", OtherRows(self.rows, all_the_first))
        steps = Steps(self.progress, REFERENCE_STEPS)
        return self._instead(("equal inputs", lr), Adam(lr), steps, rows.contexts), rows.made

    def one_row(self, lr: float) -> Curve:
        """The same where all rows of the batch are copies of the first, with all that they hold besides the model's
        input."""
        plan = replace(self.plan, stream=self._stream_of_one_row)
        return self._instead(("one row", lr), Adam(lr), Steps(self.progress, REFERENCE_STEPS), plan=plan)

    def rows_rolled(self, lr: float) -> tuple[Curve, Curve, bool]:
        """The first steps of plain Adam, and the same with every row moved to its neighbour's place, both in float64;
        and whether that could be made."""
        rows = self._rows.setdefault("rolled", OtherRows(self.rows, each_its_neighbours))
        wide = replace(self.plan, double=True)
        plain = self._instead(("straight", lr), Adam(lr), Steps(self.progress, ROLLED_STEPS), plan=wide)
        steps = Steps(self.progress, ROLLED_STEPS)
        rolled = self._instead(("rolled", lr), Adam(lr), steps, rows.contexts, plan=wide)
        return plain, rolled, rows.made and plain.record.double and rolled.record.double

    @property
    def lost_before(self) -> bool:
        """Whether all rows that come in at the first layers are the same."""
        rolled = self._rows.get("rolled")
        return rolled is not None and rolled.came and not rolled.changed and not rolled.passed_on

    def _instead(
        self,
        name: object,
        move: Move,
        patience: Steps,
        also: Contexts = lambda watch: (),
        *,
        plan: RunPlan | None = None,
    ) -> Curve:
        if name in self._made:
            return self._made[name]
        instead = ReferenceSteps(move, kind_of(self.seen))
        contexts: Contexts = lambda watch: (*also(watch), *instead.contexts(watch))  # noqa: E731
        curve = self._run(plan or self.plan, contexts, patience)
        self.reached = self.reached or instead.reached
        known = [at for at in instead.work if at < curve.steps]
        if known:
            scale = next((e for e in curve.record.of(ScalerCall) if e.what == "scale" and e.enabled), None)
            done = curve.losses[max(known)] - curve.losses[0]
            expected = instead.work[max(known)] / (factor(scale) if scale else 1.0)
            curve = replace(curve, done=done, expected=expected)
        self._made[name] = curve
        return curve

    def _as_it_is(self, name: object, contexts: Contexts, patience: Steps, *, own_steps: bool = False) -> Curve:
        if name not in self._made:
            self._made[name] = self._run(self.plan, contexts, patience, own_steps=own_steps)
        return self._made[name]

    def _run(self, plan: RunPlan, contexts: Contexts, patience: Steps, *, own_steps: bool = False) -> Curve:
        window = max(1, round(self.seen.items / max(1, self.seen.rounds)))
        plan = replace(
            plan,
            count=window * max(FIRST, self.most),
            read_ahead=None,
            stream=plan.stream or self._stream,
            before_item=lambda number, _item: seed_all(self.plan.seed + number % PHASES),
            prepare=patience.prepare,
            enough=patience.enough,
            contexts=contexts,
            own_steps=own_steps,
            may_raise=True,
        )
        record = self.run(plan)
        return Curve(tuple(Losses(record).read()), _lrs(record), record)

    def _stream(self, loop: TrainLoop) -> Iterator[Any]:
        """The same batch again and again."""
        batch = first_batch(loop)
        self.rows = nested.rows(batch)
        self.differing = sum(_rows_differ(t, self.rows) for t in nested.tensors(batch))
        return itertools.repeat(batch)

    def _stream_of_one_row(self, loop: TrainLoop) -> Iterator[Any]:
        batch = next(self._stream(loop))
        try:
            return itertools.repeat(nested.take(batch, [0] * self.rows))
        except TypeError:
            return itertools.repeat(batch)


class Steps:
    """Ends a run after so many steps. Losses are read every fourth: on a GPU each reading waits."""

    def __init__(self, progress: Progress, most: int) -> None:
        self._progress, self._most = progress, most
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
        with self._watch.suspended():
            self._watch.reader.resolve()
        losses = self._losses.read()
        if losses:
            self._progress(len(losses), self._most, losses[-1])
            lost = not any(map(math.isfinite, losses[-PHASES:]))
            self._over = lost or self._seen_enough(losses, _lrs(record))
        return self._over

    def _seen_enough(self, losses: Sequence[float], lrs: Sequence[float]) -> bool:
        return len(losses) >= self._most


class Patience(Steps):
    """Ends it also once the loss is halved, falls on and on (``going``), does not change any more, or, from ``first``
    on, does not change."""

    def __init__(
        self, progress: Progress, most: int, first: int | None = None, going: Going = lambda losses, lrs: False
    ) -> None:
        super().__init__(progress, most)
        self._first, self._going = first or most, going

    def _seen_enough(self, losses: Sequence[float], lrs: Sequence[float]) -> bool:
        spent = len(losses) >= self._most or (len(losses) >= self._first and not still_falls(losses))
        sure = SURE <= len(losses) < FIRST and self._going(losses, lrs)
        return spent or sure or halved(losses) or _in_vain(losses, lrs)


def _going(losses: Sequence[float], lrs: Sequence[float], ratios: Ratios) -> bool:
    known = [lr for lr in lrs if not math.isnan(lr)]
    held = not known or known[-1] >= HELD * max(known)
    fell = mean(losses[:PHASES]) - level(losses) >= LITTLE * abs(losses[0])
    return held and fell and still_falls(losses) and not ratios.largest < TOO_SMALL


def _in_vain(losses: Sequence[float], lrs: Sequence[float]) -> bool:
    """Whether nothing changes although the rates are not zero."""
    last = losses[-IN_VAIN:]
    same = len(last) == IN_VAIN and all(last[i] == last[i - PHASES] for i in range(PHASES, IN_VAIN))
    return same and all(lr > 0 for lr in lrs[-IN_VAIN:])


def _rows_differ(tensor: torch.Tensor, rows: int) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_nested and tensor.dim() > 0 and len(tensor) == rows > 1
    return plain and not torch.equal(tensor, tensor[:1].expand_as(tensor))


def _lrs(record: Record) -> tuple[float, ...]:
    """The largest rate of each step of the optimizer that steps most often."""
    if not record.optimizers:
        return ()
    lead = max(record.optimizers, key=lambda o: o.steps).index
    steps = [s for s in record.of(Step) if s.optimizer == lead and not s.nested]
    return tuple(max((r for r in s.lrs if not math.isnan(r)), default=math.nan) for s in steps)
