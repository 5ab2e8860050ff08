"""Scheduler steps and gradient scalers, which have no hooks of their own."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pytest_trainloop.recording.as_caller import as_caller
from pytest_trainloop.recording.built_schedulers import with_subclasses
from pytest_trainloop.recording.events import ScalerCall, SchedulerStep
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.built_schedulers import BuiltSchedulers
    from pytest_trainloop.recording.patches import Patches
    from pytest_trainloop.recording.protocol import Observed
    from pytest_trainloop.recording.samples import Reader


class Schedules:
    """Patches of ``step`` of every scheduler class known when the run begins."""

    def __init__(self, watch: Observed, patches: Patches, built: BuiltSchedulers) -> None:
        self._watch = watch
        self._built = built
        for cls in with_subclasses(LRScheduler):
            if "step" in vars(cls):
                patches.put(cls, "step", self._patched)

    def _patched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            noted = None
            if _under_construction():
                pass
            elif self._watch.thread.scheduling == 0:
                noted = self._note(scheduler, args, kwargs)
            else:
                self._built.steps_inside(scheduler)
            self._watch.thread.scheduling += 1
            try:
                out = as_caller(original, (scheduler, *args), kwargs)
            finally:
                self._watch.thread.scheduling -= 1
            if noted is not None:
                with self._watch.suspended():
                    self._read_lrs(scheduler, noted, "after")
                    noted.until = self._watch.tick()
            return out

        return step

    def _note(self, scheduler: Any, args: Any, kwargs: Any) -> SchedulerStep:
        watch = self._watch
        with watch.suspended():
            optimizer = getattr(scheduler, "optimizer", None)
            place, site = here()
            plateau = isinstance(scheduler, ReduceLROnPlateau)
            noted = SchedulerStep(
                at=watch.tick(),
                place=place,
                site=site,
                scheduler=type(scheduler).__name__,
                optimizer=None if optimizer is None else watch.optimizers.index(optimizer),
                metric=plateau or bool(args or kwargs),
                number=self._built.called(scheduler),
            )
            self._read_lrs(scheduler, noted, "before")
            metric = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(metric, torch.Tensor):
                if metric.numel() == 1:
                    watch.reader.scalar(metric, functools.partial(setattr, noted, "value"))
            elif isinstance(metric, (int, float)):
                noted.value = float(metric)
            watch.add(noted)
        return noted

    def _read_lrs(self, scheduler: Any, noted: SchedulerStep, moment: str) -> None:
        """The rate of each group of the scheduler's optimizer; one that is a tensor is noted when it is read."""
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None) or ()
        lrs_of(groups, self._watch.reader, noted, moment)


def lrs_of(groups: Any, reader: Reader, event: Any, name: str) -> None:
    """Give an event's field of this name the learning rate of each group: NaN where it has none, and later, when it is
    read, that of a tensor."""
    lrs = [group.get("lr") for group in groups if isinstance(group, dict)]
    plain = tuple(float(lr) if isinstance(lr, (int, float)) else float("nan") for lr in lrs)
    setattr(event, name, plain)
    for g, lr in enumerate(lrs):
        if isinstance(lr, torch.Tensor) and lr.numel() == 1:

            def put(value: float, group: int = g) -> None:
                known = getattr(event, name)
                setattr(event, name, (*known[:group], value, *known[group + 1 :]))

            reader.scalar(lr, put)


def _under_construction() -> bool:
    """Whether torch itself steps the scheduler for the first time, inside its constructor."""
    frame = sys._getframe(3)  # past the patch, and what guards it
    while frame is not None and frame.f_globals.get("__name__") == LRScheduler.__module__:
        if frame.f_code.co_name in ("__init__", "_initial_step"):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


_PLAIN_SCALE = GradScaler.scale


class Scalers:
    """Patches of the gradient scaler's calls: the order of scale, unscale, step and update, and skipped steps."""

    def __init__(self, watch: Observed, patches: Patches) -> None:
        self._watch = watch
        self._kept: dict[int, Any] = {}
        for cls in with_subclasses(GradScaler):
            for name, watched in (
                ("scale", self._scale),
                ("unscale_", self._unscale),
                ("step", self._step),
                ("update", self._update),
            ):
                if name in vars(cls):
                    patches.put(cls, name, functools.partial(_around, watched))

    @contextlib.contextmanager
    def _call(self, scaler: Any, what: Any, optimizer: Any = None) -> Iterator[ScalerCall]:
        """The event of a call, open for as long as the call; a subclass that passes it on makes none of its own."""
        watch = self._watch
        self._kept[id(scaler)] = scaler
        with watch.suspended():
            place, site = here()
            call = ScalerCall(
                at=watch.tick(),
                place=place,
                site=site,
                what=what,
                enabled=scaler.is_enabled(),
                scaler=list(self._kept).index(id(scaler)),
            )
            if optimizer is not None:
                call.optimizer = watch.optimizers.index(optimizer)
            if (id(scaler), what) not in watch.thread.scaling:
                watch.add(call)
        watch.thread.scaling.append((id(scaler), what))
        try:
            yield call
            call.until = watch.tick()
        finally:
            watch.thread.scaling.pop()

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with self._call(scaler, "scale") as call:
            out = as_caller(original, (scaler, outputs, *args), kwargs)
        given = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        first = next((t for t in given if isinstance(t, torch.Tensor)), None)
        if first is not None and call.enabled:
            with self._watch.suspended(), torch.no_grad():
                one = torch.ones((), device=first.device)  # the loss itself may be zero or infinite
                self._watch.reader.scalar(_PLAIN_SCALE(scaler, one), functools.partial(setattr, call, "factor"))
        return out

    def _unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        with self._call(scaler, "unscale", optimizer):
            return as_caller(original, (scaler, optimizer), {})

    def _step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._watch.record.steps
        with self._call(scaler, "step", optimizer) as call:
            out = as_caller(original, (scaler, optimizer, *args), kwargs)
            call.stepped = self._watch.record.steps > before
        return out

    def _update(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        with self._call(scaler, "update"):
            return as_caller(original, (scaler, *args), kwargs)


def _around(watched: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        return watched(original, scaler, *args, **kwargs)

    return call
