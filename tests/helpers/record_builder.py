"""Records made event by event, without training: gradients add up as torch's would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.events import (
    Arrival,
    Backward,
    Event,
    GradWrite,
    Move,
    Place,
    Raised,
    Read,
    Root,
    ScalerCall,
    SchedulerStep,
    Step,
    TensorSample,
)
from pytest_trainloop.recording.record import Optimizer, Parameter, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class RecordBuilder:
    """``RecordBuilder([0, 1], [2])`` has three parameters in two optimizers.

    What stands in each ``.grad`` is kept as the list of the gradients added up there, so that two samples are the same
    only where torch would hold the same bits.
    """

    def __init__(self, *held: Sequence[int]) -> None:
        count = 1 + max((i for group in held for i in group), default=0)
        self.parameters = [Parameter(i, f"p{i}", "model", (2,), "float32", "cpu", True) for i in range(count)]
        self.optimizers = [Optimizer(i, "SGD", True, tuple(group)) for i, group in enumerate(held)]
        self.events: list[Event] = []
        self.moves: list[Move] = []
        self.grads: dict[int, list[str]] = {}
        self.items = 0
        self._clock = 0

    def backward(self, *on: int, line: int = 20, zero: bool = False, same_batch: bool = False) -> Backward:
        """A backward pass from this line that reaches these parameters; ``zero``: with zeros only, ``same_batch``: on
        the batch of the pass before."""
        self.items += not same_batch
        roots = [Root(True, (), 1.0)]
        event = self.add(Backward, line, "loss.backward()", kind="backward", roots=roots, item=self.items)
        for index in on or range(len(self.parameters)):
            incoming = [] if zero else [f"b{event.at}"]
            before = self.grads.get(index)
            event.arrivals.setdefault(index, []).append(
                Arrival(self._tick(), sample(incoming), None if before is None else sample(before), 0)
            )
            self.grads[index] = (before or []) + incoming
        event.until = self._tick()
        return event

    def step(
        self, optimizer: int = 0, *, line: int = 30, closure: Sequence[Callable[[], Any]] = (), **how: Any
    ) -> Step:
        """A step that reads every ``.grad`` that its optimizer holds, after each call of a closure or once, and
        computes with what it finds."""
        event = self.add(Step, line, "optimizer.step()", optimizer=optimizer, asked=True, **how)
        held = self.optimizers[optimizer]
        for call in closure or [lambda: None]:
            call()
            event.reads.append(Read(self._tick(), self._samples(held.parameters)))
        event.computed = how.get("computed", any(g is not None for g in event.reads[-1].grads.values()))
        event.left = self._samples(held.parameters)
        event.until = self._tick()
        if not event.nested:
            held.steps += 1
        return event

    def zero(self, *on: int, line: int = 10, to_none: bool = True, by: str = "zero_grad") -> GradWrite:
        chosen = list(on or range(len(self.parameters)))
        for index in chosen:
            self.grads.pop(index, None)
            if not to_none:
                self.grads[index] = []
        return self.add(GradWrite, line, f"{by}()", how="none" if to_none else "zero", parameters=chosen, by=by)

    def assign(self, *on: int, line: int = 25) -> GradWrite:
        """Gradients assigned by user code."""
        event = self.add(GradWrite, line, "p.grad = g", how="assigned", parameters=list(on), by="grad = ...")
        self.grads.update({index: [f"assigned{event.at}"] for index in on})
        return event

    def scale(self, *on: int, line: int = 35) -> GradWrite:
        """Gradients multiplied in place, as where momentum is kept in ``.grad``."""
        event = self.add(GradWrite, line, "p.grad.mul_(0.9)", how="altered", parameters=list(on), by="mul_")
        self.grads.update({index: [*self.grads[index], f"scaled{event.at}"] for index in on})
        return event

    def clip(self, *on: int, line: int = 28, limit: float | None = 1.0, bites: bool = True) -> GradWrite:
        chosen = list(on or self.grads)
        before = self._samples(chosen)
        event = self.add(GradWrite, line, "clip_grad_norm_()", how="clipped", parameters=chosen, by="clip_grad_norm_")
        if bites:
            self.grads.update({i: [*self.grads[i], f"clipped{event.at}"] for i in chosen if i in self.grads})
        event.limit = limit
        event.before = {i: f for i, f in before.items() if f is not None}
        event.after = {i: f for i, f in self._samples(chosen).items() if f is not None}
        return event

    def scaler(self, what: Any, *, line: int = 22, enabled: bool = True, optimizer: int | None = 0) -> ScalerCall:
        holder = optimizer if what in ("unscale", "step") else None
        fields = {"what": what, "enabled": enabled, "scaler": 0, "optimizer": holder, "factor": 1024.0}
        return self.add(ScalerCall, line, f"scaler.{what}()", **fields)

    def scheduler(self, *, line: int = 40, metric: bool = False) -> SchedulerStep:
        return self.add(SchedulerStep, line, "scheduler.step()", scheduler="StepLR", optimizer=0, metric=metric)

    def move(self, *on: int) -> None:
        """User code changes these parameters here."""
        since = self._tick()
        self.moves.append(Move(since, self._tick(), on, None))

    def record(self, *, raised: str = "", ended: bool = True) -> Record:
        error = Raised("RuntimeError", f"RuntimeError: {raised}", "", Place("train.py", 1), raised) if raised else None
        rounds = max((o.steps for o in self.optimizers), default=0)
        return Record(
            parameters=self.parameters,
            optimizers=self.optimizers,
            events=self.events,
            raised=error,
            rounds=rounds,
            steps=sum(o.steps for o in self.optimizers),
            items=self.items,
            full_until=self._tick(),
            ended=ended and not raised,
            moves=self.moves,
        )

    def _samples(self, indices: Sequence[int]) -> dict[int, TensorSample | None]:
        return {i: sample(self.grads[i]) if i in self.grads else None for i in indices}

    def add(self, event_type: Any, line: int, code: str, **fields: Any) -> Any:
        event = event_type(at=self._tick(), place=Place("train.py", line, code), site=(("train.py", line),), **fields)
        self.events.append(event)
        return event

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def sample(parts: Sequence[str]) -> TensorSample:
    """A gradient that is the sum of these; of none of them it is zero."""
    return TensorSample(float(len(parts)), " ".join(parts).encode())
