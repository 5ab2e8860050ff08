"""What a loop does with every micro-batch besides its backward pass: further runs leave it out, one kind at a time."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.checks.batch.accumulation_equivalence.windows import CLOSE, WINDOWS, agreements, shrunk
from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.ours import is_ours
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.instruments.gradients.compare import learning_rates, passes, update_difference
from pytest_trainloop.instruments.tracing.lr_writes import LRWrites
from pytest_trainloop.instruments.tracing.statements import call_in_function_of
from pytest_trainloop.recording.events import Backward, GradWrite, Place, SchedulerStep, Site, Step
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.hooks import before_modules, before_steps
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.source import here, place_of
from pytest_trainloop.recording.torch_internals import hooks_of
from pytest_trainloop.recording.torch_names import IN_PLACE_OPERATORS, ZEROING
from pytest_trainloop.runs.hooks import hooked, unless_suspended
from pytest_trainloop.runs.projection import Projections, unit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.batch.accumulation_equivalence.windows import Split
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

Kind = Literal["writes", "average", "weights", "rates", "statistic", "hooks"]
"""What is left out: writes to gradients; changes of parameters that no optimizer holds, of those that one holds, of an
optimizer's options, of buffers; the project's hooks on parameters."""

BETWEEN = 1e-6
"""Of the way from one step's rate to the next one's: rounding of a rate is less, and the last micro-batch of a window
lies at half of the way or beyond, at a quarter where a cosine turns."""

SAME = 0.02
"""By which two shares of a schedule may differ: whole calls are counted, and no window changes a share by less than
half."""

LEAST_END = 3
"""Calls from which on a schedule that is built for one call less or more is not one of a quarter of the length."""


def settled(evidence: Evidence, split: Split) -> list[Finding] | None:
    """The first thing without which windows and one batch agree, as a finding, or as none where it is no fault; None
    where there is no such thing."""
    many = split.many

    def inside(at: int) -> bool:
        return 0 < since_step(many, split.optimizer, at) < passes(many, split.optimizer)[1]

    trained = {i for i in many.held if many.parameters[i].requires_grad}
    moved = {i in trained for m in many.moves if m.by is None and inside(m.at) for i in m.parameters}
    writes = [w for w in many.of(GradWrite) if w.how not in ("none", "zero") and inside(w.at)]
    may_be: dict[Kind, bool] = {
        "writes": bool(writes),
        "average": False in moved,
        "weights": True in moved,
        "rates": split.windows[0].difference <= split.bound,
        "statistic": True,  # this and hooks leave no trace in a record
        "hooks": True,
    }
    for kind in (kind for kind, likely in may_be.items() if likely):
        left = without(split, kind)
        if left is None:
            continue
        at = left.place or split.step
        if kind == "writes":
            by, at = writes[0].by, writes[0].place or at
            clips = writes[0].how == "clipped" or any(word in by.strip("_") for word in ("clamp", "clip", "mul", "div"))
            finding = split.found("clipped_inside_window" if clips else "changed_inside_window", "", (by,), at)
        elif kind == "average":
            facts: dict[str, Any] = {"level": "fault" if left.by_loop else "advice"}
            facts["change"] = call_in_function_of(left.site, split.backward.site) if split.backward else ""
            finding = split.found("averaged_inside_window", "", ("the average",), at, **facts)
        elif kind == "weights":
            finding = split.found("changed_inside_window", "weights", ("weights",), at)
        elif kind == "rates":
            if _in_other_units(evidence, split, inside=left.by_loop):
                return []  # with the rates held equal, windows and one batch agree
            if not left.by_loop:
                return None  # rates that are to scale with the window, not moved inside it
            steps = [s for s in many.of(SchedulerStep) if inside(s.at)]
            if steps:
                finding = split.found(
                    "scheduled_inside_window", "", ("scheduler.step()",), steps[0].place or split.step
                )
            else:  # lines of the loop write them: what it counts in batches is its own choice
                lines = map(evidence.shared(LRWrites.of).line, ("lr", "momentum", "betas", "weight_decay"))
                line, names = next(filter(None, lines), "") or split.step, ("optimizer.param_groups",)
                finding = split.found("scheduled_inside_window", "by hand", names, line, level="advice")
        elif kind == "statistic":
            if not left.by_loop:
                return []  # what layers keep of each forward pass, as batch norms do
            finding = split.found("statistic_inside_window", "", ("the statistic",), at)
        else:
            finding = split.found("changed_inside_window", "hooks", ("register_hook()",), at)

        def agree(smaller: Split, kind: Kind = kind) -> bool:
            return without(smaller, kind) is not None

        return [finding if split.equal else shrunk(evidence, split, finding, agree)]
    return None


def _in_other_units(evidence: Evidence, split: Split, *, inside: bool) -> bool:
    """Whether the schedule is as far on after the same training, with accumulation and without: its length counts the
    same unit as its calls.

    If rates move inside a window, every rate then lies between those of the same step and the next one over whole
    batches: at the end of a window the schedule is (k - 1) / k of a step ahead. One that runs k times as fast has come
    to the next step's rate there, or beyond it.
    """
    one, many = (learning_rates(record, split.optimizer, split.steps[1]) for record in (split.one, split.many))
    lrs = [r for of_step in zip(one, one[1:], many, strict=False) for r in zip(*of_step, strict=False)]
    moving = [(now, after, got) for now, after, got in lrs if not now == after == got]
    between = (a != b and BETWEEN < (lr - a) / (b - a) < 1 - BETWEEN for a, b, lr in moving)
    if inside and moving and all(between):
        return True
    try:
        schedules = [p for p in evidence.shared(Projections.of).schedulers if p.optimizer == split.optimizer]
    except CannotDecide:
        return False
    for p in schedules:
        sizes = [size for size in (*p.sizes[:1], p.accumulated) if size and size.horizon and size.calls]
        if len(sizes) < 2:
            continue
        before, after = sizes
        units = unit_of((before,)), unit_of((after,))
        planned = p.plan.of(units[0]) if units[0] else None, p.plan_accumulated.of(units[1]) if units[1] else None
        end, grown = before.horizon or 0, after.horizon or 0
        off = max(SAME * end, float(end >= LEAST_END))
        if any(a and b and abs(grown * a / b - end) <= off for a, b in ((before.calls, after.calls), planned)):
            return True
    return False


def since_step(record: Record, optimizer: int, at: float = math.inf) -> int:
    """Backward passes that bring the optimizer gradients, from its last step to a moment."""
    count, mine = 0, set(record.optimizers[optimizer].parameters)
    for event in (e for e in record.events if e.at < at):
        if isinstance(event, Step) and event.optimizer == optimizer and not event.nested:
            count = 0
        elif isinstance(event, Backward) and event.until and mine & set(event.arrivals):
            count += 1
    return count


def without(split: Split, kind: Kind) -> LeftOut | None:
    """What was left out over the micro-batches, if windows and one batch give the same gradients and the same weights
    without changes of this kind; None where they still differ."""
    left: list[LeftOut] = []

    def around(record: Record) -> Callable[[Watch], tuple[contextlib.AbstractContextManager[Any]]]:
        def enter(watch: Watch) -> tuple[contextlib.AbstractContextManager[Any]]:
            left.append(LeftOut(watch, kind, split.optimizer, passes(record, split.optimizer)[1]))
            return (left[-1].on(),)

        return enter

    one = split.one
    if kind in ("rates", "hooks"):
        one = split.by.run(split.composition.whole(), contexts=(around(one),), may_raise=True)
    many = split.by.run(split.items, knob=split.accumulate, contexts=(around(split.many),), may_raise=True)
    last = left[-1]
    left.clear()  # the run is known by its contexts, and each of these holds the loop's objects
    if one.raised or many.raised or many.rounds != one.rounds or not last.any:
        return None
    found = agreements(one, many, split.optimizer, WINDOWS)
    equal = bool(found) and all(a.difference <= split.bound for a in found)
    return last if equal and update_difference(one, many) <= CLOSE else None


class LeftOut(FunctionMode):
    """Leaves out one kind of change in a run whose windows have ``passes`` backward passes.

    What comes after the last pass of a window stays. ``place`` is the line of the first change that was left out, and
    ``by_loop`` says whether any was made inside a window and outside of modules' calls.
    """

    def __init__(self, watch: Watch, kind: Kind, optimizer: int, passes: int) -> None:
        super().__init__()
        self._watch, self._kind, self._optimizer, self._passes = watch, kind, optimizer, passes
        self._window, self._undone_after = -1, 0
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The state at the beginning of the window, by identity."""
        self._options: list[dict[str, Any]] = []
        self.place: Place | None = None
        self.site: Site = ()
        self.by_loop = self.any = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """For the length of a run."""
        with contextlib.ExitStack() as stack:
            if self._kind == "hooks":
                stack.enter_context(self._hooks_taken_off())
            elif self._kind != "rates":
                stack.enter_context(self)
            if self._kind == "rates":
                began = {id(o): _options(o) for _, o in self._watch.optimizers.indexed()}
                stack.enter_context(hooked(before_steps(lambda optimizer, *_call: self._hold(optimizer, began))))
            if self._kind not in ("hooks", "writes"):
                stack.enter_context(hooked(before_modules(unless_suspended(self._watch, self._enter))))
            yield

    def _done(self) -> int:
        """Backward passes since the last step; 0 before a Trainer of transformers has made its optimizer."""
        record = self._watch.record
        return since_step(record, self._optimizer) if self._optimizer < len(record.optimizers) else 0

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, sets = self._watch, name == "__set__"
        writes = sets or name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
        if not args or watch.is_suspended or watch.stepping or watch.backward is not None or not writes:
            return passed_on(func, args, kwargs)
        with watch.suspended():
            if 0 < self._done() < self._passes and self._is_mine(name, func, args):
                self.any, (place, site) = True, here()
                self.place, self.site = (self.place, self.site) if self.place else (place, site)
                self.by_loop |= not watch.thread.modules
                if self._kind == "writes":
                    return None if sets else args[0]
        return passed_on(func, args, kwargs)

    def _is_mine(self, name: str, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether the call writes what is left out: gradients, or a state, which is restored later."""
        of_gradients, what = self._kind == "writes", getattr(func, "__self__", None)
        if name == "__set__" and (what is not torch.Tensor.data or of_gradients):
            return of_gradients and what is torch.Tensor.grad and args[1] is not None
        if not of_gradients:
            held = [tensor for tensor, _ in self._kept.values()]
        else:
            trained = (self._watch.table.tensors[i] for i in self._watch.trained.here())
            held = [p.grad for p in trained if p.grad is not None and name not in ZEROING]
        places = {address(tensor) for tensor in held} - {0}
        return any(address(tensor) in places for tensor in tensors_in(args[0]))

    def _enter(self, *_call: Any) -> None:
        """At a module's call: keep the state at the beginning of a window, and restore it inside."""
        record = self._watch.record
        if self._optimizer >= len(record.optimizers):
            return
        options = next((_options(o) for n, o in self._watch.optimizers.indexed() if n == self._optimizer), [])
        with self._watch.suspended(), torch.no_grad():
            done, window = self._done(), record.optimizers[self._optimizer].steps
            if window != self._window:
                self._window, self._undone_after, self._options = window, 0, options
                self._kept.clear()
            if self._kind == "rates":
                self.by_loop |= 0 < done < self._passes and options != self._options
            elif not done:
                self._kept |= {id(t): (t, t.detach().clone()) for t in self._state() if id(t) not in self._kept}
            elif self._undone_after < done < self._passes:
                self._undone_after = done
                for tensor, kept in self._kept.values():
                    if not torch.equal(tensor.detach(), kept):
                        self.any = True
                        write(tensor, kept)

    def _state(self) -> Iterator[torch.Tensor]:
        table, held = self._watch.table, self._watch.record.held
        trained = {id(t) for i, t in enumerate(table.tensors) if i in held and t.requires_grad}
        if self._kind != "statistic":
            yield from (t for t in table.tensors if (id(t) in trained) == (self._kind == "weights") and readable(t))
        for _, module in table.named_modules() if self._kind != "weights" else ():
            buffers = (b for b in members.buffers(module, recurse=False) if readable(b))
            if self._kind == "statistic":
                # whole numbers count what was seen: a schedule by them may be one by the data
                yield from (b for b in buffers if b.is_floating_point())
            elif (mine := {id(p) for p in members.parameters(module)}) and not mine & trained:
                yield from buffers  # how often an average was updated is one

    def _hold(self, optimizer: Any, began: dict[int, list[dict[str, Any]]]) -> None:
        """Inside a step: every option of every group as the run began."""
        held = began.setdefault(id(optimizer), _options(optimizer))
        for group, first in zip(optimizer.param_groups, held, strict=False):
            self.any |= any(group.get(name) != value for name, value in first.items())
            group.update(first)

    @contextlib.contextmanager
    def _hooks_taken_off(self) -> Iterator[None]:
        """The project's hooks on parameters, while the run lasts."""
        taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for hooks in (h for tensor in self._watch.table.tensors for h in hooks_of(tensor)):
            theirs = {key: hook for key, hook in hooks.items() if not is_ours(hook)}
            self.any |= bool(theirs)
            taken.append((hooks, theirs))
            for key in theirs:
                code = getattr(hooks.pop(key), "__code__", None)
                self.place = self.place or (place_of(code.co_filename, code.co_firstlineno) if code else None)
        try:
            yield
        finally:
            for hooks, theirs in taken:
                hooks.update(theirs)


def _options(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if isinstance(value, (int, float, tuple))}
        for group in getattr(optimizer, "param_groups", ())
        if isinstance(group, dict)
    ]
