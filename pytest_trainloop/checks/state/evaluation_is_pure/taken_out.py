"""Runs of ``fit`` with its evaluations taken out: each is run, and what it changed is put back as it returns. What it
returns stays, so that early stopping and logging go on.

An evaluation is the call of a function that does nothing else, or else, where ``fit`` spells it out, one forward pass.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pytest_trainloop.checks.state.evaluation_is_pure.calls_in_fit import key_of, profiled
from pytest_trainloop.checks.state.evaluation_is_pure.interposed import Probe
from pytest_trainloop.core import members
from pytest_trainloop.core.errors import Refused
from pytest_trainloop.recording.changed_at import ChangedAt
from pytest_trainloop.recording.events import Backward, Forward, Step
from pytest_trainloop.recording.hooks import after_modules, after_steps, before_modules
from pytest_trainloop.runs.hooks import call_from_outside, hooked
from pytest_trainloop.runs.reachable_state.copies import same_bits
from pytest_trainloop.runs.reachable_state.snapshot import Reach, differences
from pytest_trainloop.runs.run import fit_of

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Collection, Iterable, Mapping
    from types import CodeType, FrameType

    from pytest_trainloop.checks.state.evaluation_is_pure.calls_in_fit import Key
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.events import Event
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.batch_stream import Batches
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.reachable_state.snapshot import Difference, Snapshot

MOST_CALLS, MOST_FITS, ACCUMULATE = 32, 3, 4
"""Calls of a run that are taken out; calls of ``fit``, where it evaluates at its end only; micro-batches of a window,
where the loop has a knob for it."""


class Taken(NamedTuple):
    """A difference that a call made."""

    difference: Difference
    function: str
    stepped: bool
    """Whether it is a weight that an optimizer of the loop steps."""


@dataclass(slots=True)
class Course:
    """One run of ``fit``: what its evaluations changed, and what it came to. Tensors are copies."""

    record: Record = field(init=False)
    changed: dict[str, Taken] = field(default_factory=dict)
    start: Mapping[str, torch.Tensor] = field(default_factory=dict)
    end: Mapping[str, torch.Tensor] = field(default_factory=dict)
    calls: int = 0
    """Evaluations that a step of the same run followed."""
    windows: dict[str, int] = field(default_factory=dict)
    """Paths of gradients that a call cleared between a backward pass and its step, in the middle of a pass over the
    batches, with the number of backward passes since the last step."""
    where: str = ""
    """The line that changed the first of the leaves that are asked for."""
    writer: CodeType | None = None
    in_forward: bool = False
    """Whether that was in a forward pass."""
    forwards: tuple[int, int] = (0, 0)
    """Forward passes of the call before and after it."""
    elsewhere: set[CodeType] = field(default_factory=set)
    """The functions that ran outside of evaluations as well."""
    known: set[str] = field(default_factory=set)
    """Paths of weights that came to a value that they had had after some step."""
    holders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What else holds the values of weights that differ."""


class TakenOut:
    """Makes the runs of one loop, with the calls of these functions taken out; without any, with forward passes."""

    def __init__(self, evidence: Evidence, keys: Collection[Key], changes: Mapping[str, Any]) -> None:
        self._evidence, self._keys, self._changes = evidence, keys, changes
        self._plan = evidence.plan()
        self.double = True
        """Whether runs are in float64."""
        if not changes and "accumulate" in evidence.knobs:
            try:
                evidence.run(accumulate=ACCUMULATE)
                self._plan = evidence.plan(accumulate=ACCUMULATE)
            except Refused:
                pass  # windows of 4 are no more than a wish: the loop is then judged in its own

    def run(
        self, put_back: Callable[[Difference], bool], *, watched: Collection[str] = (), displaced: bool = False
    ) -> Course:
        """One run. ``put_back`` says of a difference whether it is undone as the call returns; where
        generators have come to stays. ``watched`` are paths of which it is noted how they change; ``displaced`` turns
        the weights around inside each call."""
        made = Course()
        run = _Run(made, self._keys, put_back, watched, displaced)
        made.record = self._evidence.rerun(
            self._plan, **self._changes, contexts=run.contexts, fit=run.fit, double=self.double, may_raise=True
        )
        return made


@dataclass(slots=True)
class _Call:
    """An evaluation under way."""

    of: FrameType | nn.Module
    before: Snapshot
    open_gradients: frozenset[int]
    backwards: int
    began: int
    """The events before it."""
    line: ChangedAt | None = None
    changed_at: int = 0


class _Run:
    def __init__(
        self,
        made: Course,
        keys: Collection[Key],
        put_back: Callable[[Difference], bool],
        watched: Collection[str],
        displaced: bool,
    ) -> None:
        self._made, self._keys, self._put_back = made, keys, put_back
        self._watched, self._displaced = watched, displaced
        self._open: _Call | None = None
        self._done = 0
        self._waiting: list[tuple[int, int, dict[str, int]]] = []
        self._weights: dict[str, torch.Tensor] = {}
        self._past: dict[int, list[torch.Tensor]] = {}
        self._since_step: dict[str, torch.Tensor] = {}
        """The weights before the first evaluation after the last step."""

    def fit(self, loop: TrainLoop) -> Callable[[Any], Any]:
        """The project's own, called again where its evaluations come at its end only."""
        own = fit_of(loop)
        self._loop = loop

        def run(batches: Batches) -> None:
            self._batches = batches
            self._made.start = _weights(loop)
            self._keep_weights()
            try:
                for _ in range(MOST_FITS):
                    own(batches)
                    if self._made.calls or not self._done:
                        break
            finally:
                self._made.end = self._since_step or _weights(loop)

        return run

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        def stepped(*_step: Any) -> None:
            if watch.is_suspended:
                return
            self._made.calls, self._since_step = self._done, {}
            for passes, taken, cleared in self._waiting:
                if passes == len(self._batches.passes) and taken < self._batches.taken:
                    self._made.windows |= cleared
            self._waiting.clear()
            self._keep_weights()

        def begin(of: FrameType | nn.Module) -> None:
            if self._done < MOST_CALLS:
                with torch.inference_mode(mode=False), torch.no_grad(), watch.suspended():
                    self._open = self._entered(of, watch)

        def enter(frame: FrameType) -> None:
            if self._open is None and key_of(frame) in self._keys:
                begin(frame)
            elif self._open is None:
                self._made.elsewhere.add(frame.f_code)

        def leave(of: FrameType | nn.Module, *_call: Any) -> None:
            if self._open is not None and self._open.of is of:
                call, self._open = self._open, None
                with torch.inference_mode(mode=False), torch.no_grad(), watch.suspended():
                    self._left(call, watch)

        def called(module: nn.Module, *_call: Any) -> None:
            forward = call_from_outside(watch, module) if watch.full and not watch.is_suspended else None
            if self._open is not None or forward is None or forward.grad_enabled or forward.training:
                return
            if forward.below & self._stepped(watch):
                begin(module)

        hooks = () if self._keys else (before_modules(called), after_modules(leave, always_call=True))
        return hooked(after_steps(stepped), *hooks), profiled(watch, enter, leave)

    @staticmethod
    def _stepped(watch: Watch) -> set[int]:
        """The parameters that have been stepped by now."""
        return {index for optimizer in watch.record.optimizers for index in optimizer.parameters}

    def _keep_weights(self) -> None:
        """What the weights are now, where it is asked whether one comes back to it."""
        for module in self._loop.modules.values() if self._watched else ():
            for parameter in members.parameters(module):
                self._past.setdefault(id(parameter), []).append(parameter.detach().clone())

    def _entered(self, of: FrameType | nn.Module, watch: Watch) -> _Call:
        reaching, frame = copy(self._loop), None if isinstance(of, nn.Module) else of
        if frame is not None:
            reaching.evaluate = _holding(frame, reaching.evaluate)
        before = Reach.of(reaching).snapshot()
        self._since_step = self._since_step or _weights(self._loop)  # the next epoch may take an average out again
        arrived: set[int] = set()
        backwards = 0
        for event in reversed(watch.record.events):
            if isinstance(event, Step):
                break
            if isinstance(event, Backward) and event.kind == "backward":
                arrived |= event.arrivals.keys()
                backwards += 1
        open_gradients = frozenset(id(watch.table.tensors[index]) for index in arrived)
        call = _Call(of, before, open_gradients, backwards, len(watch.record.events))
        self._weights = {path: before.object(path) for path in self._watched if _is_weight(before, path)}
        if self._watched and not self._made.where:
            probe = Probe(self._watched, before, watch)

            def changed() -> bool:
                if not (is_changed := probe.changed()):
                    call.changed_at = len(watch.record.events)
                    self._made.in_forward = bool(watch.thread.modules)
                return is_changed

            call.line = ChangedAt(changed)
            call.line.begin(frame)
        if self._displaced:
            for parameter in (p for module in self._loop.modules.values() for p in members.parameters(module)):
                if parameter.is_floating_point() and not torch.nn.parameter.is_lazy(parameter):
                    parameter.data.mul_(-1.5)
        return call

    def _left(self, call: _Call, watch: Watch) -> None:
        made, before = self._made, call.before
        if call.line is not None:
            call.line.end()
            made.where, made.writer = call.line.where, call.line.code
            events = watch.record.events
            before_it, after_it = events[call.began : call.changed_at], events[call.changed_at :]
            made.forwards = _forwards(before_it), _forwards(after_it)
        reach = Reach.of(before.walked.loop)
        found = [d for d in differences(before, reach.snapshot()) if d.leaf.kind != "generator"]
        function = "an evaluation" if isinstance(call.of, nn.Module) else f"{call.of.f_code.co_name}()"
        stepped = self._stepped(watch)
        for d in found:
            weight = before.object(d.leaf.path) if d.leaf.kind == "weight" and d.leaf.path in before.leaves else None
            trains = weight is not None and watch.table.index(weight) in stepped
            made.changed.setdefault(d.leaf.path, Taken(d, function, trains))
            if d.leaf.path in self._weights and not made.holders:
                weight = self._weights[d.leaf.path]
                made.holders[d.leaf.path] = reach.holders(weight)
                if any(same_bits(weight, known) for known in self._past.get(id(weight), ())):
                    made.known.add(d.leaf.path)
        cleared = {d.leaf.path: call.backwards for d in found if d.leaf.kind == "gradient" and _clears(d, call)}
        self._waiting.append((len(self._batches.passes), self._batches.taken, cleared))
        before.put_back([d.leaf.path for d in found if self._put_back(d)])
        if not isinstance(call.of, nn.Module):
            _ = call.of.f_locals  # read again: before Python 3.13 its values are written to the frame's closure now
        self._done += 1


def _forwards(events: Iterable[Event]) -> int:
    return sum(isinstance(event, Forward) for event in events)


def _holding(frame: FrameType, declared: Any) -> Callable[[], None]:
    """A function that can touch what the frame can, by the names of its variables."""
    held = {**frame.f_locals, "evaluate": declared}
    code = _nothing.__code__.replace(co_freevars=tuple(held), co_filename=frame.f_code.co_filename)
    return FunctionType(code, {}, closure=tuple(map(CellType, held.values())))


def _nothing() -> None:
    """Is never called."""


def _is_weight(before: Snapshot, path: str) -> bool:
    return path in before.leaves and before.leaves[path].kind == "weight"


def _clears(difference: Difference, call: _Call) -> bool:
    """Whether a gradient that waits for its step is gone, or zero."""
    owner = call.before.object(difference.leaf.path.removesuffix(".grad"))
    return id(owner) in call.open_gradients and _is_zero(difference.after) and not _is_zero(difference.before)


def _is_zero(gradient: torch.Tensor | None) -> bool:
    return gradient is None or (gradient.layout == torch.strided and not bool(gradient.any()))


def _weights(loop: TrainLoop) -> dict[str, torch.Tensor]:
    """Copies of the weights by name."""
    return {
        f"{prefix}.{name}".lstrip("."): parameter.detach().clone()
        for prefix, module in loop.modules.items()
        for name, parameter in members.named_parameters(module)
        if not torch.nn.parameter.is_lazy(parameter) and not parameter.is_meta
    }
