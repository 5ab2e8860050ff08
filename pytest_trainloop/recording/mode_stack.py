"""The function modes of a thread, and what of this package torch and the project's code are kept from: with
``torch_internals``, a place that reaches into torch's private names."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C import _len_torch_function_stack
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from pytest_trainloop.core.ours import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def take_off(mode: TorchFunctionMode) -> bool:
    """Take a function mode off this thread's stack at any position, and say whether it was there.

    Leaving its ``with`` block takes off whichever mode is on top, which may be one that the user's code has entered
    and not left yet (a generator with an open ``with torch.device(...)``).
    """
    above: list[TorchFunctionMode] = []
    found = False
    while not found and _len_torch_function_stack() > 0:
        top = _pop_mode()  # type: ignore[no-untyped-call]
        found = top is mode
        if not found:
            above.append(top)
    for one in reversed(above):
        _push_mode(one)  # type: ignore[no-untyped-call]
    return found


def put_below(mode: TorchFunctionMode) -> None:
    """Put a function mode on below all others of this thread: the user's code may be inside of a ``with`` block, which
    takes off whichever mode is on top."""
    above = [_pop_mode() for _ in range(_len_torch_function_stack())]  # type: ignore[no-untyped-call]
    for one in (mode, *reversed(above)):
        _push_mode(one)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def modes_kept() -> Iterator[None]:
    """Take off the function modes of this package that are left on at the end, and let torch dispatch to Python as
    before: a stop that the loop swallows may have interrupted the exit of either."""
    before, dispatch = _modes(), _dispatch_to_python()
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]
        if _dispatch_to_python() != dispatch:
            torch._C._set_torch_function_state(dispatch)  # type: ignore[attr-defined]
        after = _modes()
        if len(after) > len(before) and any(map(is_ours, after)):
            for _ in after:
                _pop_mode()  # type: ignore[no-untyped-call]
            for mode in after:
                if not is_ours(mode) or any(mode is kept for kept in before):
                    _push_mode(mode)  # type: ignore[no-untyped-call]


def _modes() -> list[TorchFunctionMode]:
    """The function modes of this thread, the innermost last."""
    found: list[TorchFunctionMode] = []
    while _len_torch_function_stack() > 0:
        found.append(_pop_mode())  # type: ignore[no-untyped-call]
    for mode in reversed(found):
        _push_mode(mode)  # type: ignore[no-untyped-call]
    return found[::-1]


def looks_into_steps() -> bool:
    """Whether a function mode of this thread wants the calls that one of torch's optimizers makes while it steps: one
    of the project's, or one of this package that says so. True as well where torch calls no mode now."""
    off = _dispatch_to_python() != torch._C._TorchFunctionState.ENABLED  # type: ignore[attr-defined]
    return off or any(getattr(mode, "in_steps", True) for mode in _modes())


def _dispatch_to_python() -> Any:
    """What torch dispatches to Python in this thread: to function modes and subclasses, to modes alone, or nothing."""
    return torch._C._get_torch_function_state()  # type: ignore[attr-defined]


@contextlib.contextmanager
def on_in_engine(mode: TorchFunctionMode) -> Iterator[None]:
    """Keep a mode on while autograd's engine runs, where a checkpoint recomputes its part of the model: torch switches
    the mode off for the call of ``torch.autograd.backward`` that it gets."""
    original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = original  # type: ignore[attr-defined]


def exporters() -> list[tuple[Any, str]]:
    """Where ``torch.export`` is called, as module and name, also by what a project may have imported, and where torch
    makes graphs of the functions that ``torch.cond`` is given."""
    inner = {
        "torch.export._trace": "_export",
        "torch._higher_order_ops.utils": "materialize_as_graph",
        "torch._higher_order_ops.partitioner": "materialize_as_graph",
    }
    found = ((sys.modules.get(module), name) for module, name in inner.items())
    return [(torch.export, "export"), *((module, name) for module, name in found if hasattr(module, name))]


@contextlib.contextmanager
def without_ours() -> Iterator[None]:
    """Take off the function modes and the hooks of modules of this package: a compiler that reads them refuses them.

    Hides torch's dictionaries of global hooks, and the functions that take modes off and on.
    """
    hooks = [module._global_forward_pre_hooks, module._global_forward_hooks]
    kept = [dict(given) for given in hooks]
    modes, call = _modes(), nn.Module.__call__
    for _ in modes:
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in modes:
        if not is_ours(mode):
            _push_mode(mode)  # type: ignore[no-untyped-call]
    for given in hooks:
        for key in [key for key, hook in given.items() if is_ours(hook)]:
            del given[key]
    nn.Module.__call__ = inspect.unwrap(call, stop=lambda f: not is_ours(f))  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        for given, before in zip(hooks, kept, strict=True):
            given.clear()
            given.update(before)
        for _ in _modes():
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in modes:
            _push_mode(mode)  # type: ignore[no-untyped-call]


def asked_without_ours(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """``torch.overrides.has_torch_function`` as it answers where no function mode of this package is on: by it, layers
    of torch choose between two ways to compute, which round differently. Hides torch's functions that take modes off
    and on."""

    @functools.wraps(original)
    def has_torch_function(values: Any) -> bool:
        modes = _modes()
        if not modes or not all(map(is_ours, modes)):
            return original(values)
        for _ in modes:
            _pop_mode()  # type: ignore[no-untyped-call]
        try:
            return original(values)
        finally:
            for mode in modes:
                _push_mode(mode)  # type: ignore[no-untyped-call]

    return has_torch_function
