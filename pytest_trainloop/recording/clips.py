"""Calls of torch's clips of gradients: which tensors they were given, and what was in ``.grad``."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
import types
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.as_caller import as_caller
from pytest_trainloop.recording.events import ClipCall, GradWrite
from pytest_trainloop.recording.function_mode import is_aside
from pytest_trainloop.recording.mistakes import PASSING_OVER, guarded
from pytest_trainloop.recording.samples import _dense, readable
from pytest_trainloop.recording.shards import local
from pytest_trainloop.recording.source import here, layer
from pytest_trainloop.recording.torch_internals import clip_cells, is_traced

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from pytest_trainloop.recording.events import Place, Site
    from pytest_trainloop.recording.protocol import Observed


class Clips:
    """Wrappers of the functions behind torch's public clips. In-place writes do not show a clip that finds nothing."""

    def __init__(self, watch: Observed) -> None:
        self._watch = watch
        self._iterators: list[Any] = []
        self._unknown: list[tuple[ClipCall, int, torch.Tensor, torch.Tensor | None]] = []
        self._originals = [(cell, cell.cell_contents) for cell in clip_cells().values()]
        for name, cell in clip_cells().items():
            cell.cell_contents = guarded(self._watched(name, cell.cell_contents), cell.cell_contents)

    def remove(self) -> None:
        for cell, original in self._originals:
            cell.cell_contents = original
        self._originals.clear()
        self._iterators.clear()

    def settle(self) -> None:
        """Find the tensors that only a later step made known: loose ones in an optimizer that was not declared."""
        for call, part, tensor, norm in self._unknown:
            index = self._watch.table.index(tensor)
            if index is None:
                call.others += norm is not None
                call.idle += [tuple(tensor.shape)] if norm is None else []
                continue
            call.parts[part].append(index)
            if norm is not None:
                self._watch.reader.scalar(norm, functools.partial(call.norms.__setitem__, index))
        self._unknown.clear()

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = _signature(original) if original.__closure__ is None else inspect.signature(original)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            watch = self._watch
            if watch.thread.clipping or not watch.full or watch.is_suspended or is_aside() or is_traced():
                return as_caller(original, args, kwargs)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return as_caller(original, args, kwargs)
            watch.thread.clipping = True
            try:
                return self._during(name, original, bound)
            finally:
                watch.thread.clipping = False

        return watched

    def _during(self, name: str, original: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        given = bound.arguments["parameters"]
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
        exhausted = isinstance(given, types.GeneratorType) and not tensors
        if isinstance(given, Iterator):
            bound.arguments["parameters"] = tensors
        call = None
        with PASSING_OVER, self._watch.suspended(), torch.no_grad():
            call = self._open(name, bound, given, tensors)
        if exhausted:
            self._warn(original, bound)
        out = as_caller(original, bound.args, bound.kwargs)
        with PASSING_OVER, self._watch.suspended(), torch.no_grad():
            if call is None:
                pass
            elif name == "clip_grad_value_":
                for i in call.parts[-1]:
                    self._norm(self._watch.table.tensors[i], call.left, i)
            elif isinstance(out, torch.Tensor):
                self._watch.reader.scalar(out, functools.partial(call.totals.__setitem__, len(call.parts) - 1))
        return out

    def _warn(self, original: Callable[..., Any], bound: inspect.BoundArguments) -> None:
        """Give torch's warning of an empty generator on the user's line: it counts frames, and one is ours."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            as_caller(original, ((tensor for tensor in bound.arguments["parameters"]), *bound.args[1:]), bound.kwargs)
        place, site = here()
        for warning in caught:
            filename, line = site[0] if site else (place.file, place.line)
            warnings.warn_explicit(warning.message, warning.category, filename, line)

    def _open(self, name: str, bound: inspect.BoundArguments, given: Any, tensors: list[Any]) -> ClipCall:
        watch = self._watch
        place, site = here()
        limit = bound.arguments.get("clip_value", bound.arguments.get("max_norm"))
        known = [(t, watch.table.index(t)) for t in tensors if isinstance(t, torch.Tensor)]
        part = [index for _, index in known if index is not None]
        call = self._of_the_same_loop(part, name, _number(limit), place, site)
        if call is None:
            call = ClipCall(at=watch.tick(), place=place, site=site, by=name, limit=_number(limit))
            watch.add(call)
            iterator = given if isinstance(given, Iterator) else None if tensors else _listed()
            if iterator is not None:
                call.iterator = self._number_of(iterator)
            watch.thread.clip = call
            watch.trained.claim(part)
            for index in sorted(watch.trained.here()):
                self._norm(watch.table.tensors[index], call.norms, index)
        call.parts.append(part)
        call.totals.append(math.nan)
        strange = [tensor for tensor, index in known if index is None]
        stand_ins = self._stand_ins() if strange else {}
        for tensor in strange:
            owner = _parameter_behind(tensor, stand_ins)
            if owner is not None:
                call.stand_ins.append(owner)
            else:
                self._unknown.append((call, len(call.parts) - 1, tensor, _norm_of(tensor)))
        return call

    def _of_the_same_loop(self, part: list[int], name: str, limit: float, place: Place, site: Site) -> ClipCall | None:
        """The call that this one continues: of the same line, with nothing between, on other tensors."""
        for event in reversed(self._watch.record.events):
            if isinstance(event, ClipCall):
                same_call = (event.by, event.limit, event.place, event.site) == (name, limit, place, site)
                own = event is self._watch.thread.clip
                return event if own and same_call and part and set(event.given).isdisjoint(part) else None
            if not isinstance(event, GradWrite) or event.how != "clipped":
                return None
        return None

    def _number_of(self, iterator: Any) -> int:
        for number, known in enumerate(self._iterators):
            if known is iterator:
                return number
        self._iterators.append(iterator)
        return len(self._iterators) - 1

    def _norm(self, tensor: torch.Tensor, norms: dict[int, float], index: int) -> None:
        norm = _norm_of(tensor)
        if norm is not None:
            self._watch.reader.scalar(norm, functools.partial(norms.__setitem__, index))

    def _stand_ins(self) -> dict[Any, int]:
        """The parameters by the identity of their gradient and by the address of their data."""
        found: dict[Any, int] = {}
        here = self._watch.trained.here()
        for index, tensor in enumerate(self._watch.table.tensors):
            if not readable(tensor):
                continue
            if index in here and tensor.grad is not None:
                found["grad", id(tensor.grad)] = index
            if tensor.numel():
                found["data", tensor.data_ptr(), tuple(tensor.shape)] = index
        return found


@functools.lru_cache(maxsize=8)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """That of one of torch's own functions: it is asked in each run."""
    return inspect.signature(function)


def _parameter_behind(tensor: torch.Tensor, stand_ins: dict[Any, int]) -> int | None:
    """The parameter in whose place its gradient or a view of its data is passed."""
    if not tensor.is_leaf or tensor.grad is not None or not readable(tensor):
        return None
    by_gradient = stand_ins.get(("grad", id(tensor)))
    return stand_ins.get(("data", tensor.data_ptr(), tuple(tensor.shape))) if by_gradient is None else by_gradient


def _norm_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The Euclidean norm of a tensor's gradient, on its device: NaN where it is unreadable, None for none."""
    grad = tensor.grad if tensor.is_leaf else None
    if grad is None:
        return None
    grad = local(grad)
    if not readable(grad):
        return torch.full((), math.nan)
    values = _dense(grad.detach())
    low = values.dtype in (torch.float16, torch.bfloat16)
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float32 if low else None)
    return norm


def _listed() -> Any:
    """The used-up iterator that a library was given, and of which it made the empty list of this call (Accelerate)."""
    frame: FrameType | None = sys._getframe(1)
    libraries = 0
    while frame is not None and libraries < 3 and (rank := layer(frame.f_code.co_filename)) < 2:
        libraries += rank
        for name in frame.f_code.co_varnames[: min(frame.f_code.co_argcount, 2)] if rank else ():
            value = frame.f_locals.get(name)
            if isinstance(value, (filter, map, types.GeneratorType)):
                return value if _used_up(value) else None
        frame = frame.f_back
    return None


def _used_up(iterator: Any) -> bool:
    """Whether nothing is left in an iterator; nothing is taken from it."""
    if isinstance(iterator, types.GeneratorType):
        return iterator.gi_frame is None
    if isinstance(iterator, (filter, map)):
        parts: Any = iterator.__reduce__()
        return any(map(_used_up, parts[1][1:]))
    return operator.length_hint(iterator, 1) == 0


def _number(limit: Any) -> float:
    """A limit as a number; one that is a tensor on an accelerator is not waited for."""
    if isinstance(limit, torch.Tensor):
        return float(limit) if limit.numel() == 1 and limit.device.type == "cpu" else float("nan")
    return float(limit) if isinstance(limit, (int, float)) else float("nan")
