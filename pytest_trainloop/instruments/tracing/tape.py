"""The tape: what every tensor of a step was made of, by which call of torch, in which module, on which line.

One mode records the calls between two optimizer steps; nothing is computed while it records. What a check wants to know
is asked afterwards (``tape_queries``), or by a listener while a call is made, when its tensors are there.

A ``Value`` is a tensor between two writes to it. It holds the tensor weakly: a graph that is to be used keeps it alive.
Values point to what they were made of and never ahead, so they are freed without the garbage collector.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_trainloop.core.paths import FIT_CALLER
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.arguments import is_dense
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.recording.samples import readable, shape_of, storage_of
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import NOWHERE, layer, place_of
from pytest_trainloop.recording.torch_internals import writes_in_place
from pytest_trainloop.recording.torch_names import AUTOGRAD_CALLS, CONSTANT_ATTRIBUTES, IN_PLACE_OPERATORS, INDEXING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import CodeType, FrameType

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

MOST_CALLS = 50_000
"""Calls that are recorded between two steps."""

DEEPEST = 80
"""Frames of the stack that are looked at."""

_MAKES_NONE = AUTOGRAD_CALLS | CONSTANT_ATTRIBUTES | {"item", "tolist", "numpy"}
_USERS, _LIBRARY, _END, _FUNCTION = 1, 2, 4, 8


class Value:
    """One tensor: the ``call`` that made it (None for one from outside) and which of its results it is. ``batch`` has a
    bit for each tensor of the batch that it was made of; ``path`` is its own place in the batch."""

    __slots__ = (
        *("__weakref__", "_tensor", "batch", "call", "floating"),
        *("history", "parameter", "path", "shape", "slot", "version"),
    )

    def __init__(self, tensor: torch.Tensor, call: Call | None = None, slot: int = 0, batch: int = 0) -> None:
        try:
            shape = tensor.shape
        except RuntimeError:  # its parts are of several sizes
            shape = torch.Size(shape_of(tensor))
        self.call, self.slot, self.shape, self.batch = call, slot, shape, batch
        self.version = writes_in_place(tensor)
        self.history = tensor.requires_grad
        self.floating = tensor.dtype.is_floating_point
        self.parameter = isinstance(tensor, nn.Parameter)
        self.path = ""
        small_constant = not self.history and shape.numel() == 1  # the number in a product, which nothing else holds
        self._tensor: Any = tensor if small_constant else weakref.ref(tensor)

    @property
    def now(self) -> torch.Tensor | None:
        """The tensor while it lives, with the entries that it has now."""
        found: torch.Tensor | None = self._tensor() if type(self._tensor) is weakref.ref else self._tensor
        return found

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor while it lives and nothing has written to it."""
        found = self.now
        return found if found is None or self.parameter or writes_in_place(found) == self.version else None

    @property
    def op(self) -> str:
        return "" if self.call is None else self.call.op

    @property
    def parents(self) -> tuple[Value, ...]:
        return () if self.call is None else self.call.inputs

    @property
    def is_number(self) -> bool:
        return math.prod(self.shape) == 1

    @property
    def number(self) -> float:
        """The entry of a tensor that has one; NaN where there is none, or it cannot be read any more."""
        tensor = self.tensor if self.is_number else None
        if tensor is None or tensor.is_complex() or not is_dense(tensor) or not readable(tensor):
            return math.nan
        return float(tensor.detach())

    def keep(self) -> None:
        """Hold the tensor from now on."""
        self._tensor = self.now


class Call:
    """One call of a torch function. Its arguments have a ``Value`` where a tensor was."""

    __slots__ = ("_at", "_module", "args", "func", "inputs", "kwargs", "number", "op", "watch", "writes")

    op: str
    """The function's name; without the underscore where it writes in place."""
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Value, ...]
    number: int
    writes: bool
    watch: Watch
    _at: tuple[str, int] | None
    _module: nn.Module | None

    @property
    def place(self) -> Place:
        return NOWHERE if self._at is None else place_of(*self._at)

    @property
    def is_the_projects(self) -> bool:
        """Whether it was made on a line of the project's."""
        return self._at is not None and layer(self._at[0]) == 2

    @property
    def module(self) -> str:
        """The path of the module that made it."""
        return "" if self._module is None else self.watch.table.path_of(self._module)

    @property
    def name(self) -> str:
        """The function's own name: with the underscores of one that writes in place."""
        return name_of(self.func)

    @property
    def evaluates(self) -> bool:
        """Whether the module that made it is in evaluation mode now."""
        return self._module is not None and not self._module.training

    @property
    def numbers(self) -> tuple[float, ...]:
        """The plain numbers among its arguments."""
        return tuple(float(v) for v in self.args if isinstance(v, (int, float)) and not isinstance(v, bool))

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else default)


class Listener:
    """Sees calls while they are made and all their tensors are there. Each method does nothing; override some."""

    def before(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call is about to be made."""

    def after(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """A call was made: gives what takes the place of its result, or None."""

    def raised(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        """A call raised."""

    def began(self, frame: FrameType) -> Any:
        """A function runs: gives what ``ended`` is called with, or None."""

    def ended(self, running: Any, result: torch.Tensor) -> None:
        """A function has ended, and this is the last result with a history that was made in it."""

    def new_step(self) -> None:
        """An optimizer step was made, and the tape forgets what was before."""


class Tape(WatchingMode):
    """Records the calls of a run made in its ``contexts``.

    The ``listener`` sees the calls of ``ops``, and the functions for whose frames ``may_run`` holds: a frame on the
    stack of a call is a function that runs.
    """

    most = MOST_CALLS

    def __init__(
        self,
        listener: Listener | None = None,
        ops: frozenset[str] = frozenset(),
        may_run: Callable[[FrameType], bool] | None = None,
    ) -> None:
        super().__init__()
        self._listener, self._ops, self._may_run = listener, ops, may_run
        self._known: dict[int, Value] = {}
        self._writers: dict[int, Value] = {}
        """By memory: what the last call that wrote there gave."""
        self._kinds: dict[int, tuple[int, CodeType]] = {}
        self._step = -1
        self.every: Callable[[Call], None] | None = None
        """Called with every call before it is made, where it is set."""
        self.count = 0
        self.batch: dict[str, Value] = {}
        self.running: list[list[Any]] = []
        """The frame of each function of the listener's that runs, what ``began`` gave, and the last result."""

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self.watching(watch), self.on_while_full(watch))

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        try:
            with super().watching(watch):
                yield
        finally:
            self.forget()

    def active(self) -> bool:
        return self.watch.full and super().active()

    @property
    def is_on(self) -> bool:
        """Whether it is inside of its run."""
        return self._watch is not None

    def take(self, _number: int, item: Any) -> None:
        """Mark the tensors of a batch: for ``RunPlan.before_item``."""
        self._notice_a_step()
        self.batch = {}
        for number, (path, tensor) in enumerate(nested.paths(item)):
            value = Value(tensor, batch=1 << min(number, 62))
            value.path = nested.shown(path)
            self.batch[value.path] = self._noted(value, tensor)

    def _notice_a_step(self) -> None:
        """Forget what was before an optimizer step."""
        if self.watch.record.steps != self._step:
            self._step = self.watch.record.steps
            self.forget()
            if self._listener is not None:
                self._listener.new_step()

    def forget(self) -> None:
        """Let go of everything but parameters, which nothing made."""
        self._known = {k: v for k, v in self._known.items() if v.parameter and v.call is None and v.tensor is not None}
        self._writers.clear()
        self.running.clear()
        self.count = 0

    def of(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor: a new one where no call made it, and one by a call "write" where a view of it, or a
        detached tensor, was written to."""
        known = self._known.get(id(tensor))
        if known is not None and known.now is tensor:
            same = known.parameter or known.version == writes_in_place(tensor)
            return known if same else self._written(tensor, known)
        with self.watch.suspended():
            return self._noted(Value(tensor), tensor)

    def _noted(self, value: Value, tensor: torch.Tensor) -> Value:
        """The value, by which this tensor is known from now on."""
        self._known[id(tensor)] = value
        return value

    def _written(self, tensor: torch.Tensor, before: Value) -> Value:
        """The value of a tensor whose memory a call has written to by way of another tensor."""
        with self.watch.suspended():
            writer = self._writers.get(storage_of(tensor) or -1)
            by, call = None if writer is None else writer.call, Call()
            call.func, call.op, call.args, call.kwargs = unseen, "write", (), {}
            call.inputs = (before,) if writer is None or writer is before else (before, writer)
            call.number, call.writes, call.watch = self.count, False, self.watch
            call._module, call._at = (None, None) if by is None else (by._module, by._at)
            self.count += 1
            batch = before.batch | (0 if writer is None else writer.batch)
            made = Value(tensor, call, 0, batch)
            made.path = before.path
            return self._noted(made, tensor)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "__get__":
            name = name_of(func)
        if name in CONSTANT_ATTRIBUTES:
            if self._may_run is not None:  # a function's arguments are to be seen before it assigns to their names
                self._look_at_the_stack()
            return passed_on(func, args, kwargs)
        self._notice_a_step()
        watch, listener = self.watch, self._listener
        call = self._begun(watch, name, func, args, kwargs)
        asked = listener if listener is not None and name in self._ops else None
        if asked is not None or self.every is not None:
            with watch.suspended():
                if asked is not None:
                    asked.before(call, args, kwargs)
                if self.every is not None:
                    self.every(call)
        try:
            out = passed_on(func, args, kwargs)
        except Exception as error:
            if asked is not None:
                with watch.suspended():
                    asked.raised(call, args, kwargs, error)
            raise
        if name in _MAKES_NONE or self.count > self.most:
            return out
        with watch.suspended():
            if asked is not None:
                changed = asked.after(call, args, kwargs, out)
                out = out if changed is None else changed
            self._ended(call, args, out)
        return out

    def _begun(
        self, watch: Watch, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        call, inputs = Call(), list[Value]()
        call.func, call.watch = func, watch
        call.writes = name in IN_PLACE_OPERATORS or (name[-1:] == "_" != name[-2:-1] and name != "requires_grad_")
        call.op = name if not call.writes else name.strip("_").removeprefix("i") if name[0] == "_" else name[:-1]
        call.args = self._with_values(args, inputs)
        call.kwargs = {k: self._with_values((v,), inputs)[0] for k, v in kwargs.items()} if kwargs else kwargs
        call.inputs = tuple(inputs)
        if name in INDEXING:
            for index in inputs[1:]:
                if not index.history:  # a replay needs it, and it holds no graph
                    index.keep()
        modules = watch.thread.modules
        call._module = modules[-1] if modules else None
        call._at = self._look_at_the_stack()
        call.number = self.count  # after the writes that were noticed at its arguments
        self.count += 1
        return call

    def _with_values(self, given: Any, inputs: list[Value]) -> tuple[Any, ...]:
        """Arguments with values in the place of tensors, at any depth of lists, tuples and dicts."""
        put = []
        for one in given:
            if isinstance(one, torch.Tensor):
                if type(one) is not torch.Tensor and is_lazy(one):
                    continue
                one = self.of(one)
                inputs.append(one)
            elif isinstance(one, (list, tuple)):
                values = self._with_values(one, inputs)
                one = values if type(one) is tuple else list(values) if type(one) is list else one
            elif type(one) is dict:
                one = dict(zip(one, self._with_values(one.values(), inputs), strict=True))
            put.append(one)
        return tuple(put)

    def _results(self, call: Call, args: tuple[Any, ...], out: Any) -> list[torch.Tensor]:
        """What a call has made: the tensors that it gives, or that it wrote to."""
        if call.writes and args:
            out = args[0]
        elif args and out is args[0] and isinstance(out, torch.Tensor):  # relu(inplace=True), or nothing to do
            call.writes = call.inputs[0].version != writes_in_place(out)
        return [out] if isinstance(out, torch.Tensor) else list(_tensors(out))

    def _ended(self, call: Call, args: tuple[Any, ...], out: Any) -> None:
        batch, results = 0, self._results(call, args, out)
        for value in call.inputs:
            batch |= value.batch
        for slot, tensor in enumerate(results):
            made = self._noted(Value(tensor, call, slot, batch), tensor)
            if call.writes:
                self._writers[storage_of(tensor)] = made
        if self.running:
            result = next((t for t in results if t.requires_grad), None)
            for running in self.running if result is not None else ():
                running[2] = result

    def _look_at_the_stack(self) -> tuple[str, int] | None:
        """The user's nearest line, else that of the nearest library; and which functions of the listener's run."""
        frame: FrameType | None = sys._getframe(2)
        kinds, users, library, functions = self._kinds, None, None, []
        for _ in range(DEEPEST):
            if frame is None:
                break
            code = frame.f_code
            kind = (kinds.get(id(code)) or self._kind(frame, code))[0]
            if kind:
                if kind & _END:
                    break
                if kind & _FUNCTION:
                    functions.append(frame)
                if kind & _USERS and users is None:
                    users = code.co_filename, frame.f_lineno
                    if self._may_run is None:
                        return users
                elif kind & _LIBRARY and library is None:
                    library = code.co_filename, frame.f_lineno
            frame = frame.f_back
        if self._listener is not None and (functions or self.running):
            self._note_running(self._listener, functions)
        return users or library

    def _kind(self, frame: FrameType, code: CodeType) -> tuple[int, CodeType]:
        rank = layer(code.co_filename)
        kind = _END if code.co_filename == FIT_CALLER else _USERS if rank == 2 else _LIBRARY if rank else 0
        if self._may_run is not None and self._may_run(frame):
            kind |= _FUNCTION
        self._kinds[id(code)] = kind, code  # the code is held, so that no other one gets its identity
        return kind, code

    def _note_running(self, listener: Listener, frames: list[FrameType]) -> None:
        """Functions whose frames are gone have ended; of those that began only the outermost counts."""
        alive = {id(frame) for frame in frames}
        ended = [one for one in self.running if id(one[0]) not in alive]
        if ended:
            self.running = [one for one in self.running if id(one[0]) in alive]
        with self.watch.suspended():
            for _, made, result in ended:
                if made is not None and result is not None:
                    listener.ended(made, result)
            known = {id(one[0]) for one in self.running}
            for frame in reversed(frames):
                if id(frame) not in known:
                    inside = any(one[1] is not None for one in self.running)
                    self.running.append([frame, None if inside else listener.began(frame), None])


class Gone(LookupError):
    """A tensor was freed or written to, and cannot be computed again."""


def unseen(*_args: Any, **_kwargs: Any) -> Any:
    """What a write by way of another tensor did."""
    raise Gone


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, (list, tuple)):
        for one in out:
            yield from _tensors(one)
    elif isinstance(out, dict):
        yield from _tensors(tuple(out.values()))
