"""The calls of ``torch.compile`` in a run, and what became of what they returned."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop import members
from pytest_trainloop.checks.scale.compile_parity.names import Loads
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

TRACERS = ("trace", "script")
"""What ``torch.jit`` offers in place of ``torch.compile``."""


@dataclass(slots=True)
class CompileCall:
    """One call."""

    how: str
    """"torch.compile", "torch.jit.trace", "torch.jit.script"."""
    what: str
    """What was compiled, in words."""
    place: str
    backend: Any = "inductor"
    """A name, or a function."""
    given: Callable[[], Any] = lambda: None
    """The module that it was given, while it lives."""
    returned: Callable[[], Any] = lambda: None
    """What it returned, while that lives."""
    dropped: bool = False
    """Whether what it returned was gone before the loop began to train."""
    trains: bool = False
    """Whether it was given parameters of the loop's."""
    filters_guards: bool = False


class CompileCalls:
    """Notes every call in its ``with`` block, those of ``Module.compile`` included, which calls ``torch.compile``.

    ``backend`` takes the place of the one that is asked for; guards are made as the call asks. With ``aside`` each call
    gives what it is given; one that ``only_wraps`` asks for no whole graph.
    """

    def __init__(self, backend: str | None = None, *, aside: bool = False, only_wraps: bool = False) -> None:
        self.calls: list[CompileCall] = []
        self.loads = Loads()
        self._only_wraps = only_wraps
        self._backend = backend
        self._aside = aside

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        with Patches() as patches:
            patches.put(torch, "compile", self._around_compile)
            patches.put(nn.Module, "load_state_dict", self.loads.around)
            for name in TRACERS:
                patches.put(torch.jit, name, functools.partial(self._around_tracer, f"torch.jit.{name}"))
            yield

    def look(self, trained: Iterable[torch.Tensor], *, collected: bool = False) -> None:
        """Note which results nobody holds any more, those in circles of references once they are ``collected``; and
        which calls were given something with parameters among ``trained``."""
        if collected:
            gc.collect()
        known = {id(parameter) for parameter in trained}
        for call in self.calls:
            call.dropped = call.returned() is None
            module = call.given()
            call.trains = isinstance(module, nn.Module) and any(id(p) in known for p in members.parameters(module))

    def let_go(self) -> None:
        for call in self.calls:
            call.given = call.returned = lambda: None
        self.loads.not_loaded.clear()

    def _around_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(model: Any = None, **options: Any) -> Any:
            if model is None:  # used as a decorator with options
                return lambda function: compile(function, **options)
            call = _noted("torch.compile", model, options)
            out = model if self._aside else original(model, **self._with_backend(options))
            call.returned = _weak(out)
            self.calls.append(call)
            return out

        return compile

    def _around_tracer(self, how: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if not args:
                return original(*args, **kwargs)
            call = _noted(how, args[0], {})
            out = args[0] if self._aside or self._only_wraps else original(*args, **kwargs)
            call.returned = _weak(out)
            self.calls.append(call)
            return out

        return traced

    def _with_backend(self, options: dict[str, Any]) -> dict[str, Any]:
        """What inductor is told by its mode and its options means nothing to another backend."""
        if self._only_wraps:
            options = {**options, "fullgraph": False}
        if self._backend is None:
            return options
        given = options.get("options") or {}
        kept = {name: value for name, value in given.items() if name == "guard_filter_fn"}
        rest = {name: value for name, value in options.items() if name not in ("options", "mode")}
        return {**rest, "backend": self._backend, **({"options": kept} if kept else {})}


def _noted(how: str, given: Any, options: dict[str, Any]) -> CompileCall:
    """A call that is about to be made: torch takes some options out of what it is given."""
    inner = options.get("options")
    return CompileCall(
        how=how,
        what=_what(given),
        place=str(here()[0]),
        backend=options.get("backend", "inductor"),
        given=_weak(given if isinstance(given, nn.Module) else getattr(given, "__self__", None)),
        filters_guards=isinstance(inner, dict) and "guard_filter_fn" in inner,
    )


def _weak(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # takes no weak references
        return lambda: thing


def _what(given: Any) -> str:
    if isinstance(given, nn.Module):
        return type(given).__name__
    return str(getattr(given, "__qualname__", None) or type(given).__name__).rpartition("<locals>.")[2]
