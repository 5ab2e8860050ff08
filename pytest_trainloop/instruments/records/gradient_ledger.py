"""What became of every gradient of one run: what arrived, was cleared, clipped and written, and which step used it.

A gradient that arrives is added to what ``.grad`` already holds. Where it holds nothing, the gradients before
it were cleared. A step uses what it reads. What ``.grad`` holds was used before where it is bit-identical to what
an earlier step left there after it had read it. Plain data, no torch.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.recording.events import Arrival, Backward, ClipCall, GradWrite, ScalerCall, Step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pytest_trainloop.recording.events import TensorSample
    from pytest_trainloop.recording.record import Record

LOGGED_NORM = 1e5
"""Limit from which a clip only computes the norm for a log: no training clips gradients there."""

MOST_SHOWN = 12
"""Calls that are shown of the order of a run."""

_CALLED = {"arrived": "backward", "read": "step", "scaled": "scale", "unscaled": "unscale_"}

What = Literal["arrived", "cleared", "assigned", "altered", "clipped", "clip called", "read", "scaled", "unscaled"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened to the gradients of some tensors."""

    at: int
    what: What
    tensors: frozenset[int]
    event: Any


@dataclass(slots=True)
class Pass:
    """One backward pass, and what became of the gradients that it brought, by tensor."""

    backward: Backward
    used: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)

    @property
    def at(self) -> int:
        return self.backward.at

    @property
    def pending(self) -> set[int]:
        """Tensors whose gradient was neither used nor cleared when the run ended."""
        brought = {i for i, found in self.backward.arrivals.items() if any(not a.incoming.zero for a in found)}
        return brought - self.used - self.cleared

    def finite(self, tensors: Collection[int] | None = None) -> bool:
        arrivals = self.backward.arrivals
        return all(a.incoming.finite for i in arrivals if tensors is None or i in tensors for a in arrivals[i])


@dataclass(slots=True)
class Use:
    """The gradient of one tensor that one step read."""

    step: Step
    tensor: int
    again: Step | None
    """The earlier step that had used a part of it already."""
    repeated: bool
    """Whether it is that very gradient: no backward pass came between."""


@dataclass(slots=True)
class Window:
    """What happened to the gradients of one optimizer from its step before to this one."""

    step: Step
    since: int
    until: int
    stepped: frozenset[int]
    """Tensors with a gradient that was not zero."""
    passes: list[Pass]
    """Backward passes that brought gradients to the optimizer's tensors."""
    clips: list[ClipCall]
    """Torch's clips that found a gradient of what was stepped."""
    covered: frozenset[int]
    """What these, or the loop by hand, treated of it."""
    norms: dict[int, float]
    """The norms of gradients before the last of these clips."""

    @property
    def optimizer(self) -> int:
        return self.step.optimizer

    @property
    def empty(self) -> bool:
        return bool(self.step.reads[-1].grads) and not self.stepped

    @property
    def left_out(self) -> frozenset[int]:
        return self.stepped - self.covered


class Ledger:
    """Every gradient of a run: ``entries`` in order, ``passes`` and ``windows`` with what became of them, ``uses``."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.passes = [Pass(b) for b in record.backwards()]
        self.entries = sorted(_entries(record), key=attrgetter("at"))
        self.assigned = {i for w in record.of(GradWrite) if w.assigns for i in w.parameters}
        self.uses: list[Use] = []
        steps = [s for s in record.innermost_steps() if s.full and s.reads and s.consumes]
        self._follow(steps)
        last: dict[int, int] = defaultdict(int)
        self.windows: list[Window] = []
        for step in steps:
            self.windows.append(self._window(step, last[step.optimizer]))
            last[step.optimizer] = self.windows[-1].until

    def between(self, since: float, until: float, tensors: Collection[int], *what: What) -> list[Entry]:
        """What happened to these tensors between two moments, in order."""
        found = (e for e in self.entries if since < e.at < until and e.what in what)
        return [e for e in found if not e.tensors.isdisjoint(tensors)]

    def after(self, at: int, tensors: Collection[int], *what: What) -> Entry | None:
        later = (e for e in self.entries if e.at > at and e.what in what)
        return next((e for e in later if not e.tensors.isdisjoint(tensors)), None)

    def before(self, at: int, tensors: Collection[int], *what: What) -> Entry | None:
        earlier = (e for e in reversed(self.entries) if e.at < at and e.what in what)
        return next((e for e in earlier if not e.tensors.isdisjoint(tensors)), None)

    def order_seen(self) -> str:
        """The calls up to the second step that used gradients, in order, as a user would name them."""
        names: list[str] = []
        for entry in self.entries:
            if entry.what != "clipped":  # the clip that was called says so itself
                names.append(_CALLED.get(entry.what) or getattr(entry.event, "by", "") or entry.what)
            if len([n for n in names if n == "step"]) == 2:
                break
        runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
        shown = [name if count == 1 else f"{count} times {name}" for name, count in runs]
        return ", ".join(shown[:MOST_SHOWN]) + (", ..." if len(shown) > MOST_SHOWN else "")

    def live(self, optimizer: int, until: int) -> list[Backward]:
        """The backward passes that an optimizer's gradients hold at a moment: neither cleared nor stepped on."""
        held = self.record.optimizers[optimizer].parameters
        steps = [s.at for s in self.record.innermost_steps() if s.optimizer == optimizer and s.at < until]
        cleared = [e.at for e in self.between(-1, until, held, "cleared")]
        return [e.event for e in self.between(max([0, *steps, *cleared]), until, held, "arrived")]

    def left_open(self) -> list[Pass]:
        """The passes at the end of a run that no step used, where earlier ones of their line were used."""
        used = {p.backward.site for p in self.passes if p.used}
        left = [p for p in self.passes if p.backward.site in used and self._is_left(p)]
        by_itself = self.record.raised is None and self.record.ended
        return left if left and by_itself and left[-1] is self.passes[-1] else []

    def _is_left(self, one: Pass) -> bool:
        """Whether nothing cleared the gradients of a pass, and no step was even tried that could use them."""
        holders = {o for i in one.pending for o in self.record.held.get(i, ())}
        tried = [(s.at, s.optimizer) for s in self.record.innermost_steps()]
        scaled = [(c.at, c.optimizer) for c in self.record.scaler_calls() if c.what == "step"]
        later = any(at > one.at and optimizer in holders for at, optimizer in (*tried, *scaled))
        return bool(one.pending) and not one.used and not one.cleared and not later

    def _window(self, step: Step, since: int) -> Window:
        until, grads = step.reads[-1].at, step.reads[-1].grads
        held = set(self.record.optimizers[step.optimizer].parameters)
        stepped = frozenset(i for i, grad in grads.items() if grad is not None and not grad.zero)
        clips = [e.event for e in self.between(since, until, stepped, "clip called")]
        clips = [c for c in clips if limits(c) or math.isnan(c.limit)]
        by_hand = self.between(since, until, stepped, "clipped", "assigned", "altered")
        covered = {i for c in clips for i in c.found}
        covered |= {i for e in by_hand if _by_hand(e.event) for i in e.tensors}
        passes = [p for p in self.passes if since < p.at < until and held & set(p.backward.arrivals)]
        norms = {i: norm for c in clips for i, norm in c.norms.items()}
        return Window(step, since, until, stepped, passes, clips, frozenset(covered & stepped), norms)

    def _follow(self, steps: list[Step]) -> None:
        grads: dict[int, _Grad] = defaultdict(_Grad)
        moments: list[tuple[int, Any, Any, Any]] = [(r.at, None, r, s) for s in steps for r in s.reads]
        for p in self.passes:
            moments += [(a.at, i, a, p) for i, found in p.backward.arrivals.items() for a in found]
        for _, index, what, owner in sorted(moments, key=itemgetter(0)):
            if index is not None:
                grads[index].arrive(index, what, owner)
                continue
            for i, value in what.grads.items():
                left = owner.left.get(i, value) if what is owner.reads[-1] else value
                if (use := grads[i].use(i, value, owner, left)) is not None:
                    self.uses.append(use)


@dataclass(slots=True)
class _Grad:
    """What one tensor's ``.grad`` holds."""

    pending: list[Pass] = field(default_factory=list)
    used_by: Step | None = None
    left: TensorSample | None = None
    again: Step | None = None
    arrived: bool = False

    def arrive(self, index: int, arrival: Arrival, by: Pass) -> None:
        self.arrived = True
        if arrival.residual is None or arrival.residual.zero:
            self._clear(index, but=by)
            self.again = None
        elif not self.pending:
            self.again = self.used_by if self.used_by is not None and arrival.residual.same(self.left) else None
        if not arrival.incoming.zero and by not in self.pending:
            self.pending.append(by)

    def use(self, index: int, value: TensorSample | None, step: Step, left: TensorSample | None) -> Use | None:
        if value is None or value.zero:
            self._clear(index)
            self.again = self.used_by = None
            return None
        repeated = not self.pending and not self.arrived and self.used_by is not None and value.same(self.left)
        use = Use(step, index, self.used_by if repeated else self.again, repeated)
        for one in self.pending:
            one.used.add(index)
        self.pending, self.again, self.arrived, self.used_by, self.left = [], None, False, step, left
        return use

    def _clear(self, index: int, but: Pass | None = None) -> None:
        for one in self.pending:
            if one is not but:
                one.cleared.add(index)
        self.pending = []


def limits(call: ClipCall) -> bool:
    """Whether a call is a clip, and not the norm for a log."""
    return call.limit < LOGGED_NORM


def _by_hand(write: GradWrite) -> bool:
    """Whether the loop itself wrote gradients, or clipped them by a function of its own."""
    return (
        write.how != "clipped"
        or not write.by.startswith("clip_grad")
        or write.limit is None
        or (write.limit < LOGGED_NORM)
    )


def _entries(record: Record) -> Iterator[Entry]:
    everything = frozenset(p.index for p in record.parameters)
    for e in record.events:
        if isinstance(e, Backward) and e.kind == "backward":
            yield Entry(e.at, "arrived", frozenset(e.arrivals), e)
        elif isinstance(e, GradWrite):
            what: What = "cleared" if e.how == "none" or e.how == "zero" else "assigned" if e.assigns else e.how
            yield Entry(e.at, what, frozenset(e.parameters), e)
        elif isinstance(e, ClipCall):
            yield Entry(e.at, "clip called", frozenset(e.found), e)
        elif isinstance(e, Step) and e.reads and e.consumes and not e.nested:
            for read in e.reads:
                yield Entry(read.at, "read", frozenset(i for i, g in read.grads.items() if g is not None), e)
        elif isinstance(e, ScalerCall) and e.what == "scale":
            yield Entry(e.at, "scaled", everything, e)
        elif isinstance(e, ScalerCall) and e.what in ("unscale", "step"):
            of = everything if e.optimizer is None else frozenset(record.optimizers[e.optimizer].parameters)
            yield Entry(e.at, "unscaled", of, e)
