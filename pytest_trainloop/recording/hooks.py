"""Every hook of this package that a loop's own calls run into, in one place.

Two rules hold for all of them. No hook sits on an object of the project's, where a copy, a pickle or a script of it
would take it along: hooks of modules and optimizers are torch's global ones, and those of tensors are left out of what
is saved. And all of them are inactive while torch is tracing (``is_traced``): there are no values then, and what is
called for them would become part of the trace. A mistake in a hook changes nothing for the loop (``mistakes``).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import unserializable_hook

from pytest_trainloop.recording.mistakes import passed_over
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.torch_internals import is_traced, is_transformed

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable

    from torch.utils.hooks import RemovableHandle

    Enter = Callable[[nn.Module, Any, Any], Any]
    Leave = Callable[[nn.Module, Any, Any], None]


def before_modules(hook: Callable[..., Any]) -> RemovableHandle:
    """Call ``hook(module, args)`` before every module; a tuple that it gives takes the place of ``args``."""
    return register_module_forward_pre_hook(_aside(hook))


def after_modules(hook: Callable[..., Any], *, with_kwargs: bool = False, always_call: bool = False) -> RemovableHandle:
    """Call ``hook(module, args, output)``, or ``hook(module, args, kwargs, output)``, after every module; a result
    replaces ``output``. ``always_call`` calls the hook after an exception too, with empty ``kwargs``: torch passes none
    to global hooks then."""
    seen = _aside(hook)
    if with_kwargs and always_call:

        def called(module: Any, args: Any, *rest: Any) -> Any:
            return seen(module, args, *(rest if len(rest) == 2 else ({}, *rest)))

        return register_module_forward_hook(called, with_kwargs=True, always_call=True)
    return register_module_forward_hook(seen, with_kwargs=with_kwargs, always_call=always_call)


def before_steps(hook: Callable[..., Any]) -> RemovableHandle:
    """Call ``hook(optimizer, args, kwargs)`` before every step of an optimizer."""
    return register_optimizer_step_pre_hook(_aside(hook))


def after_steps(hook: Callable[..., Any]) -> RemovableHandle:
    """Call ``hook(optimizer, args, kwargs)`` after every step of an optimizer."""
    return register_optimizer_step_post_hook(_aside(hook))


def on_gradient(tensor: torch.Tensor, hook: Callable[[Any], Any], *, after: bool = False) -> RemovableHandle | None:
    """Call ``hook`` with the gradient that arrives at a tensor, or with a leaf ``after`` it has its gradient.

    None where the tensor takes no hooks: those of functorch and other wrappers.
    """
    # a function of its own: torch marks it, and a hook may be a bound method
    marked = unserializable_hook(_aside(hook))  # type: ignore[no-untyped-call]
    register: Any = tensor.register_post_accumulate_grad_hook if after else tensor.register_hook
    try:
        handle: RemovableHandle = register(marked)
    except RuntimeError:
        return None
    return handle


def around_modules(modules: Iterable[nn.Module], enter: Enter, leave: Leave) -> contextlib.AbstractContextManager[None]:
    """Call ``enter(module, args, kwargs)``, which may give other arguments, before these modules are called, and
    ``leave(module, args, output)`` after it, also after an exception.

    Torch's global hooks get no keywords before the call, hence the patch.
    """
    chosen = {id(module): module for module in modules}

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or is_transformed() or id(module) not in chosen:
                return original(module, *args, **kwargs)
            given = enter(module, args, kwargs)
            args, kwargs = (args, kwargs) if given is None else given
            output = None
            try:
                output = original(module, *args, **kwargs)
            finally:
                leave(module, args, output)
            return output

        return call

    return patched(nn.Module, "__call__", around)


def _aside(hook: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            if not passed_over(error):
                raise
        return None

    return asked
