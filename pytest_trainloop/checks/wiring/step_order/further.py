"""Further runs of ``step_order``, and what the source says of calls that were not made."""

from __future__ import annotations

import ast
import collections
import contextlib
import gc
import itertools
import linecache
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pytest_trainloop.checks.wiring.step_order.causes import found
from pytest_trainloop.core.errors import Refused
from pytest_trainloop.core.ours import holds_alone
from pytest_trainloop.core.places import syntax_of
from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.recording.events import SchedulerStep, Step
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.mistakes import unnoticed
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.source import here, layer, place_of
from pytest_trainloop.runs.guard import StopFit
from pytest_trainloop.runs.run import READ_AHEAD_BUDGETS, fit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.events import Backward, Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.batch_stream import Batches
    from pytest_trainloop.runs.evidence import Evidence

MANY = READ_AHEAD_BUDGETS[-1]
"""Batches in which a loop that trains has made a backward pass or a step."""

ACCUMULATE = 4

WINDOWS = 3
"""Windows of each call of ``fit``, the last one short of a micro-batch: two whole ones show how many a step uses."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _nodes(file: str) -> list[Any]:
    """What a file holds, as Python reads it; nothing where there is no source."""
    tree = syntax_of(file)
    return list(ast.walk(tree)) if tree.body else []


def _called(nodes: Any, method: str) -> list[int]:
    """The lines on which a method of this name is called."""
    calls = (n for n in nodes if isinstance(n, ast.Call))
    return sorted(n.lineno for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == method)


def may_step_later(record: Record) -> bool:
    """Whether the functions that call ``backward()``, or those of the same file that they call by name, hold a call of
    ``step()`` that this run did not make. True where there is no source."""
    made: dict[tuple[str, int], set[object]] = collections.defaultdict(set)
    for step in (*record.of(Step), *record.of(SchedulerStep)):
        for frame in step.site:
            made[frame].add(step.optimizer if isinstance(step, Step) else "scheduler")
    places = {line for backward in record.backwards() for line in backward.site[:1]}
    for file, line in places:
        nodes = _nodes(file)
        functions = [n for n in nodes if isinstance(n, _Function)]
        around = [f for f in functions if f.lineno <= line <= (f.end_lineno or f.lineno)]
        if not nodes:
            return True
        # a loop at the top of a script is in no function
        top = ast.Module([n for n in nodes[0].body if not isinstance(n, _DEFINITIONS)], [])
        inner = min(around, key=lambda f: (f.end_lineno or f.lineno) - f.lineno) if around else top
        calls = [n.func for n in ast.walk(inner) if isinstance(n, ast.Call)]
        named = {getattr(c, "attr", getattr(c, "id", "")) for c in calls}
        helpers = [f for f in functions if getattr(f, "name", None) in named and f not in around]
        steps = [at for f in (inner, *helpers) for at in _called(ast.walk(f), "step")]
        if any(n > len(made.get((file, at), ())) for at, n in collections.Counter(steps).items()):
            return True
    return not places


def many_batches(evidence: Evidence) -> Record:
    """A run over so many batches that a step is due, as long as fewer than usual are made."""
    return evidence.rerun(count=MANY, read_ahead=None, may_raise=True)


def stops_from_other_weights(evidence: Evidence, optimizer: int, steps: int) -> bool:
    """Whether an optimizer makes this many steps, and no more, from half and from twice the weights as well."""
    if not evidence.repeatable:
        return False
    made = []
    for factor in (0.5, 2.0):

        def scale(watch: Watch, factor: float = factor) -> None:
            with watch.suspended(), torch.no_grad():
                for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                    if entry.requires_grad and readable(tensor) and tensor.is_floating_point():
                        tensor.mul_(factor)

        record = evidence.rerun(prepare=scale, may_raise=True, varied="from other weights")
        made.append(record.optimizers[optimizer].steps if optimizer < len(record.optimizers) else -1)
    return made == [steps, steps]


class Writes(FunctionMode):
    """Notes the first line that writes to one of these parameters after the first step."""

    def __init__(self, watch: Watch, names: Collection[str]) -> None:
        super().__init__()
        self._watch, self._names = watch, names
        self.place: Place | None = None

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        in_place = name.endswith("_") and not name.endswith("__")
        in_place |= name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data
        watch = self._watch
        if in_place and args and self.place is None and watch.record.steps and not watch.stepping:
            targets = args[0] if isinstance(args[0], (list, tuple)) else (args[0],)
            written = {address(t) for t in targets if isinstance(t, torch.Tensor)} - {0}
            with watch.suspended():
                known = zip(watch.table.entries, watch.table.tensors, strict=False)
                if any(e.name in self._names and address(t) in written for e, t in known):
                    self.place, _ = here()
        return super().call(name, func, args, kwargs)


def line_of_write(evidence: Evidence, names: Collection[str]) -> str:
    """The first line that writes to one of these parameters after the first step; empty where none is seen."""
    if not evidence.repeatable:
        return ""
    modes: list[Writes] = []

    def contexts(watch: Watch) -> list[Writes]:
        modes.append(Writes(watch, names))
        return modes[-1:]

    evidence.rerun(contexts=contexts, enough=lambda record: record.rounds >= 2, may_raise=True)
    return str(next((m.place for m in modes if m.place), ""))


def untrained(evidence: Evidence) -> Finding | None:
    """That nothing trains: over many batches no step, no weight, buffer or tensor besides the model that changes."""
    if not evidence.repeatable or not _idle(evidence.run()):
        return None
    ran: dict[Any, None] = {}
    lines: set[tuple[str, int]] = set()
    raised: collections.Counter[tuple[tuple[str, int], str]] = collections.Counter()
    early: list[dict[int, torch.Tensor]] = []
    changed: list[bool] = []

    def fit_watched(loop: TrainLoop) -> Callable[[Any], None]:
        def fit(batches: Any) -> None:
            before = _state(loop)
            try:
                with _traced(ran, lines, raised):
                    fit_of(loop)(batches)
            finally:
                changed.append(not _same(before, _state(loop)))

        return fit

    def look_at_leaves(number: int, _item: Any) -> None:
        """What trains may be a tensor besides the parameters of modules."""
        if number not in (1, 3):
            return
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and _is_leaf(o)]
        if not early:
            early.append({id(t): t.detach().clone() for t in tensors})
            return
        moved = [t for t in tensors if id(t) not in early[0] or not _alike(early[0][id(t)], t.detach())]
        changed.append(any(not holds_alone(t, (id(tensors), id(moved))) for t in moved))

    plan = evidence.plan()
    plan = replace(plan, count=MANY, read_ahead=None, fit=fit_watched, before_item=look_at_leaves)
    record = evidence.rerun(plan)
    if not _idle(record) or any(changed):
        return None
    passes = record.backwards()
    reached = {i for b in passes for i, arrived in b.arrivals.items() if any(not a.incoming.zero for a in arrived)}
    calls: tuple[str, ...] = ("loss.backward()", "optimizer.step()")
    if passes:
        names, calls = record.names(reached), calls[1:]
        kinds = ("missing call", *["parameter"] * len(names))
        several = len(passes) >= 2 and reached
        facts = {"passes": len(passes), "kinds": kinds, "kind": ""}
        return found("step_missing", passes[0], calls + names, "no optimizer", **facts) if several else None
    facts = {"batches": record.items, "kinds": ("missing call",) * 2}
    if raised:
        (where, error), times = raised.most_common(1)[0]
        return found("nothing_trains", place_of(*where), calls, "swallowed", error=error, times=times, **facts)
    for code in ran:
        own = {line for _, _, line in code.co_lines()}
        for line in _called(_nodes(code.co_filename), "backward"):
            if line in own and (code.co_filename, line) not in lines:
                at = place_of(code.co_filename, line)
                return found("nothing_trains", at, calls, "not reached", change=condition_of(at), **facts)
    begin = next((place_of(code.co_filename, code.co_firstlineno) for code in ran), "")
    return found("nothing_trains", begin, calls, **facts)


def _idle(record: Record) -> bool:
    """Whether no step was made or tried, no weight moved, and nothing says why: no exception, no optimizer that the
    backward passes are for (``step_missing`` judges these), no gradient that is kept elsewhere (``autograd.grad``)."""
    if record.steps or record.raised is not None or record.scaler_calls():
        return False
    if record.backwards() and record.optimizers:
        return False
    elsewhere = len(record.autograd_passes()) > len(record.backwards())
    return not (elsewhere or record.moved_outside_steps() or record.changed())


def _state(loop: TrainLoop) -> dict[str, torch.Tensor]:
    """Copies of all tensors of the declared modules."""
    held = ((f"{prefix}.{name}", t) for prefix, m in loop.modules.items() for name, t in m.state_dict().items())
    return {name: t.detach().clone() for name, t in held if isinstance(t, torch.Tensor) and readable(t)}


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Any of the process is met here, also those that can't be compared: lazy, fake, sparse, nested."""
    dense = type(tensor) is not torch.nn.Parameter and readable(tensor) and tensor.layout is torch.strided
    dense = dense and not tensor.is_nested
    return dense and tensor.is_leaf and tensor.requires_grad


def _same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(_alike(t, other[name]) for name, t in one.items())


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)


@contextlib.contextmanager
def _traced(ran: dict[Any, None], lines: set[Any], raised: collections.Counter[Any]) -> Iterator[None]:
    """Note what runs of the user's and the exceptions that are raised there; not under a debugger or coverage, which
    trace themselves."""
    if sys.gettrace() is not None:
        yield
        return
    latest: list[object] = [None]

    @unnoticed
    def at(frame: FrameType, event: str, arg: Any) -> Any:
        where = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line":
            lines.add(where)
        elif event == "exception" and arg[1] is not latest[0] and issubclass(arg[0], Exception):
            latest[0] = arg[1]
            if not issubclass(arg[0], (StopIteration, StopAsyncIteration)):
                said = str(arg[1]).strip().partition("\n")[0]
                raised[where, f"{arg[0].__name__}: {said}" if said else arg[0].__name__] += 1
        return at

    @unnoticed
    def enter(frame: FrameType, _event: str, _arg: Any) -> Any:
        if layer(frame.f_code.co_filename) != 2:
            return None
        ran[frame.f_code] = None
        return at

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(None)


def accumulating(evidence: Evidence) -> Record | None:
    """The watched run with windows of several micro-batches; None where the loop has no knob for it, or does not take
    so many."""
    try:
        return evidence.run(accumulate=ACCUMULATE) if "accumulate" in evidence.knobs else None
    except Refused:
        return None


def leak(evidence: Evidence) -> Finding | None:
    """What the watched run leaves for its next pass over the data, or else for the next call of ``fit``."""
    record = accumulating(evidence)
    knobs = {"accumulate": ACCUMULATE} if record else {}
    record = record or evidence.run()
    ledger = Ledger(record)
    crossing = _crossing(ledger, [*itertools.accumulate(record.passes)][:-1])
    next_one = "epoch"
    size = max((len(passes) for _, passes in _windows(ledger)), default=1)
    if crossing is None and evidence.repeatable and size > 1 and ledger.left_open():
        first = WINDOWS * size - 1
        calls = _TwoCalls(first)
        plan = replace(evidence.plan(**knobs), fit=calls.of, prepare=calls.opened, count=2 * first, read_ahead=None)
        again = evidence.rerun(plan, enough=lambda record: False, may_raise=True)
        crossing = _crossing(Ledger(again), [first]) if calls.came_back else None
        next_one = "call of fit"
    if crossing is None:
        return None
    step, passes, left, size, items = crossing
    batches: Any = evidence.fresh_loop().batches if evidence.repeatable else None
    length = len(batches) if hasattr(batches, "dataset") and hasattr(batches, "__len__") else 0
    own = max((len(passes) for _, passes in _windows(Ledger(evidence.run()))), default=1)  # the knob's default
    divides = not (own > 1 and length > own and length % own)
    condition = condition_of(step.place)
    return found(
        "leaks_into_next",
        left[0],
        ("optimizer.step()",),
        level="advice" if divides else "fault",
        change=condition or str(step.place),
        repair=REPAIR if condition else "",
        left=len(left),
        used=len(passes),
        size=size,
        items=items,
        next_one=next_one,
        loader=0 if divides else length,
        rest=length % own,
        own=own,
    )


REPAIR = (
    "add `or i + 1 == len(batches)` to this condition, with the loop's own names, and divide the losses of a short "
    "window by the number of micro-batches that it has"
)


def _windows(ledger: Ledger) -> list[tuple[Step, list[Backward]]]:
    """Each step with the backward passes that it used, those of one line where several lines make some."""
    windows = []
    for w in ledger.windows:
        held = set(ledger.record.optimizers[w.optimizer].parameters)
        used = [p.backward for p in w.passes if p.used & held]
        if used:
            windows.append((w.step, max(([b for b in used if b.site == s] for s in {b.site for b in used}), key=len)))
    return windows


def _crossing(ledger: Ledger, boundaries: list[int]) -> tuple[Step, list[Backward], list[Backward], int, int] | None:
    """The first step after one of these numbers of batches, where it uses passes from both sides and more than any
    other step: windows that go on across the boundary use as many as the others."""
    windows = _windows(ledger)
    crossing = [(w, n) for w in windows for n in boundaries if w[1][0].item <= n < w[1][-1].item]
    others = {len(w[1]) for w in windows if all(w is not c for c, _ in crossing)}
    for (step, passes), items in crossing:
        left = [b for b in passes if b.item <= items]
        regular = len(others) == 1 and len({b.item for b in passes}) == len(passes)
        if regular and len(passes) == max(others) + len(left) and max(others) > len(left):
            return step, passes, left, max(others), items
    return None


def condition_of(place: Place) -> str:
    """The innermost ``if`` around a line, as a line of the user's; empty where none is known."""
    around = [n for n in _nodes(place.file) if isinstance(n, ast.If)]
    lines = [n.lineno for n in around if n.lineno < place.line <= (n.body[-1].end_lineno or 0)]
    return f"{place.file}:{max(lines)}   {linecache.getline(place.file, max(lines)).strip()}" if lines else ""


class _TwoCalls:
    """What one run does in place of ``fit``: it calls it twice, with ``items`` batches each."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.came_back = False
        """Whether the first call did so by itself, after one pass over its batches."""
        self._rounds: Callable[[], int] = lambda: 0

    def opened(self, watch: Watch) -> None:
        self._rounds = lambda: watch.record.rounds

    def of(self, loop: TrainLoop) -> Callable[[Any], Any]:
        fit = fit_of(loop)

        def stop() -> NoReturn:
            raise StopFit

        def run(batches: Batches) -> None:
            batches.draw(2 * self.items)
            for number in range(2):
                before = self._rounds()
                part = batches.part(
                    number * self.items,
                    self.items,
                    spent=lambda before=before: self._rounds() >= before + 2 * WINDOWS,  # type: ignore[misc]
                    stepped=lambda before=before: self._rounds() > before,  # type: ignore[misc]
                    stop=stop,
                )
                fit(part)
                self.came_back = self.came_back or batches.taken == self.items
            self._rounds = lambda: 0

        return run
