"""The schedulers of one run: how often each was called, and what its rates would be if the calls went on.

The schedulers of a thrown-away loop are stepped on after its run, without training. No class need be known: closed
forms, chains, lambdas and those of other libraries are all stepped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.declare.fields import is_whole
from pytest_trainloop.recording.as_caller import as_caller
from pytest_trainloop.recording.built_schedulers import with_subclasses
from pytest_trainloop.recording.construction import maker
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here, layer
from pytest_trainloop.recording.steps import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

    LearningRates = tuple[float, ...]

MOST_CALLS = 60_000
"""Calls that are projected one by one: 0.2 seconds. What goes on beyond them is looked at in leaps."""

LEAPS = 2_000

OWN = 2
"""The layer of the project's own files."""

PLATEAU = "its rates follow a metric"

BY_HAND = "the learning rate is written by hand as well"

_ROUNDING = 1e-10
"""What a rate that is computed from the last one may be off by after some thousand calls, of its highest."""


@dataclass(slots=True, kw_only=True)
class Curve:
    """The rate of each group of one optimizer after each call of its schedulers, from 0 calls on."""

    calls: list[int]
    lrs: list[LearningRates]
    raises_at: int | None = None
    """The call that raises."""
    message: str = ""

    @property
    def end(self) -> int:
        """The last call that was projected."""
        return self.calls[-1]

    @property
    def settles(self) -> int | None:
        """The call after which no rate changes any more; None where one changes until the end, or until it is too small
        for a float."""
        peak = max(max(lrs, default=0.0) for lrs in self.lrs)
        for i in range(len(self.lrs) - 1, 0, -1):
            before = self.lrs[i - 1]
            if self.lrs[i] != before:
                fades = max(before) < peak * _ROUNDING**2
                return None if i == len(self.lrs) - 1 or fades else self.calls[i]
        return 0

    def group(self, number: int) -> list[float]:
        return [lrs[number] for lrs in self.lrs]

    def group_since(self, number: int, call: int) -> list[float]:
        return [lrs[number] for lrs in self.since(call)]

    @property
    def leading(self) -> int:
        """The group whose rate is the highest."""
        return max(range(len(self.lrs[0])), key=lambda g: max(self.group(g)), default=0)

    def peak_at(self, group: int) -> int:
        """The first call at which the rate is as high as it gets, but for the rounding of rates that come again."""
        lrs = self.group(group)
        bound = max(lrs) * (1 - _ROUNDING)
        return self.calls[next(i for i, lr in enumerate(lrs) if lr >= bound)]

    def lowest_at(self, group: int) -> int:
        """The first call after the peak at which the rate is as low as it gets there."""
        lrs = self.group(group)
        after = self.calls.index(self.peak_at(group))
        bound = min(lrs[after:]) + max(lrs) * _ROUNDING
        return self.calls[next(i for i in range(after, len(lrs)) if lrs[i] <= bound)]

    def until(self, call: int) -> list[LearningRates]:
        """The rates of the calls from 0 to this one."""
        return [lrs for at, lrs in zip(self.calls, self.lrs, strict=True) if at <= call]

    def group_between(self, number: int, first: int, last: int) -> list[float]:
        return [lrs[number] for at, lrs in zip(self.calls, self.lrs, strict=True) if first <= at <= last]

    def since(self, call: int) -> list[LearningRates]:
        return [lrs for at, lrs in zip(self.calls, self.lrs, strict=True) if at >= call]

    def lr(self, call: int) -> LearningRates:
        """The rates after so many calls; those of the last call that was projected, beyond it."""
        return self.until(call)[-1]


@dataclass(slots=True, kw_only=True)
class Driven:
    """The schedule of one optimizer in one run: all schedulers that are called on it, together."""

    kinds: tuple[str, ...]
    optimizer: int
    """Its index in the record of the run."""
    groups: int
    place: str
    """The user's line of the first call."""
    made_at: Place | None
    """The user's line that built the (first) scheduler."""
    made_in_fit: bool
    settings: Mapping[str, int]
    """The whole numbers among what the scheduler was built with, by the names of its parameters."""
    calls: int
    steps: int
    """Steps of the optimizer."""
    curve: Curve | None
    why: str = ""
    """Why there is no curve."""
    raised: str = ""
    """What a call of the scheduler raised within the run."""
    alone: Curve | None = None
    """Where its calls would take the rates, were they not written by hand as well."""

    @property
    def kind(self) -> str:
        return " and ".join(dict.fromkeys(self.kinds))


@dataclass(slots=True)
class _Scheduler:
    scheduler: Any
    settings: dict[str, int]
    made_at: Place | None = None
    in_fit: bool = False
    place: str = ""
    calls: int = 0
    given_value: bool = False
    """Whether a call was given a position or a metric."""
    raised: str = ""


@dataclass(slots=True)
class _Traced:
    """What the calls did to the rates of one optimizer."""

    optimizer: Any
    schedulers: list[_Scheduler] = field(default_factory=list)
    start: LearningRates = ()
    trace: list[tuple[int, LearningRates]] = field(default_factory=list)
    """The scheduler of each call, by its number among ``schedulers``, and the rates after it."""
    by_hand: bool = False


class Schedules:
    """Watches one run: ``around`` goes to ``RunPlan.around``, ``contexts`` to ``RunPlan.contexts``.

    Afterwards ``driven`` has one entry for each optimizer on which a scheduler was called. Each schedule is projected
    to ``ahead`` calls, at least.
    """

    def __init__(self, ahead: Callable[[Schedules], int]) -> None:
        self._ahead = ahead
        self._made: dict[int, _Scheduler] = {}
        self._traced: dict[int, _Traced] = {}
        self._in_fit = False
        self._inside = 0
        self._indices: dict[int, tuple[int, int]] = {}
        self.loop: Any = None
        self.driven: list[Driven] = []

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with Patches() as patches:
            for kind in with_subclasses(LRScheduler):
                if "__init__" in vars(kind):
                    patches.put(kind, "__init__", self._making)
                if "step" in vars(kind):
                    patches.put(kind, "step", self._stepping)
            yield
        self.driven = [self._project(traced) for traced in self._traced.values() if traced.trace]
        self._made.clear()
        self._traced.clear()

    def contexts(self, watch: Watch) -> Sequence[contextlib.AbstractContextManager[Any]]:
        return (self._fitting(watch),)

    @contextlib.contextmanager
    def _fitting(self, watch: Watch) -> Iterator[None]:
        self._in_fit = True
        try:
            yield
        finally:
            self._in_fit = False
            for key, traced in self._traced.items():
                index = watch.optimizers.index(traced.optimizer)
                self._indices[key] = (index, watch.record.optimizers[index].steps)

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if id(scheduler) not in self._made:
                self._made[id(scheduler)] = _Scheduler(
                    scheduler,
                    _whole_numbers(original, scheduler, args, kwargs),
                    made_at=maker(scheduler),
                    in_fit=self._in_fit,
                )
            self._inside += 1
            try:
                original(scheduler, *args, **kwargs)
            finally:
                self._inside -= 1

        return init

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not self._in_fit:
                return original(scheduler, *args, **kwargs)
            called, traced = self._before(scheduler, bool(args or kwargs))
            self._inside += 1
            try:
                result = as_caller(original, (scheduler, *args), kwargs)
            except Exception as error:
                called.raised = str(error)
                raise
            finally:
                self._inside -= 1
            called.calls += 1
            traced.trace.append((traced.schedulers.index(called), lrs_of(traced.optimizer)))
            return result

        return step

    def _before(self, scheduler: Any, given_value: bool) -> tuple[_Scheduler, _Traced]:
        called = self._made.setdefault(id(scheduler), _Scheduler(scheduler, {}))
        called.given_value = called.given_value or given_value or isinstance(scheduler, ReduceLROnPlateau)
        place = here()[0]
        library = layer(place.file) != OWN  # of a trainer
        called.place = called.place or str((library and called.made_at) or place)
        optimizer = unwrap(scheduler.optimizer)
        traced = self._traced.setdefault(id(optimizer), _Traced(optimizer))
        now = lrs_of(optimizer)
        if not traced.trace:
            traced.start = traced.start or now
        elif traced.trace[-1][1] != now:
            traced.by_hand = True
        if called not in traced.schedulers:
            traced.schedulers.append(called)
        return called, traced

    def _project(self, traced: _Traced) -> Driven:
        first = traced.schedulers[0]
        index, steps = self._indices.get(id(traced.optimizer), (0, 0))
        driven = Driven(
            kinds=tuple(type(one.scheduler).__name__ for one in traced.schedulers),
            optimizer=index,
            groups=len(traced.start),
            place=first.place,
            made_at=first.made_at,
            made_in_fit=any(one.in_fit for one in traced.schedulers),
            settings=first.settings,
            calls=first.calls,
            steps=steps,
            curve=None,
            raised=next((one.raised for one in traced.schedulers if one.raised), ""),
        )
        driven.why = _why_not(traced)
        if driven.why == PLATEAU:
            driven.curve = Curve(calls=[0], lrs=[traced.start])  # it is lowered by what the metric does
        elif driven.why == BY_HAND and len(traced.schedulers) == 1 and not driven.raised:
            driven.alone = Curve(calls=[0], lrs=[traced.trace[-1][1]])
            self.driven.append(driven)
            project([first.scheduler], traced.optimizer, driven.alone, self._ahead(self))
            self.driven.pop()
        elif not driven.why:
            rounds = [lrs for number, lrs in traced.trace if number == len(traced.schedulers) - 1]
            curve = Curve(calls=list(range(len(rounds) + 1)), lrs=[traced.start, *rounds])
            driven.curve = curve
            if driven.raised:
                curve.raises_at, curve.message = curve.end + 1, driven.raised
            else:
                self.driven.append(driven)  # what is looked ahead by may ask for its calls
                project([one.scheduler for one in traced.schedulers], traced.optimizer, curve, self._ahead(self))
                self.driven.pop()
        return driven


def _why_not(traced: _Traced) -> str:
    kinds = [type(one.scheduler).__name__ for one in traced.schedulers]
    if any(isinstance(one.scheduler, ReduceLROnPlateau) for one in traced.schedulers):
        return PLATEAU
    if any(one.given_value for one in traced.schedulers):
        return f"the loop gives {kinds[0]} its position at each call"
    if traced.by_hand:
        return BY_HAND
    if any(one.in_fit for one in traced.schedulers[1:]) and len(set(kinds)) < len(kinds):
        return f"fit makes a new {kinds[0]} again and again"
    if len({one.calls for one in traced.schedulers}) > 1:
        return f"{' and '.join(kinds)} are called at different times"
    return ""


def project(schedulers: Sequence[Any], optimizer: Any, curve: Curve, ahead: int) -> None:
    """Step the schedulers on, all of them once a call, up to this number of calls; note where one raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for call in range(curve.end + 1, min(ahead, MOST_CALLS) + 1):
                for scheduler in schedulers:
                    scheduler.step()
                now = lrs_of(optimizer)
                if any(math.isnan(lr) for lr in now):
                    return
                curve.calls.append(call)
                curve.lrs.append(now)
            if ahead > MOST_CALLS and len(schedulers) == 1 and _leaps(schedulers[0]):
                stride = -(-(ahead - MOST_CALLS) // LEAPS)
                for call in range(MOST_CALLS + stride, ahead + 1, stride):
                    schedulers[0].step(call)
                    curve.calls.append(call)
                    curve.lrs.append(lrs_of(optimizer))
        except Exception as error:  # of a scheduler that has come to its end, or of a lambda
            reraise_ours(error)
            total = getattr(schedulers[0], "total_steps", 0)  # the call itself may lie between two leaps
            curve.raises_at = int(total) + 1 if is_whole(total) and total >= curve.end else curve.end + 1
            curve.message = f"{type(error).__name__}: {error}"


def _leaps(scheduler: Any) -> bool:
    """Whether ``step(n)`` goes to the n-th call."""
    return "epoch" in inspect.signature(scheduler.step).parameters


def lrs_of(optimizer: Any) -> LearningRates:
    """The rate of each group: 0 where it has none, as of Adafactor(lr=None); NaN for a complex number, as
    (1 - step / total) ** 0.9 gives beyond the last step."""
    lrs = (0.0 if (lr := group.get("lr")) is None else lr for group in optimizer.param_groups)
    return tuple(math.nan if isinstance(lr, complex) else float(lr) for lr in lrs)


def _whole_numbers(original: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> dict[str, int]:
    try:
        given = inspect.signature(original).bind(scheduler, *args, **kwargs).arguments
    except (TypeError, ValueError):
        return {}
    return {name: int(value) for name, value in given.items() if is_whole(value) and name != "last_epoch"}
