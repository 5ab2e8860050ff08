"""Runs in which something that a loop does between the micro-batches of a window is left out, or undone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop import members
from pytest_trainloop.memory_layout import write
from pytest_trainloop.ours import is_ours
from pytest_trainloop.recording.events import Backward, Place, Step
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.hooks import after_modules, before_modules, before_steps
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.source import here, place_of
from pytest_trainloop.recording.torch_internals import hooks_of
from pytest_trainloop.recording.torch_names import IN_PLACE_OPERATORS, ZEROING
from pytest_trainloop.runs.hooks import hooked, unless_suspended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.watch import Watch

Kind = Literal["writes", "average", "weights", "statistic", "rates", "hooks"]
"""What is left out: writes to gradients; changes of parameters that no optimizer holds, of those that one holds, of
buffers, each of them between two micro-batches; changes of an optimizer's options; the project's hooks on parameters.
"""

STATES = ("average", "weights", "statistic")


class LeftOut(FunctionMode):
    """Leaves out one kind of change in a run whose windows have ``passes`` backward passes.

    What comes after the last pass of a window stays. ``place`` is the line of the first change that was left out, and
    ``by_loop`` says whether any was made inside a window and outside of modules' calls.
    """

    def __init__(self, watch: Watch, kind: Kind, optimizer: int, passes: int) -> None:
        super().__init__()
        self._watch, self._kind = watch, kind
        self._optimizer, self._passes = optimizer, passes
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._window = -1
        self._undone_after = 0
        self._left: dict[int, torch.Tensor] = {}
        self._options: list[dict[str, Any]] = []
        self.place: Place | None = None
        self.by_loop = False
        self.any = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """For the length of a run."""
        with contextlib.ExitStack() as stack:
            if self._kind == "rates":
                stack.enter_context(self._rates_held())
            elif self._kind == "hooks":
                stack.enter_context(self._hooks_taken_off())
            else:
                stack.enter_context(self)
            if self._kind in (*STATES, "rates"):
                enter, leave = (unless_suspended(self._watch, h) for h in (self._enter, self._leave))
                handles = before_modules(enter), after_modules(leave)
                stack.enter_context(hooked(*handles))
            yield

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self._watch
        if not args or watch.is_suspended or watch.stepping or watch.backward is not None or not _writes(name):
            return passed_on(func, args, kwargs)
        with watch.suspended():
            left_out = self._inside() and self._is_left_out(name, func, args)
        if left_out:
            return args[0] if name != "__set__" else None
        return passed_on(func, args, kwargs)

    def _is_left_out(self, name: str, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether the call is a write to gradients; writes to a state are noted, and undone later."""
        if self._kind == "writes":
            if name == "__set__":
                mine = getattr(func, "__self__", None) is torch.Tensor.grad and args[1] is not None
            else:
                own = (self._watch.table.tensors[i] for i in self._watch.trained.here())
                places = {address(p.grad) for p in own if p.grad is not None} - {0}
                mine = name not in ZEROING and any(address(t) in places for t in tensors_in(args[0]))
        else:
            places = {address(tensor) for tensor, _ in self._kept.values()} - {0}
            mine = name != "__set__" and any(address(t) in places for t in tensors_in(args[0]))
        if mine:
            self.any, self.place = True, self.place or here()[0]
        return mine and self._kind == "writes"

    def _done(self) -> int:
        """Backward passes since the last step."""
        if not self._is_made():
            return 0
        count, mine = 0, set(self._watch.record.optimizers[self._optimizer].parameters)
        for event in self._watch.record.events:
            if isinstance(event, Step) and event.optimizer == self._optimizer:
                count = 0
            elif isinstance(event, Backward) and event.until and mine & set(event.arrivals):
                count += 1
        return count

    def _is_made(self) -> bool:
        """Whether the optimizer is known yet: a Trainer of transformers makes its own inside ``train()``."""
        return self._optimizer < len(self._watch.record.optimizers)

    def _inside(self) -> bool:
        return 0 < self._done() < self._passes

    def _enter(self, *_call: Any) -> None:
        """At a module's call: keep the state at the beginning of a window, and restore it inside."""
        watch = self._watch
        if not self._is_made():
            return
        if self._kind == "rates":
            self._compare_options()
            return
        with watch.suspended(), torch.no_grad():
            window, done = watch.record.optimizers[self._optimizer].steps, self._done()
            if window != self._window:
                self._window, self._undone_after = window, 0
                self._kept.clear()
            if not done:
                self._kept |= {id(t): (t, t.detach().clone()) for t in self._state() if id(t) not in self._kept}
            elif self._undone_after < done < self._passes:
                self._undone_after = done
                self._undo()

    def _undo(self) -> None:
        for key, (tensor, kept) in self._kept.items():
            if not torch.equal(tensor.detach(), kept):
                self.any = True
                self.by_loop |= key not in self._left or not torch.equal(tensor.detach(), self._left[key])
                write(tensor, kept)

    def _leave(self, *_call: Any) -> None:
        """At the end of a call from outside any module: what differs from here on, the loop has changed."""
        if len(self._watch.thread.modules) <= 1:
            with self._watch.suspended(), torch.no_grad():
                self._left = {key: tensor.detach().clone() for key, (tensor, _) in self._kept.items()}

    def _state(self) -> Iterator[torch.Tensor]:
        table, held = self._watch.table, self._watch.record.held
        if self._kind == "statistic":
            for _, module in table.named_modules():
                # whole numbers count what was seen: a schedule by them may be one by the data
                yield from (b for b in members.buffers(module, recurse=False) if readable(b) and b.is_floating_point())
            return
        for index, tensor in enumerate(table.tensors):
            if (index in held and tensor.requires_grad) == (self._kind == "weights") and readable(tensor):
                yield tensor
        if self._kind == "average":
            yield from self._counts_of_averages()

    def _counts_of_averages(self) -> Iterator[torch.Tensor]:
        """The buffers of modules that train none of their parameters: how often an average was updated is one."""
        table, held = self._watch.table, self._watch.record.held
        trained = {id(t) for i, t in enumerate(table.tensors) if i in held and t.requires_grad}
        for _, module in table.named_modules():
            parameters = {id(p) for p in members.parameters(module)}
            if parameters and not parameters & trained:
                yield from (b for b in members.buffers(module, recurse=False) if readable(b))

    @contextlib.contextmanager
    def _rates_held(self) -> Iterator[None]:
        """Every option of every group as the run began, inside the steps."""
        began = {id(o): _options(o) for _, o in self._watch.optimizers.indexed()}

        def enter(optimizer: Any, *_call: Any) -> None:
            held = began.setdefault(id(optimizer), _options(optimizer))
            for group, first in zip(optimizer.param_groups, held, strict=False):
                self.any |= any(group.get(name) != value for name, value in first.items())
                group.update(first)

        with hooked(before_steps(enter)):
            yield

    def _compare_options(self) -> None:
        """Whether the options of the optimizer have changed since the window's first call of a module."""
        steps = self._watch.record.optimizers[self._optimizer].steps
        now = next((_options(o) for n, o in self._watch.optimizers.indexed() if n == self._optimizer), [])
        if steps != self._window:
            self._window, self._options = steps, now
        self.by_loop |= self._inside() and now != self._options

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


def _writes(name: str) -> bool:
    return name == "__set__" or name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _options(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if isinstance(value, (int, float, tuple))}
        for group in getattr(optimizer, "param_groups", ())
        if isinstance(group, dict)
    ]
