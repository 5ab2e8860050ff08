"""Hooks for the length of a run."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from pytest_trainloop.recording.hooks import after_steps, around_modules, before_steps, on_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from pytest_trainloop.recording.events import Forward
    from pytest_trainloop.recording.watch import Watch


T = TypeVar("T")


@contextlib.contextmanager
def hooked(*handles: RemovableHandle) -> Iterator[None]:
    """Remove the hooks at the end, whatever happens in between."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unless_suspended(watch: Watch, hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, for calls that belong to the loop: what makes its data calls modules too."""

    @functools.wraps(hook)
    def seen(*call: Any, **more: Any) -> Any:
        return None if watch.is_suspended else hook(*call, **more)

    return seen


def on_arrival(
    watch: Watch, arrived: Callable[[Watch, torch.Tensor, torch.Tensor | None], None]
) -> list[RemovableHandle]:
    """Hooks that call ``arrived`` with every weight that trains and the gradient that arrives at it."""
    leaves = (t for t in watch.table.tensors if t.is_leaf and t.requires_grad and not torch.nn.parameter.is_lazy(t))
    handles = [on_gradient(tensor, functools.partial(arrived, watch, tensor)) for tensor in leaves]
    return list(filter(None, handles))


class Stepped(NamedTuple):
    """A weight that an optimizer steps."""

    group: int
    sign: float
    """-1 where the optimizer maximizes, else 1."""
    weight: torch.Tensor


def stepped_by(optimizer: Any) -> Iterator[Stepped]:
    """The weights of an optimizer that require gradients."""
    for number, group in enumerate(optimizer.param_groups):
        sign = -1.0 if group.get("maximize") is True else 1.0
        for p in group["params"]:
            if isinstance(p, torch.Tensor) and not torch.nn.parameter.is_lazy(p) and p.requires_grad:
                yield Stepped(number, sign, p)


def call_from_outside(watch: Watch, module: nn.Module) -> Forward | None:
    """The call that is under way, where this module is the one that was called from outside any module."""
    forward = watch.thread.forward
    return forward if forward is not None and watch.table.path_of(module) == forward.module else None


def before_calls(watch: Watch, enter: Callable[[nn.Module, Any, Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Call ``enter`` with each known module that is called from outside, its arguments and its keywords; it may give
    others in their place."""

    def called(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if watch.is_suspended or watch.thread.modules else enter(module, args, kwargs)

    return around_modules((module for _, module in watch.table.named_modules()), called, lambda *_call: None)


@contextlib.contextmanager
def around_steps(watch: Watch, take: Callable[[Any], T | None], use: Callable[[Any, T], None]) -> Iterator[None]:
    """Call ``take`` before each step, when its gradients are complete, and ``use`` with the result after the step."""
    taken: dict[int, T | None] = {}

    def enter(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            look(optimizer)
            return None

        def watched(*a: Any, **k: Any) -> Any:
            loss = closure(*a, **k)
            look(optimizer)
            return loss

        return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})

    def look(optimizer: Any) -> None:
        with watch.suspended(), torch.no_grad():
            taken[id(optimizer)] = take(optimizer)

    def leave(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        snap = taken.pop(id(optimizer), None)
        if snap is not None:
            with watch.suspended(), torch.no_grad():
                use(optimizer, snap)

    with hooked(before_steps(enter), after_steps(leave)):
        yield
