"""Functions that write into a tensor of the batch, and what reads it after they have returned."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.paths import FIT_CALLER
from pytest_trainloop.declare import nested
from pytest_trainloop.recording.as_caller import is_stand_in
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import storage_of
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from pytest_trainloop.instruments.tracing.call_log import Call


@dataclass(slots=True)
class Write:
    """The first write of one call of a function into one tensor of the batch."""

    call: Call
    leaf: int
    """The tensor of the batch, in the order in which fit got them."""
    activation: int
    """The identity of the function's frame, while that lives."""
    code: int
    function: str
    argument: str
    """The name of the function's argument that is written into."""
    returned: int | None = None
    """The number of the first call after the function has returned."""
    reads: list[Call] = field(default_factory=list)
    """Calls after that which are given the tensor."""


@dataclass(slots=True)
class BatchWrites:
    """Follows writes into the tensors of the batch; ``restores`` is the call whose function's writes are undone when
    it returns."""

    restores: int = -1
    leaves: list[torch.Tensor] = field(default_factory=list)
    copies: list[torch.Tensor] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)

    def take(self, tensors: list[torch.Tensor]) -> None:
        self.leaves += tensors
        self.copies += [t.detach().clone() for t in tensors]

    def forget(self) -> None:
        """Let go of the project's tensors."""
        self.leaves.clear()

    def follow(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call that is about to be made."""
        if self.writes:
            self._read(call, args, kwargs)
        if call.writes and args and isinstance(args[0], torch.Tensor):
            self._written(call, args[0])

    def _read(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running = {(id(frame), id(frame.f_code)) for frame in _frames()}  # functions that have not returned yet
        for write in self.writes:
            if (write.activation, write.code) in running:
                continue
            if write.returned is None:
                write.returned = call.number
                if write.call.number == self.restores:
                    self.leaves[write.leaf].data.copy_(self.copies[write.leaf])
            storage = storage_of(self.leaves[write.leaf])
            if any(storage_of(t) == storage for t in tensors_in(args, kwargs)):
                write.reads.append(call)

    def _written(self, call: Call, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        leaf = next((i for i, t in reversed(list(enumerate(self.leaves))) if storage_of(t) == storage), None)
        # the project's or a library's function that makes the call
        own = (f for f in _frames() if layer(f.f_code.co_filename) and not is_stand_in(f.f_code))
        frame = next(own, None)
        if leaf is None or frame is None:
            return
        key = (id(frame), id(frame.f_code))
        if any(w.leaf == leaf and (w.activation, w.code) == key and w.returned is None for w in self.writes):
            return
        argument = _argument(frame, storage)
        if argument:
            owner, name = frame.f_locals.get("self"), frame.f_code.co_name
            name = name if owner is None else f"{type(owner).__name__}.{name}"
            self.writes.append(Write(call, leaf, *key, name, argument))


def _frames() -> Iterator[FrameType]:
    """Those inside of ``fit``, from the innermost."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != FIT_CALLER:
        yield frame
        frame = frame.f_back


def _argument(frame: FrameType, storage: int) -> str:
    """The argument of a function that holds a tensor of this storage."""
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        value = frame.f_locals.get(name)
        if isinstance(value, torch.nn.Module):
            continue
        if any(storage_of(t) == storage for t in nested.tensors(value)):
            return name if isinstance(value, torch.Tensor) else f"{name}[...]"
    return ""
