"""Optimizer steps: the gradients that the innermost step read, its learning rates and its options."""

from __future__ import annotations

import functools
import re
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from pytest_trainloop.recording.autocast import open_blocks
from pytest_trainloop.recording.events import GradWrite, Read, Step, TensorSample
from pytest_trainloop.recording.hooks import after_steps, before_steps
from pytest_trainloop.recording.mode_stack import looks_into_steps
from pytest_trainloop.recording.record import Optimizer as Held
from pytest_trainloop.recording.schedulers import lrs_of
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import (
    has_step_hooks,
    has_step_pre_hooks,
    is_initialised,
    no_torch_function,
    writes_in_place,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

    from pytest_trainloop.recording.protocol import Observed


class Optimizers:
    """Torch's global step hooks."""

    def __init__(self, watch: Observed, before_step: Callable[[], None]) -> None:
        self._watch = watch
        self._before_step = before_step
        self._index: dict[int, int] = {}
        self._kept: list[Any] = []
        self._late: list[RemovableHandle] = []
        self._counted: tuple[Read | None, list[tuple[int, int]]] = (None, [])
        """The last read, and its gradients as they were counted then."""
        self._handles = [before_steps(self._pre), after_steps(self._post)]

    def remove(self) -> None:
        self._seen_again()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._drop_late()

    def index(self, optimizer: Any, declared: bool = False, known_only: bool = False) -> int:
        """The index of an optimizer, a wrapper counted as what it wraps; one that is not known gets an entry."""
        inner = unwrap(optimizer)
        known = self._index.get(id(inner))
        if known is not None:
            return known
        index = len(self._watch.record.optimizers)
        self._index[id(inner)] = index
        self._kept.append(inner)
        ours = type(inner).__module__.startswith("torch.")
        held = Held(index=index, kind=type(inner).__name__, declared=declared, from_torch=ours)
        self._watch.record.optimizers.append(held)
        lrs_of(getattr(inner, "param_groups", None) or (), self._watch.reader, held, "first_lrs")
        self.refresh(inner, known_only)
        return index

    def known(self, optimizer: Any) -> int | None:
        """The index of an optimizer that is in the record."""
        return self._index.get(id(unwrap(optimizer)))

    def indexed(self) -> Iterator[tuple[int, Any]]:
        """Every optimizer that was given or has stepped, by its index."""
        yield from enumerate(self._kept)

    def enter_waiting(self, optimizer: Any) -> None:
        """Enter an optimizer that has not stepped, where it holds a parameter that no other one holds."""
        if self.known(optimizer) is not None:
            return
        table, held = self._watch.table, self._watch.record.held
        tensors = [t for g in optimizer.param_groups for t in g["params"]]
        if any((i := table.index(t)) is not None and i not in held for t in tensors):
            self.index(optimizer, known_only=True)

    def refresh(self, optimizer: Any, known_only: bool = False) -> list[int]:
        """Note the options of the optimizer's groups, and the parameters that they hold now, repetitions kept.
        ``known_only``: but for tensors that were not met before."""
        watch = self._watch
        groups = [g for g in getattr(optimizer, "param_groups", None) or () if isinstance(g, dict)]
        held: list[int] = []
        group_of: list[int] = []
        for g, group in enumerate(groups):
            for i, tensor in enumerate(group.get("params", ())):
                if isinstance(tensor, torch.Tensor) and not (known_only and watch.table.index(tensor) is None):
                    name = f"{type(optimizer).__name__}.param_groups[{g}][{i}]"
                    held.append(watch.table.add(tensor, name, "foreign"))
                    group_of.append(g)
        entry = watch.record.optimizers[self._index[id(optimizer)]]
        entry.parameters, entry.groups = tuple(held), tuple(group_of)
        entry.peak_lrs = tuple(max(_numbers(g, "initial_lr", "max_lr"), default=float("nan")) for g in groups)
        entry.weight_decays = tuple(sum(_numbers(g, "weight_decay")) for g in groups)
        entry.momenta = tuple(sum(_numbers(g, "momentum")) for g in groups)
        entry.decoupled = tuple(g.get("decoupled_weight_decay") for g in groups)
        entry.eps = tuple(sum(_numbers(g, "eps")) for g in groups)
        entry.options = tuple(getattr(optimizer, "defaults", None) or ())
        entry.settings = tuple(_settings(g) for g in groups)
        entry.dicts = tuple(map(id, groups))
        entry.maximizes = any(g.get("maximize") is True for g in groups)
        watch.hook_gradients(held)
        return held

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        watch = self._watch
        if watch.is_suspended:  # a copy that we step
            return None
        with watch.suspended():
            self._before_step()
            self.drop_aborted()
            if watch.thread.open:
                watch.thread.open[-1].nested = True
            place, site = here()
            step = Step(at=watch.tick(), place=place, site=site, optimizer=self.index(optimizer), full=watch.full)
            step.blocks = open_blocks()
            # inside backward the function mode sees nothing
            step.in_backward = step.asked = step.computed = watch.backward is not None
            lrs_of(optimizer.param_groups, watch.reader, step, "lrs")
            step.named_lrs = _named_lrs(optimizer)
            late = has_step_pre_hooks(optimizer)  # they may yet write gradients: it begins after them
            if not late:
                watch.add(step)
            held = list(dict.fromkeys(self.refresh(optimizer))) if watch.full else []
            watch.trained.claim(held)
            step.frozen = tuple(i for i in held if not watch.table.tensors[i].requires_grad)
            watch.weight_changes.look()
            watch.thread.open.append(step)
            watch.thread.frames.append(sys._getframe(2))  # the caller of the hook
            wrapped = self._with_closure_read(step, held, args, kwargs)

            def begin(*_call: Any) -> None:
                with watch.suspended():
                    if late:
                        step.at = watch.tick()
                        watch.add(step)
                    if wrapped is None:
                        step.reads.append(self._read(held))
                watch.thread.stepping += 1
                if wrapped is None and not late and watch.full and self._steps_alone(optimizer, held):
                    step.asked, step.computed = True, any(g is not None for g in step.reads[-1].grads.values())
                    watch.thread.unseen = no_torch_function()
                    watch.thread.unseen.__enter__()

            if late:
                self._late.append(optimizer.register_step_pre_hook(begin))
                return wrapped
        begin()
        return wrapped

    def _steps_alone(self, optimizer: Optimizer, held: list[int]) -> bool:
        """Whether nothing but torch's own code runs during a step, and no function mode looks at what it calls: half or
        more of what a mode costs are the calls of the optimizer."""
        if self._watch.thread.unseen is not None or not _only_torchs(optimizer) or looks_into_steps():
            return False
        tensors = self._watch.table.tensors
        return all(type(tensors[i]) in (torch.Tensor, nn.Parameter) for i in held)

    def _seen_again(self) -> None:
        """Let torch call function modes again, after a step that ran without."""
        thread = self._watch.thread
        unseen, thread.unseen = thread.unseen, None
        if unseen is None:
            return
        if thread.suspended:  # the end of that block would switch them off again
            thread.ended = unseen
        else:
            unseen.__exit__(None, None, None)

    def _with_closure_read(self, step: Step, held: list[int], args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The call's arguments with the closure wrapped, so that gradients are read when it returns; None without
        one."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None
        watch = self._watch

        @functools.wraps(closure, updated=())
        def watched(*a: Any, **k: Any) -> Any:
            outer, watch.thread.stepping = watch.thread.stepping, 0
            try:
                return closure(*a, **k)
            finally:
                watch.thread.stepping = outer
                with watch.suspended():
                    step.reads.append(self._read(held))

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    def _read(self, held: list[int]) -> Read:
        watch = self._watch
        grads: dict[int, TensorSample | None] = {}
        for index in held:
            grad = watch.table.tensors[index].grad
            grads[index] = None if grad is None else watch.reader.sample(grad)
        read = Read(at=watch.tick(), grads=grads)
        self._counted = read, self._counts(held)
        return read

    def _post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watch, thread = self._watch, self._watch.thread
        if watch.is_suspended or not thread.open:
            return
        self._seen_again()
        self._drop_late()
        thread.stepping = max(0, thread.stepping - 1)
        with watch.suspended():
            watch.weight_changes.look()
            step = thread.open.pop()
            thread.frames.pop()
            if not step.nested and step.reads:
                step.left = self._left(optimizer, step.reads[-1])
            step.until = watch.tick()
            watch.step_done(step)

    def _left(self, optimizer: Optimizer, read: Read) -> dict[int, TensorSample | None]:
        """The gradients after the step. Torch's own optimizers write to none without that torch counts it: where it
        counted no write, they are what the step read."""
        before, counts = self._counted
        if _only_torchs(optimizer) and before is read and counts == self._counts(read.grads):
            return dict(read.grads)
        return self._read(list(read.grads)).grads

    def _counts(self, held: Iterable[int]) -> list[tuple[int, int]]:
        """For each gradient which tensor it is, and how often that was written to."""
        grads = [self._watch.table.tensors[index].grad for index in held]
        return [(id(grad), 0 if grad is None else writes_in_place(grad)) for grad in grads]

    def _drop_late(self) -> None:
        for handle in self._late:
            handle.remove()
        self._late.clear()

    def drop_aborted(self) -> None:
        """Forget steps that an exception ended: torch runs no post hook for them."""
        self._drop_late()
        thread = self._watch.thread
        if not thread.open:
            return
        frame: FrameType | None = sys._getframe(1)
        running = set()
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        while thread.frames and id(thread.frames[-1]) not in running:
            thread.frames.pop()
            aborted = thread.open.pop()
            thread.stepping = max(0, thread.stepping - 1)
            if thread.unseen is not None:
                self._seen_again()
                self._note_cleared(aborted)

    def _note_cleared(self, aborted: Step) -> None:
        """Note the gradients that were cleared since a step that an exception ended: no mode saw it."""
        tensors = self._watch.table.tensors
        read = aborted.reads[-1].grads if aborted.reads else {}
        cleared = [i for i, grad in read.items() if grad is not None and tensors[i].grad is None]
        if cleared:
            at, place, site = self._watch.tick(), aborted.place, aborted.site
            self._watch.add(GradWrite(at=at, place=place, site=site, how="none", parameters=cleared, by="zero_grad"))


def _only_torchs(optimizer: Any) -> bool:
    """Whether it is one of torch's own, and no hook of its steps is the project's."""
    return type(optimizer).__module__.startswith("torch.optim.") and not has_step_hooks(optimizer)


_NOT_READ = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr")
"""Keys of a group that torch's optimizers or schedulers read themselves."""


def _named_lrs(optimizer: Any) -> dict[str, tuple[float, ...]]:
    """The numbers that are called a rate, but for those that are read: keys of the groups, the default rate and
    attributes of the optimizer."""
    groups = [g for g in optimizer.param_groups if isinstance(g, dict)]
    found: dict[str, list[float]] = {}
    for group in groups:
        for key, value in group.items():
            if key not in _NOT_READ and isinstance(value, (int, float)) and _is_a_lr(key):
                found.setdefault(f'group["{key}"]', []).append(float(value))
    default = (getattr(optimizer, "defaults", None) or {}).get("lr")
    if isinstance(default, (int, float)):
        found['optimizer.defaults["lr"]'] = [float(default)]
    for name, value in vars(optimizer).items():
        if isinstance(value, (int, float)) and _is_a_lr(name):
            found[f"optimizer.{name}"] = [float(value)]
    return {name: tuple(values) for name, values in found.items()}


@functools.cache
def _is_a_lr(name: str) -> bool:
    words = set(re.split(r"[^a-z]+", name.lower()))
    return bool(words & {"lr", "rate", "learningrate"}) and not words & {"decay", "drop", "dropout", "momentum", "ema"}


def _settings(group: dict[str, Any]) -> dict[str, str]:
    """The numbers, pairs of numbers, switches and texts of a group as text, but for its rate."""
    plain = {k: v for k, v in group.items() if _is_plain(v) and k not in _NOT_READ}
    return {str(name): repr(value) for name, value in plain.items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):  # betas; a list of tensors is no setting
        return len(value) < 4 and all(isinstance(v, (int, float)) for v in value)
    return isinstance(value, (bool, int, float, str))


def _numbers(group: dict[str, Any], *options: str) -> list[float]:
    return [float(value) for name in options if isinstance(value := group.get(name), (int, float))]


def unwrap(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper that carries one as ``optimizer`` (Accelerate, Lightning), else itself."""
    seen = 0
    while not isinstance(optimizer, Optimizer) or not is_initialised(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or seen > 5:
            return optimizer
        optimizer, seen = inner, seen + 1
    return optimizer
