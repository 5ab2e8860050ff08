"""Weights that an optimizer moves and that nothing reads after the first step.

No call of torch is given them (nor a view of them) once their optimizer has stepped, though gradients go on coming.
That is the suspicion; moving them decides: moved after the first step they change nothing that is backpropagated, bit
for bit. Where their gradients are assigned by hand the run is long, since copies that are brought up to date now and
then look the same for a while, and moved before ``fit`` they must change what is backpropagated.
"""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.weights_are_read.reads import NO_READS, Reads
from pytest_trainloop.gradients.dependence import mover
from pytest_trainloop.paths import BUILD_CALLER, FIT_CALLER
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

SHORT, LONG = 12, 60
"""Steps of the runs that decide: where gradients arrive by backward passes, and where they are assigned."""


@dataclass(frozen=True, slots=True)
class Unread:
    """``names`` are read until the first step of their optimizer and never after it."""

    names: tuple[str, ...]
    steps: int
    """Steps in which they had a gradient and were not read."""
    of: int
    """Parameters that the optimizers hold."""
    until: str
    """Until when they are read, in words."""
    root: str
    """The line at which the loss is backpropagated."""
    read: str
    """The line at which they are read last."""


def unread_weights(evidence: Evidence) -> Unread | None:
    reads = evidence.shared(Reads.of)
    record = reads.record
    if record is None or record.raised is not None:
        return None
    names, assigned = _suspects(record, reads)
    if not names:
        return None
    steps = LONG if assigned else SHORT
    base = _roots(evidence, steps, lambda watch: None)
    if not base or base != _roots(evidence, steps, lambda watch: None, late=names):
        return None
    if assigned and base == _roots(evidence, steps, mover(names, jitter=False)):
        return None  # nothing depends on them at all: a gradient that arrives would show that something does
    indices = {p.index for p in record.parameters if p.name in names}
    until = "before the first step" if indices & reads.last.keys() else "while the loop is built"
    root = next((str(b.place) for b in record.autograd_passes()), "")
    return Unread(names, steps - 1, len(record.held), until, root, _LastRead.of(evidence, names).line or root)


def _suspects(record: Record, reads: Reads) -> tuple[tuple[str, ...], bool]:
    """Parameters that are not read after the first step, and whether some gradients of theirs are assigned."""
    names, assigned = [], False
    for parameter in record.parameters:
        holders = record.held.get(parameter.index, ())
        steps = [s for s in record.innermost_steps() if s.optimizer in holders]
        later = [s for s in steps[1:] if _consumes(s.reads, parameter.index)]
        if len(later) < 2 or parameter.index not in record.changed():
            continue
        if reads.last.get(parameter.index, 0) > steps[0].at:
            continue
        names.append(parameter.name)
        arrived = any(not a.incoming.zero and a.at > steps[0].at for a in record.arrivals(parameter.index))
        assigned = assigned or not arrived
    return tuple(names), assigned


def _consumes(reads: Sequence[Any], index: int) -> bool:
    return any((grad := read.grads.get(index)) is not None and not grad.zero for read in reads)


def _roots(evidence: Evidence, steps: int, prepare: Callable[[Watch], None], late: Sequence[str] = ()) -> list[float]:
    """What is backpropagated in a run of so many steps; ``late`` names parameters that are moved after the first."""
    moving = _MovesLater(late)
    record = evidence.rerun(
        prepare=prepare,
        contexts=moving.contexts,
        enough=lambda r: r.rounds >= steps,
        count=max(evidence.plan().count, steps + 1),
        may_raise=True,
    )
    if record.raised is not None or (late and not moving.moved):
        return []
    return [root.value for b in record.of(Backward) for root in b.roots if math.isfinite(root.value)]


class _MovesLater(WatchingMode):
    """Moves parameters once, at the first call after the first step."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self.moved = False

    def contexts(self, watch: Watch) -> tuple[contextlib.AbstractContextManager[Any], ...]:
        return (self.watching(watch), self) if self._names else ()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.moved and self.watch.record.rounds:
            self.moved = True
            with self.watch.suspended():
                chosen = set(self._names)
                for entry, tensor in zip(self.watch.table.entries, self.watch.table.tensors, strict=True):
                    if entry.name in chosen:
                        tensor.data.add_(torch.full_like(tensor.data, 0.25))
        return super().call(name, func, args, kwargs)


class _LastRead(WatchingMode):
    """The line of the last call that is given one of the named parameters, from building to the second step."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self._places: dict[int, str] = {}
        self.line = ""

    @classmethod
    def of(cls, evidence: Evidence, names: Sequence[str]) -> _LastRead:
        found = cls(names)
        evidence.rerun(
            around=lambda: _Noting(found.note),
            contexts=lambda watch: (found.watching(watch),),
            enough=lambda r: r.rounds >= 1,
            may_raise=True,
        )
        return found

    def note(self, tensor: torch.Tensor) -> None:
        """Note a read by the line that is running, but for those of an optimizer's step."""
        if (self._watch is None or not self._watch.stepping) and (place := _line()):
            self._places[id(tensor)] = place

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with super().watching(watch):
            try:
                yield
            finally:
                for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                    if entry.name in self._names:
                        self.line = self._places.get(id(tensor), "") or self.line


def _line() -> str:
    """The project's nearest line, inside of what builds the loop or runs it; empty elsewhere."""
    frame: FrameType | None = sys._getframe(1)
    nearest = ""
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename in (FIT_CALLER, BUILD_CALLER):
            return nearest
        if not nearest and layer(filename) == 2:
            nearest = str(place_of(filename, frame.f_lineno))
        frame = frame.f_back
    return ""


class _Noting(FunctionMode):
    """Hands on each parameter that a call reads; attributes are no reads."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) not in NO_READS and not name.endswith("_"):
            for tensor in tensors_in(args, kwargs):
                if isinstance(tensor, torch.nn.Parameter):
                    self._note(tensor)
        return super().call(name, func, args, kwargs)
