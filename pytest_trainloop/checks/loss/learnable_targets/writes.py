"""Functions that write into a tensor that they are given, and what reads it after they have returned."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.paths import FIT_CALLER
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.values import plain
from pytest_trainloop.recording.as_caller import is_stand_in
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import storage_of
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from pytest_trainloop.instruments.tracing.call_log import Call


MOST_ENTRIES = 1_000_000
"""Entries of a tensor that is not of the batch above which it is not copied."""


@dataclass(slots=True)
class Write:
    """The first write of one call of a function into one tensor that it is given."""

    call: Call
    target: torch.Tensor
    before: torch.Tensor
    """A copy of the target's entries before the write, or of the batch's when fit got it."""
    leaf: int
    """Which tensor of the batches it is, in the order in which fit got them; -1 for another."""
    frame: FrameType | None
    """The call of the function that writes; held, since another call's may get its address."""
    function: str
    argument: str
    """The name of the function's argument that is written into."""
    returned: int | None = None
    """The number of the first call after the function has returned."""
    reads: list[Call] = field(default_factory=list)
    """Calls after that which are given the tensor."""
    again: bool = False
    """Whether another call of the function reads it: a state, such as the mask of what was visited."""


@dataclass(slots=True)
class ArgumentWrites:
    """Follows writes into the tensors of the batch, and into others without a history that a function is given;
    ``restores`` is the call whose function's writes are undone when it returns."""

    restores: int = -1
    leaves: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """The tensors of the batches, each with a copy."""
    writes: list[Write] = field(default_factory=list)

    def take(self, tensors: list[torch.Tensor]) -> None:
        self.leaves += [(t, t.detach().clone()) for t in tensors]

    def forget(self) -> None:
        """Let go of the project's tensors."""
        self.leaves.clear()
        for write in self.writes:
            write.target, write.before, write.frame = torch.empty(0), torch.empty(0), None

    def follow(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call that is about to be made."""
        if self.writes:
            self._read(call, args, kwargs)
        if call.writes and args and isinstance(args[0], torch.Tensor):
            self._written(call, args[0])

    def _read(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running = list(_frames())  # functions that have not returned yet
        for write in self.writes:
            if any(frame is write.frame for frame in running):
                continue
            if write.returned is None:
                write.returned = call.number
                if write.call.number == self.restores:
                    write.target.data.copy_(write.before)
            storage = storage_of(write.target)
            if any(storage_of(t) == storage for t in tensors_in(args, kwargs)):
                write.reads.append(call)
                write.again |= any(write.frame is not None and write.frame.f_code is f.f_code for f in running)

    def _written(self, call: Call, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        # the project's or a library's function that makes the call
        own = (f for f in _frames() if layer(f.f_code.co_filename) and not is_stand_in(f.f_code))
        frame = next(own, None)
        if frame is None or not storage:
            return
        mine = [w for w in self.writes if w.frame is frame and w.returned is None]
        if any(storage_of(w.target) == storage for w in mine):
            return
        argument, given = _argument(frame, storage)
        leaf = next((i for i, (t, _) in reversed(list(enumerate(self.leaves))) if storage_of(t) == storage), -1)
        if leaf < 0 and (given is None or given.requires_grad or given.numel() > MOST_ENTRIES or not plain(given)):
            return
        if argument and given is not None:
            target, before = self.leaves[leaf] if leaf >= 0 else (given, given.detach().clone())
            owner, name = frame.f_locals.get("self"), frame.f_code.co_name
            name = name if owner is None else f"{type(owner).__name__}.{name}"
            self.writes.append(Write(call, target, before, leaf, frame, name, argument))


def _frames() -> Iterator[FrameType]:
    """Those inside of ``fit``, from the innermost."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != FIT_CALLER:
        yield frame
        frame = frame.f_back


def _argument(frame: FrameType, storage: int) -> tuple[str, torch.Tensor | None]:
    """The argument of a function that holds a tensor of this storage, and the tensor."""
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        value = frame.f_locals.get(name)
        if isinstance(value, torch.nn.Module):
            continue
        found = next((t for t in nested.tensors(value) if storage_of(t) == storage), None)
        if found is not None:
            return name if isinstance(value, torch.Tensor) else f"{name}[...]", found
    return "", None
