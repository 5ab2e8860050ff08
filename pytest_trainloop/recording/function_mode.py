"""The base classes of the modes that intercept a loop's calls of torch, and the tensors that a call is given.

It lies below ``tracing`` because ``recording`` and ``runs`` have such modes too; those that look at a watched run are
``tracing.mode.WatchingMode``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from pytest_trainloop.recording.as_caller import as_caller
from pytest_trainloop.recording.mistakes import ended, goes_on
from pytest_trainloop.recording.mode_stack import put_below, take_off
from pytest_trainloop.recording.seams import closed, opened, passed_on
from pytest_trainloop.recording.torch_internals import DispatchMode, is_higher_order, is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class _Here(threading.local):
    """What the current thread is inside of."""

    def __init__(self) -> None:
        self.aside = 0


_HERE = _Here()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Let this thread's calls of torch pass by all modes of this package: they belong to no run. The project's own
    modes stay on (a default device is one)."""
    _HERE.aside += 1
    try:
        yield
    finally:
        _HERE.aside -= 1


def called_by_sharding() -> bool:
    """Whether the caller of the mode that asks is FSDP2's own code, which calls torch on weights whose memory it has
    given back: to read them ends the process. No call of the loop is made there."""
    return "torch.distributed.fsdp" in sys.modules and _is_sharding(sys._getframe(2).f_code.co_filename)


@functools.cache
def _is_sharding(filename: str) -> bool:
    return filename.replace("\\", "/").rpartition("/")[0].endswith("torch/distributed/fsdp/_fully_shard")


def is_aside() -> bool:
    """Whether this thread's calls of torch pass by all modes of this package."""
    return _HERE.aside > 0


class FunctionMode(TorchFunctionMode):
    """Gets every call of a torch function that its thread makes while it is on, but for those made ``aside``.

    The mode is off while ``call`` runs: what it calls of torch goes to the modes below it. It is inactive while torch
    is tracing (``is_traced``).
    """

    in_steps = True
    """Whether it looks at what one of torch's optimizers calls while it steps."""

    _on = False
    """Whether it was put on by hand."""

    def put_on(self) -> None:
        """Put the mode on by hand, in place of a ``with`` block; nothing where it is on."""
        if not self._on:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._on = True

    def put_on_within_fit(self) -> None:
        """The same while the user's code runs, which may be inside of a ``with`` block with a mode of its own."""
        if not self._on:
            put_below(self)
            self._on = True

    def take_off(self) -> None:
        """Take off a mode that was put on by hand; while torch is in a call through it, it stays."""
        if self._on and take_off(self):
            self._on = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_traced() or _HERE.aside or called_by_sharding():
            return func(*args, **(kwargs or {}))
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        seam = opened()
        try:
            try:
                return (self.call if self.looks() else self.left)(name, func, args, kwargs)
            except Exception as error:
                if not goes_on(seam, error):
                    raise
            return ended(seam, func, args, kwargs)
        finally:
            closed(seam)

    def looks(self) -> bool:
        """Whether ``call`` gets the calls that are made now, or ``left``."""
        return True

    def left(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives that the mode does not look at."""
        return FunctionMode.call(self, name, func, args, kwargs)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives, made by ``passed_on`` or ``as_caller``. Its caller is two frames up. ``name`` is
        "__get__" where an attribute is read."""
        return passed_on(func, args, kwargs) if name == "__get__" else as_caller(func, args, kwargs)


class OperationMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Gets every operation that torch dispatches while it is on, those of backward passes included.

    The mode is off while ``operate`` runs. It is inactive while torch is tracing (``is_traced``).
    """

    changes = False
    """Whether it computes something else on purpose: the run cannot go on without it then."""

    supports_higher_order_operators = True
    """Torch's name for: ``torch.cond`` and the like are passed on, and what they are given is not looked at."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_traced():
            return func(*args, **(kwargs or {}))
        if is_higher_order(func):
            with aside():
                return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        seam = opened()
        try:
            try:
                return self.operate(func, args, kwargs)
            except Exception as error:
                if self.changes or not goes_on(seam, error):
                    raise
            return ended(seam, func, args, kwargs)
        finally:
            closed(seam)

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operation gives, made by ``passed_on``."""
        return passed_on(func, args, kwargs)


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or the results of a torch call, in order: those in lists, tuples, sets, dicts and
    dataclasses as well, at any depth.

    Left out are the parameters of a lazy module before its first call: nothing is known of them.
    A dict is looked into where its keys are names: the memo of ``__deepcopy__`` holds what was copied before. Other
    objects are not: a hook may hold the whole project.
    """
    found: list[torch.Tensor] = []
    _collect(values, found)
    return iter(found)


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not is_lazy(value):
                found.append(value)
        elif isinstance(value, (int, float, str, type(None))):
            continue
        elif isinstance(value, (list, tuple, set, frozenset)):
            _collect(value, found)
        elif isinstance(value, dict):
            if all(isinstance(key, str) for key in value):
                _collect(value.values(), found)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            _collect((getattr(value, f.name, None) for f in dataclasses.fields(value)), found)
