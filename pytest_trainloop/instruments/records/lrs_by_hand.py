"""Where learning rates go that the project's own code writes into the groups: that code, called on without training.

One further run shows which function of the project's writes the rate, or returns what it is a multiple of, how often it
is called for each step, and with what. Where its arguments are the same objects at every call, or numbers that grow by
equal steps, the calls that would follow are made on the thrown-away loop.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import math
import sys
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.instruments.records.learning_rates import lrs
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.mistakes import unnoticed
from pytest_trainloop.recording.source import here, layer
from pytest_trainloop.runs.projection import Counts, Projected, horizon
from pytest_trainloop.runs.scheduled import Curve, lrs_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import CodeType, FrameType

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.projection import Unit
    from pytest_trainloop.runs.scheduled import LearningRates

FEWEST = 3
"""Calls that show what follows."""

AHEAD, MOST_CALLS = 2_000, 20_000
"""Calls that are made on without a plan, and at most."""

_OTHERWISE_CALLED = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


@dataclass(slots=True)
class _Call:
    at: int
    given: list[Any]
    before: dict[int, LearningRates]
    after: dict[int, LearningRates] = field(default_factory=dict)
    result: Any = None


@dataclass(slots=True)
class _Function:
    code: CodeType
    caller: FrameType | None
    """Keeps the functions alive that ``fit`` itself defines."""
    free: dict[str, Any]
    place: str
    calls: list[_Call] = field(default_factory=list)

    def again(self) -> FunctionType | None:
        """The function itself: of several closures with one code that with the same variables."""
        for one in gc.get_referrers(self.code):
            if isinstance(one, FunctionType) and one.__code__ is self.code:
                cells = zip(self.code.co_freevars, one.__closure__ or (), strict=True)
                if all(cell.cell_contents is self.free.get(name) for name, cell in cells):
                    return one
        return None

    def following(self, number: int) -> list[Any] | None:
        """The arguments of a later call; None where they do not follow from those that were seen, or where a share of
        the whole, from 0 to 1, is over."""
        found = []
        for values in zip(*(call.given for call in self.calls), strict=True):
            first, last = values[0], values[-1]
            plain = all(map(_is_number, values))
            if all(v is first for v in values) or (plain and all(v == first for v in values)):
                found.append(last)
                continue
            step = (last - first) / (len(values) - 1) if plain else 0
            if not plain or any(not math.isclose(b - a, step, rel_tol=1e-6) for a, b in itertools.pairwise(values)):
                return None
            if all(isinstance(v, int) for v in values):
                found.append(first + number * (values[1] - first))
                continue
            share = 0 <= first < last <= 1
            if share and first + number * step > 1 + 1e-9:
                return None
            found.append(min(1.0, first + number * step) if share else first + number * step)
        return found


class LRsByHand:
    """The curves of the optimizers whose rates a line writes; ask for them by ``evidence.shared(RatesByHand.of)``."""

    def __init__(self) -> None:
        self.projected: list[Projected] = []
        self._functions: dict[CodeType, _Function | None] = {}
        self._open: dict[int, _Call] = {}
        self._steps: dict[int, list[tuple[int, LearningRates]]] = {}
        self._optimizers: dict[int, Any] = {}
        self._at = 0

    @classmethod
    def of(cls, evidence: Evidence) -> LRsByHand:
        found = cls()
        record = evidence.run()
        driven = {s.optimizer for s in record.schedulers if s.optimizer is not None}
        built = {o.index: o.first_lrs for o in record.optimizers}
        by_hand = {r.optimizer for r in lrs(record) if "hand" in r.movers}
        by_hand |= {r.optimizer for r in lrs(record) if r.values[0] not in built[r.optimizer][r.group : r.group + 1]}
        by_hand -= driven
        if evidence.repeatable and by_hand:
            with contextlib.suppress(CannotDecide, UsageError, UserCodeError):
                again = evidence.rerun(contexts=found._watching)
                for index in sorted(by_hand):
                    if (one := found._project(again, index, evidence)) is not None:
                        found.projected.append(one)
        found._functions.clear()
        found._optimizers.clear()
        return found

    def _watching(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._profiled(watch),)

    @contextlib.contextmanager
    def _profiled(self, watch: Watch) -> Iterator[None]:
        """A profiler that is at work (the user's) is left alone: then nothing is seen."""
        if sys.getprofile() is not None:
            yield
            return

        def now() -> dict[int, LearningRates]:
            return {index: lrs_of(optimizer) for index, optimizer in watch.optimizers.indexed()}

        @unnoticed
        def profile(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call" and (function := self._known(frame)) is not None:
                given = [frame.f_locals[name] for name in _parameters(frame.f_code)]
                first = function.calls[0].given if function.calls else given
                if any(a is not b and not _is_number(a) for a, b in zip(given, first, strict=True)):
                    self._functions[frame.f_code] = None  # of another batch each time: nothing of it is kept
                else:
                    self._open[id(frame)] = _Call(self._at, given, now())
            elif event == "return" and (call := self._open.pop(id(frame), None)) is not None:
                self._at += 1
                call.at, call.after = self._at, now()
                call.result = argument if _is_number(argument) else None
                if (function := self._functions.get(frame.f_code)) is not None:
                    function.calls.append(call)

        @unnoticed
        def step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            self._at += 1
            for index, known in watch.optimizers.indexed():
                if known is optimizer:
                    self._steps.setdefault(index, []).append((self._at, lrs_of(optimizer)))
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:  # what steps an optimizer trains, and is not called on
                self._functions[frame.f_code] = None
                frame = frame.f_back

        handle = before_steps(step)
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            handle.remove()
            self._optimizers = dict(watch.optimizers.indexed())

    def _known(self, frame: FrameType) -> _Function | None:
        code = frame.f_code
        if code not in self._functions:
            own = layer(code.co_filename) == 2 and not code.co_flags & _OTHERWISE_CALLED
            free = {name: frame.f_locals.get(name) for name in code.co_freevars}
            place = str(here(frame.f_back)[0]) if own else ""
            self._functions[code] = _Function(code, frame.f_back, free, place) if own else None
        return self._functions[code]

    def _project(self, record: Record, index: int, evidence: Evidence) -> Projected | None:
        functions = [f for f in self._functions.values() if f is not None and len(f.calls) >= FEWEST]
        steps, optimizer = self._steps.get(index, []), self._optimizers.get(index)
        writers = [f for f in functions if any(c.before.get(index) != c.after.get(index) for c in f.calls)]
        if len(steps) < FEWEST or optimizer is None:
            return None
        # the innermost function that writes returns first; of those that compute the outermost returns last
        for function in (*writers, *(f for f in reversed(functions) if f not in writers)):
            written = function in writers
            parts = [0.0] if written else _parts(function, steps)
            rhythm = _rhythm(record, function, steps)
            if not parts or rhythm is None or not _is_used(function, index, steps, parts, written=written):
                continue
            unit, leads = rhythm
            plan, window = evidence.declared("steps"), max(1, round(record.items / max(record.rounds, 1)))
            counts = Counts(plan, plan and plan * window, evidence.declared("epochs"))
            seen = [c.after[index] if written else tuple(p * c.result for p in parts) for c in function.calls]
            curve = Curve(calls=[], lrs=seen if leads else [steps[0][1], *seen])
            curve.calls.extend(range(len(curve.lrs)))
            planned = counts.of(unit)
            if self._call_on(function, optimizer, curve, planned, [] if written else parts):
                return Projected(
                    kind=f"{function.code.co_name}()",
                    optimizer=index,
                    made_in_fit=False,
                    place=function.place,
                    made_at=function.place,
                    made_at_line=(function.code.co_filename, function.code.co_firstlineno),
                    unit=unit,
                    window=window,
                    curve=curve,
                    horizon=horizon(curve, ""),
                    settings={},
                    sizes=(),
                    plan=counts,
                    planned=planned,
                )
        return None

    def _call_on(
        self, function: _Function, optimizer: Any, curve: Curve, planned: int | None, parts: Sequence[float]
    ) -> bool:
        """Make the calls that follow, and note the rates; whether they reach the plan, or show anything at all."""
        again, seen = function.again(), len(function.calls)
        if again is None or function.following(seen) is None:
            return False
        try:
            for number in range(seen, min(AHEAD if planned is None else planned + 2, MOST_CALLS) + seen):
                if (given := function.following(number)) is None:
                    break
                result = again(*given)
                now = tuple(part * result for part in parts) if parts else lrs_of(optimizer)
                if any(isinstance(lr, complex) or math.isnan(lr) for lr in now):
                    break
                curve.lrs.append(now)
                curve.calls.append(curve.end + 1)
        except Exception as error:  # of a function that has come to its end
            reraise_ours(error)
        return curve.end >= (seen + FEWEST if planned is None else planned - 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _parameters(code: CodeType) -> Sequence[str]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _before(function: _Function, at: int) -> _Call | None:
    """The last call before a step."""
    return next((call for call in reversed(function.calls) if call.at < at), None)


def _parts(function: _Function, steps: Sequence[tuple[int, LearningRates]]) -> list[float]:
    """What the rate of each group is of the highest result; empty where the results are no numbers."""
    results = [(call.result, lrs) for at, lrs in steps if (call := _before(function, at)) is not None]
    numbers = [(float(r), lrs) for r, lrs in results if _is_number(r)]
    if len(numbers) < len(results) or len({r for r, _ in numbers}) < FEWEST:
        return []
    highest, lrs_there = max(numbers, key=lambda one: abs(one[0]))
    return [lr / highest for lr in lrs_there]


def _is_used(
    function: _Function,
    index: int,
    steps: Sequence[tuple[int, LearningRates]],
    parts: Sequence[float],
    *,
    written: bool,
) -> bool:
    """Whether each step is made at the rates that the last call left, or at these parts of what it returned."""
    for at, own in steps:
        call = _before(function, at)
        if call is None:
            continue
        left = call.after.get(index, ()) if written else tuple(part * call.result for part in parts)
        if len(left) != len(own) or any(not math.isclose(a, b, rel_tol=1e-9) for a, b in zip(left, own, strict=True)):
            return False
    return True


def _rhythm(
    record: Record, function: _Function, steps: Sequence[tuple[int, LearningRates]]
) -> tuple[Unit, bool] | None:
    """What the function is called once for, and whether a call comes before the first step."""
    marks = [at for at, _ in steps]
    each = {sum(a < call.at < b for call in function.calls) for a, b in itertools.pairwise(marks)}
    leads = sum(call.at < marks[0] for call in function.calls)
    if each == {1} and leads <= 1:
        return "step", leads == 1
    window = record.items // max(1, len(steps))
    if len(each) == 1 and each == {window} and leads in (0, window):
        return "micro-batch", leads > 0
    if len(function.calls) == len(record.passes) >= FEWEST and leads <= 1:
        return "epoch", leads == 1
    return None
