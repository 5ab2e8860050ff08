"""Calls of torch functions while a run is watched in full: losses, and writes to gradients."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from pytest_trainloop.recording.as_caller import as_caller
from pytest_trainloop.recording.events import ClipCall, GradWrite, LossCall, Place
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.samples import shape_of
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import frames_called, here
from pytest_trainloop.recording.torch_names import (
    ATTENTION,
    CLASS_LOSSES,
    DROPOUTS,
    FINITENESS_TESTS,
    IN_PLACE_OPERATORS,
    LOSSES,
    SIZES,
    UNSCALING,
    ZEROING,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from pytest_trainloop.recording.protocol import Observed

_GRAD = torch.Tensor.grad
_DATA = torch.Tensor.data
_READ = (_GRAD, _DATA)
_NO_WRITES = frozenset({"requires_grad_", "detach_", "share_memory_"})
_WARY = FINITENESS_TESTS | {"isposinf", "nan_to_num", "nansum", "nanmean", "nanmedian"}
"""A loop that calls these expects values that are not finite."""


class Functions(FunctionMode):
    """The function mode of the full density. Of an optimizer's step it looks at the closure only."""

    in_steps = False

    def __init__(self, watch: Observed) -> None:
        super().__init__()
        self._watch = watch
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._writer: tuple[FrameType, int] | None = None
        self._written: set[int] = set()
        self._active = True

    def take_off(self) -> None:
        """Look at nothing more: the mode leaves torch's stack, or stays idle while torch is in a call through it."""
        self._active, self._writer = False, None
        super().take_off()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "__get__" and getattr(func, "__self__", None) not in _READ:
            return passed_on(func, args, kwargs)
        if not self._active:
            return as_caller(func, args, kwargs)
        watch = self._watch
        if watch.thread.stepping and self._inside_step(name, func, args):
            return self._read(func, args, kwargs) if name == "__get__" else as_caller(func, args, kwargs)
        kind = _kind(name)
        if kind == "get":
            return self._read(func, args, kwargs)
        if kind == "set" and getattr(func, "__self__", None) is _GRAD:
            self._set(name, args)
        elif kind == "write" and self._gradients and args:
            return self._in_place(name, func, args, kwargs)
        elif kind == "loss" and getattr(F, name, None) is func:
            return self._loss(name, func, args, kwargs)
        elif kind == "wary":
            watch.record.wary = True
        elif kind == "number":
            out = as_caller(func, args, kwargs)
            watch.record.wary = watch.record.wary or (isinstance(out, float) and not math.isfinite(out))
            return out
        elif kind == "dropout":
            watch.record.drops = watch.record.drops or _drops(name, args, kwargs)
        elif kind == "autograd" and func in watch.gradients.originals:
            return watch.gradients.during(watch.gradients.originals[func], func, args, kwargs)
        return as_caller(func, args, kwargs)

    def _inside_step(self, name: str, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether a step is still under way: an exception may have ended it, and the loop gone on to ``zero_grad``.

        A step that computes with a gradient has read it; one that asks whether there is one has not.
        """
        thread = self._watch.thread
        if name == "__get__" and getattr(func, "__self__", None) is _GRAD and thread.open:
            if sys._getframe(3).f_code.co_name == "zero_grad":
                self._watch.optimizers.drop_aborted()
                return thread.stepping > 0
            thread.open[-1].asked = True
        elif thread.open and not thread.open[-1].computed and not _asks_for_shape(name):
            thread.open[-1].computed = any(self._parameter_of(t) is not None for t in tensors_in(args))
        return True

    def _read(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Remember which tensors are gradients: every in-place write begins with reading ``.grad``."""
        out = as_caller(func, args, kwargs)
        owner = getattr(func, "__self__", None)
        if owner is _GRAD:
            index = self._watch.table.index(args[0])
            if index is not None and isinstance(out, torch.Tensor):
                self._gradients[id(out)] = (weakref.ref(out), index)
            elif out is None and sys._getframe(3).f_code.co_name == "zero_grad":
                self._note_optimizer(sys._getframe(3))
                self._note("none", [] if index is None else [index], "zero_grad")
        elif owner is _DATA and isinstance(out, torch.Tensor):
            index = self._parameter_of(args[0])
            if index is not None:
                self._gradients[id(out)] = (weakref.ref(out), index)
        return out

    def _note_optimizer(self, zeroing: FrameType) -> None:
        """An optimizer that zeroes is known from then on, also if it never steps."""
        zeroed_by = zeroing.f_locals.get("self")
        if isinstance(zeroed_by, torch.optim.Optimizer):
            with self._watch.suspended():
                self._watch.optimizers.index(zeroed_by)

    def _parameter_of(self, tensor: Any) -> int | None:
        """The parameter whose gradient this tensor is, if it is one."""
        known = self._gradients.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _set(self, name: str, args: tuple[Any, ...]) -> None:
        index = self._watch.table.index(args[0])
        if index is None:
            return
        value = args[1] if name == "__set__" and len(args) > 1 else None
        if value is None:
            zeroing = frames_called("zero_grad", 3)
            if zeroing is not None:
                self._note_optimizer(zeroing)
            self._note("none", [index], "grad = None" if zeroing is None else "zero_grad")
        elif self._parameter_of(value) != index:
            self._watch.trained.claim([index])
            self._note("assigned", [index], "grad = ...")

    def _in_place(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        targets = args[0] if isinstance(args[0], (list, tuple)) else (args[0],)
        written = {i: t for t in targets if (i := self._parameter_of(t)) is not None}
        if not written or name == UNSCALING:
            return as_caller(func, args, kwargs)
        if name in ZEROING or (name == "fill_" and args[1:] == (0,)):
            self._note("zero", list(written), "zero_grad" if frames_called("zero_grad", 4) else name)
            return as_caller(func, args, kwargs)
        clip = frames_called("clip_grad_norm_", 6) or frames_called("clip", 6)
        if clip is None:
            self._note("altered", list(written), name)
            return as_caller(func, args, kwargs)
        return self._clip(clip, written, func, args, kwargs)

    def _clip(
        self, frame: Any, written: dict[int, torch.Tensor], func: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        watch = self._watch
        limit = frame.f_locals.get("max_norm", frame.f_locals.get("clip_value"))
        with watch.suspended():
            before = {i: watch.reader.sample(t) for i, t in written.items()}
        out = as_caller(func, args, kwargs)
        event = self._note("clipped", list(written), frame.f_code.co_name)
        with watch.suspended():
            event.limit = float(limit) if isinstance(limit, (int, float)) else event.limit
            event.before.update(before)
            event.after.update({i: watch.reader.sample(t) for i, t in written.items()})
        return out

    def _note(self, how: Any, indices: list[int], by: str) -> GradWrite:
        """Add the write, or join it to the one before it if it is of the same kind and place."""
        watch = self._watch
        with watch.suspended():
            frame = sys._getframe(4)
            writer, self._writer = self._writer, (frame, frame.f_lineno)
            last = next((e for e in reversed(watch.record.events) if not isinstance(e, ClipCall)), None)
            place: Place | None = None
            if isinstance(last, GradWrite) and last.how == how and self._written.isdisjoint(indices):
                if writer != self._writer:  # a loop over parameters writes them all from one line
                    place, site = here()
                if place is None or last.site[:1] == site[:1]:
                    last.parameters.extend(indices)
                    self._written.update(indices)
                    return last
            if place is None:
                place, site = here()
            event = GradWrite(at=watch.tick(), place=place, site=site, how=how, parameters=list(indices), by=by)
            self._written = set(indices)
            watch.add(event)
            return event

    def _loss(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self._watch
        out = as_caller(func, args, kwargs)
        with watch.suspended():
            given = args[0] if args else kwargs.get("input")
            target = args[1] if len(args) > 1 else kwargs.get("target")
            place, site = here()
            call = LossCall(
                at=watch.tick(),
                place=place,
                site=site,
                name=name,
                input_shape=_shape(given),
                input_dtype=_dtype(given),
                target_shape=_shape(target),
                target_dtype=_dtype(target),
                reduction=str(kwargs.get("reduction", "mean")),
                ignore_index=kwargs.get("ignore_index", -100) if name in CLASS_LOSSES else None,
            )
            if isinstance(out, torch.Tensor) and out.numel() == 1:
                watch.reader.scalar(out, lambda value: setattr(call, "value", value))
            watch.add(call)
        return out


def _drops(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call drops anything, as far as its arguments are named."""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return bool(kwargs.get("p", kwargs.get("dropout_p", 1.0)) and kwargs.get("training", True))


@functools.cache
def _asks_for_shape(name: str) -> bool:
    return name == "__get__" or name.endswith("_like") or name.startswith("new_") or name in SIZES


@functools.cache
def _kind(name: str) -> Literal["get", "set", "write", "loss", "wary", "number", "dropout", "autograd", ""]:
    """What a function of this name may do that is recorded."""
    if name == "__get__":
        return "get"
    if name in ("__set__", "__delete__"):
        return "set"
    if name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES):
        return "write"
    if name in LOSSES:
        return "loss"
    if name in _WARY:
        return "wary"
    if name in ("item", "__float__"):
        return "number"
    if name in DROPOUTS or name in ATTENTION:
        return "dropout"
    return "autograd" if name in ("backward", "grad") else ""


def _shape(value: Any) -> tuple[int, ...]:
    return shape_of(value) if isinstance(value, torch.Tensor) else ()


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
