"""Weights that are not read, read twice as two parameters, made in every pass, or written over by their masters.

Each suspicion comes from one run that notes which parameters the calls of torch are given. A further run decides.
"""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from pytest_trainloop.checks.wiring.weights_are_read.causes import found
from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import code_of
from pytest_trainloop.core.paths import BUILD_CALLER, FIT_CALLER
from pytest_trainloop.instruments.gradients.dependence import difference, mover
from pytest_trainloop.instruments.gradients.tolerances import ROUNDING
from pytest_trainloop.instruments.gradients.vectors import values
from pytest_trainloop.instruments.optimizers.spacing import spacings
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.samples import storage_of
from pytest_trainloop.recording.source import here, layer, place_of
from pytest_trainloop.recording.torch_names import ATTRIBUTES, AUTOGRAD_CALLS, CONSTANT_ATTRIBUTES, SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

NOTED_STEPS = 4
"""Optimizer steps in which reads are noted, and in which one parameter is compared with two."""

SHORT, LONG = 12, 60
"""Steps of the runs with moved weights: where gradients arrive by backward passes, and where they are assigned."""

LOW = ("bfloat16", "float16")

HALF = 0.5
"""Share of a weight's entries that are more than one ULP from its master, where rounding does not explain it."""

NO_READS = SIZES | AUTOGRAD_CALLS | CONSTANT_ATTRIBUTES | frozenset("requires_grad_ is_floating_point __set__".split())


@dataclass(slots=True)
class MadeInForward:
    """Parameters that a line makes in each call of a module of the model."""

    place: Place
    module: str
    shapes: dict[tuple[int, ...], None] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    """Optimizer steps before each use of a new one."""
    between: list[torch.Tensor] = field(default_factory=list)
    """Those that are drawn, and that a result of trained weights meets."""
    trained: int = 0
    """Of these, how many got a gradient."""


class Reads(WatchingMode):
    """Notes which parameters the calls of a run are given."""

    record: Record

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, int] = {}
        """By the index of a parameter, the position in the record at which it was last given to a call."""
        self.shared: list[tuple[int, int]] = []
        """Pairs of parameters that optimizers hold and that have the same entries in memory."""
        self.created: dict[tuple[str, int], MadeInForward] = {}
        """By line: the parameters that a call of the model makes there."""
        self._storages: dict[int, list[int]] = {}
        self._known = -1
        self._new: dict[int, tuple[torch.Tensor, MadeInForward | None]] = {}
        """New parameters by identity, kept so that no identity comes again."""

    @classmethod
    def of(cls, evidence: Evidence) -> Reads:
        """What the first steps of the loop read."""
        reads = cls()
        reads.record = evidence.rerun(contexts=reads.contexts, enough=lambda r: r.rounds >= NOTED_STEPS, may_raise=True)
        return reads

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with super().watching(watch):
            try:
                yield
            finally:
                places: dict[object, int] = {}
                with watch.suspended():
                    for index in sorted(watch.record.held):
                        tensor = watch.table.tensors[index]
                        if storage_of(tensor) and tensor.is_leaf:
                            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
                            if places.setdefault(key, index) != index:
                                self.shared.append((places[key], index))
                    for made in self.created.values():
                        made.trained += sum(t.grad is not None for t in made.between)
                        made.between.clear()
                self._new.clear()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) not in NO_READS:
            watch = self.watch
            with watch.suspended():
                if len(watch.table.tensors) != self._known:
                    self._known = len(watch.table.tensors)
                    self._storages.clear()
                    for index, tensor in enumerate(watch.table.tensors):
                        if at := storage_of(tensor):
                            self._storages.setdefault(at, []).append(index)
                for tensor in tensors_in(args, kwargs):
                    for index in self._storages.get(storage_of(tensor), ()):
                        self.last[index] = watch.tick()
                    parameter = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
                    # a random convolution is made without gradients (odd: random_convolution_in_forward)
                    if parameter and name not in ATTRIBUTES and watch.record.rounds and torch.is_grad_enabled():
                        self._note_new(watch, tensor, args)
        return super().call(name, func, args, kwargs)

    def _note_new(self, watch: Watch, tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
        """Note a parameter that is used for the first time after the first step, if a call of the model made it."""
        if id(tensor) not in self._new:
            index = watch.table.index(tensor)
            entry = watch.table.entries[index] if index is not None else None
            if entry and (entry.declared or entry.role == "foreign"):
                return
            modules = [m for m in watch.thread.modules if watch.table.knows(m)]
            around = [m for m in modules if any(True for _ in members.parameters(m))]
            makers = [m for m in around if all(p is not tensor for p in members.parameters(m))]
            if not makers:
                return
            # what trains a copy of the net (odd: inner_loop_in_forward)
            known = (t for t in watch.table.tensors if t is not tensor and not is_lazy(t) and t.shape == tensor.shape)
            made = None
            if not any(torch.equal(t.detach().to(tensor), tensor) for t in known):
                place, _ = here()
                made = self.created.setdefault(
                    (place.file, place.line), MadeInForward(place, watch.table.path_of(makers[-1]))
                )
                made.shapes[tuple(tensor.shape)] = None
                made.steps.add(watch.record.rounds)
            self._new[id(tensor)] = tensor, made
        made = self._new[id(tensor)][1]
        if made is None or any(t is tensor for t in made.between):
            return
        # a random convolution that augments the batch (odd: random_convolution_with_gradients)
        inside = any(t.requires_grad and not t.is_leaf for t in tensors_in(args))
        # a norm without weights of its own (odd: norm_without_weights)
        if inside and tensor.numel() and bool((tensor != tensor.flatten()[0]).any()):
            made.between.append(tensor)


def created_in_forward(evidence: Evidence) -> Iterator[Finding]:
    for made in evidence.shared(Reads.of).created.values():
        steps = len(made.steps)
        if steps >= 2:
            facts = {"shape": " and ".join(map(str, made.shapes)), "lost": made.trained, "steps": steps}
            variant, level = ("lost", "fault") if made.trained >= steps else ("", "advice")
            yield found("layer_made_anew", made.place, (made.module,), variant, level=level, **facts)


def read_once(evidence: Evidence) -> Iterator[Finding]:
    """Weights that an optimizer moves, and that no call is given once it has stepped, nor a view of them."""
    reads = evidence.shared(Reads.of)
    record = reads.record
    if record.raised is not None:
        return
    changed, made = record.changed(), list(record.innermost_steps())
    unread, assigned = [], False
    for parameter in record.parameters:
        index = parameter.index
        mine = [s for s in made if s.optimizer in record.held.get(index, ())]
        used = [any((g := r.grads.get(index)) is not None and not g.zero for r in s.reads) for s in mine[1:]]
        if sum(used) >= 2 and index in changed and reads.last.get(index, 0) <= mine[0].at:
            unread.append(parameter)
            assigned |= all(a.incoming.zero or a.at <= mine[0].at for a in record.arrivals(index))
    if not unread:
        return
    names = tuple(p.name for p in unread)
    steps = LONG if assigned else SHORT
    base = _roots(evidence, steps)
    # a copy that is brought up to date now and then looks unread for a while (odd: gradients_at_a_delayed_copy)
    if not base or base != _roots(evidence, steps, late=names):
        return
    if assigned and base == _roots(evidence, steps, prepare=mover(names, jitter=False)):
        return  # nothing depends on them at all; a gradient that arrives shows that something does
    root = next((str(b.place) for b in record.autograd_passes()), "")
    lines = [line for name, line in evidence.shared(Lines.of).read.items() if name in names]
    facts = {"unread": len(names), "one": len(names) == 1, "held": len(record.held), "steps": steps - 1}
    facts["begun"] = any(p.index in reads.last for p in unread)  # otherwise read while the loop is built
    yield found("weights_read_once", root, names, change=lines[-1] if lines else root, **facts)


def _roots(evidence: Evidence, steps: int, late: Sequence[str] = (), **fields: Any) -> list[float]:
    """What is backpropagated in a run of so many steps; ``late`` names parameters that are moved after the first."""
    moving = MovesLater(late)
    fields |= {"contexts": moving.contexts, "count": max(evidence.plan().count, steps + 1)}
    record = evidence.rerun(enough=lambda r: r.rounds >= steps, may_raise=True, **fields)
    if record.raised is not None or not moving.moved:
        return []
    return [root.value for b in record.of(Backward) for root in b.roots if math.isfinite(root.value)]


class MovesLater(WatchingMode):
    """Moves parameters once, at the first call after the first step."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self.moved = not names

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.moved and self.watch.record.rounds:
            self.moved = True
            with self.watch.suspended():
                for entry, tensor in zip(self.watch.table.entries, self.watch.table.tensors, strict=True):
                    if entry.name in self._names:
                        tensor.data.add_(torch.full_like(tensor.data, 0.25))
        return super().call(name, func, args, kwargs)


class Lines(FunctionMode):
    """The lines of the project that read each parameter last, and that assigned to the ``data`` of one last, while the
    loop is built and in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, str] = {}
        """By the name of a parameter."""
        self.assigned = ""
        self._read: dict[int, str] = {}
        self._watch: Watch | None = None

    @classmethod
    def of(cls, evidence: Evidence) -> Lines:
        lines = cls()
        fields = {"around": lambda: lines, "contexts": lambda watch: (lines.naming(watch),)}
        evidence.rerun(enough=lambda r: r.rounds >= 1, may_raise=True, **fields)
        return lines

    @contextlib.contextmanager
    def naming(self, watch: Watch) -> Iterator[None]:
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None
            for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                if line := self._read.get(id(tensor)):
                    self.read[entry.name] = line

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sets_data = name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data
        if sets_data and args and isinstance(args[0], torch.nn.Parameter):
            self.assigned = str(here()[0])
        stepping = self._watch is not None and self._watch.stepping
        if name_of(func) not in NO_READS and not name.endswith("_") and not stepping:
            for tensor in tensors_in(args, kwargs):
                if isinstance(tensor, torch.nn.Parameter) and (line := _line()):
                    self._read[id(tensor)] = line
        return super().call(name, func, args, kwargs)


def _line() -> str:
    """The project's nearest line, inside of what builds the loop or runs it; empty elsewhere."""

    def at(frame: FrameType) -> str:
        return str(place_of(frame.f_code.co_filename, frame.f_lineno))

    frame: FrameType | None = sys._getframe(1)
    nearest = ""
    while frame is not None and (filename := frame.f_code.co_filename) not in (FIT_CALLER, BUILD_CALLER):
        helper = code_of(nearest).startswith("return ")  # its result is read where it is called
        if layer(filename) == 2 and (not nearest or (helper and not code_of(at(frame)).startswith("return "))):
            nearest = at(frame)
        frame = frame.f_back
    return nearest if frame is not None else ""


def tied_through_data(evidence: Evidence) -> Iterator[Finding]:
    """Two parameters with the same entries in memory, where one parameter in both places is stepped otherwise.

    For plain SGD the two steps add up to that of one parameter (odd: shared_data_under_plain_sgd). So both are run.
    """
    reads = evidence.shared(Reads.of)
    if not reads.shared or reads.record.raised is not None:
        return
    two, double = _losses(evidence)
    for pair in reads.shared:
        one, again = _losses(evidence, pair)
        bound = ROUNDING * torch.finfo(torch.float64 if double and again else torch.float32).eps
        distance = difference(two, one) if two and one else 0.0
        if distance > bound:
            names, where = tuple(map(reads.record.name, pair)), reads.record.step_line()
            facts = {"first": names[0], "second": names[1], "difference": distance, "bound": bound}
            line = evidence.shared(Lines.of).assigned
            yield found("tied_through_data", where, names, "named", change=line or where, **facts)


def _losses(evidence: Evidence, pair: tuple[int, int] | None = None) -> tuple[list[float], bool]:
    """What the first steps backpropagate, with one parameter in the place of a pair, and whether all was in float64."""

    def make_one(watch: Watch) -> None:
        if pair is None:
            return
        first, second = (watch.table.tensors[i] for i in pair)
        if first.data_ptr() != second.data_ptr():
            raise CannotDecide("in float64 the two parameters no longer share their entries")
        for _, module in list(watch.table.named_modules()):
            for name, parameter in list(members.named_parameters(module, recurse=False)):
                if parameter is second:
                    setattr(module, name, first)
        for _, optimizer in watch.optimizers.indexed():
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not second]

    record = evidence.rerun(prepare=make_one, double=True, enough=lambda r: r.rounds >= NOTED_STEPS, may_raise=True)
    if record.raised is not None:
        return [], False
    return [root.value for b in record.of(Backward) for root in b.roots], record.double


def masters_with_other_values(evidence: Evidence) -> Iterator[Finding]:
    """Low-precision weights whose float32 masters began elsewhere. The first step writes the masters over them."""
    record = evidence.run()
    step = next((s.at for s in record.innermost_steps()), 0)
    copies = []
    for p in record.parameters:
        written = [m.at for m in record.moves if m.by is None and p.index in m.parameters]
        low = p.dtype in LOW and p.index not in record.held and any(record.arrivals(p.index))
        if low and written and min(written) >= step:  # a copy is written after the first step
            copies.append(p)
    if not any(_distance(p, master) for p in copies for master in _masters(record, p)):
        return
    first = evidence.rerun(enough=lambda r: r.rounds >= 1, may_raise=True)
    if first.raised is not None or first.rounds != 1:
        return
    taken = set()
    gaps: dict[str, tuple[float, float]] = {}
    for p in (first.parameters[c.index] for c in copies):
        weight, dtype = values(first.end[p.index], p.dtype), getattr(torch, p.dtype)
        for master in _masters(first, p):
            wide = values(first.end[master.index], master.dtype)
            if len(wide) == len(weight) and torch.equal(weight, wide.to(dtype).to(weight.dtype)):
                break
        else:
            return  # this weight is not written from a master
        if master.index in taken:
            return  # two weights are written from this master
        taken.add(master.index)
        if gap := _distance(p, master):
            gaps[p.name] = gap
    if gaps:
        distance, ulp = max(gaps.values())
        facts = {
            "other": len(gaps),
            "copies": len(copies),
            "dtype": copies[0].dtype,
            "difference": distance,
            "ulp": ulp,
        }
        yield found("masters_hold_others", first.step_line(), gaps, **facts)


def _masters(record: Record, p: Parameter) -> Iterator[Parameter]:
    """Float32 tensors of no module that have its shape, and that an optimizer alone moves."""
    moved = record.moved_outside_steps()
    for q in record.parameters:
        outside = q.role == "foreign" and q.index in record.held and q.index not in moved
        if outside and q.dtype == "float32" and q.shape == p.shape and record.reached(q.index):
            yield q


def _distance(p: Parameter, master: Parameter) -> tuple[float, float] | None:
    """The largest distance before the first step and one ULP there, where rounding does not make it."""
    weight, wide = values(p.start, p.dtype).double(), values(master.start, master.dtype).double()
    if len(weight) != len(wide) or not len(weight):
        return None
    gap, ulp = (weight - wide).abs(), spacings(torch.maximum(weight.abs(), wide.abs()), p.dtype)
    # masters may hold the values before they were rounded (odd: masters_of_the_values_before_rounding)
    if float((gap > ulp).double().mean()) < HALF:
        return None
    worst = int(gap.argmax())
    return float(gap[worst]), float(ulp[worst])
