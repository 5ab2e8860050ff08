"""The private names of torch's compiler, as ``torch_internals`` for the rest of torch; each has its test.

Nothing of the compiler is imported before a function here is called: that takes two seconds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.whose import reraise_ours

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where the compiler ended a graph before its function was through."""

    stack: tuple[tuple[str, int], ...]
    """Files and lines, the innermost last."""
    reason: str
    """The first line of torch's own words."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """One function that was compiled, or compiled again."""

    file: str
    line: int
    function: str
    again: str
    """The guard that failed, where code of it was there; else empty."""
    at: tuple[str, int]
    """File and line of the value that the guard is on; an empty file where torch does not say it."""


@functools.cache
def why_no_capture() -> str:
    """Why ``torch.compile`` cannot run here at all, in torch's words; empty where it can.

    Hides ``torch._dynamo.eval_frame.check_if_dynamo_supported``.
    """
    from torch._dynamo import eval_frame

    try:
        eval_frame.check_if_dynamo_supported()
    except Exception as error:  # torch says in its own exceptions what is missing
        reraise_ours(error)
        return str(error).partition("\n")[0]
    return ""


@functools.cache
def why_no_generated_code(device: str) -> str:
    """Why inductor cannot generate code for a device here, in words; empty where it can.

    Asked as inductor does: for a C++ compiler that answers, for Triton on other devices. Hides
    ``torch._inductor.cpp_builder.get_cpp_compiler`` and ``torch.utils._triton.has_triton``.
    """
    if device == "cpu":
        from torch._inductor import cpp_builder

        try:
            cpp_builder.get_cpp_compiler()
        except Exception as error:  # torch says in its own exceptions what is missing
            reraise_ours(error)
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            return f"no C++ compiler was found ({said}); install g++ or clang, or name one in the variable CXX"
        return ""
    from torch.utils._triton import has_triton

    return "" if has_triton() else f"Triton, which compiles for {device}, is not installed or not usable"


@contextlib.contextmanager
def compiling_as_eager() -> Iterator[None]:
    """What is compiled inside draws the random numbers that it would draw without a compiler, is compiled in this
    process, and is forgotten at the end, as is what the process had compiled before.

    Hides ``fallback_random`` and ``compile_threads`` of ``torch._inductor.config``, the counters of ``torch._dynamo``
    and its list of graph breaks.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import config

    kept = {name: dict(found) for name, found in counters.items()}
    torch.compiler.reset()
    try:
        with config.patch(fallback_random=True, compile_threads=1), _quiet():
            yield
    finally:
        torch.compiler.reset()
        counters.clear()
        for name, found in kept.items():
            counters[name].update(found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch's log of the compiler goes nowhere, unless TORCH_LOGS asks for some of it."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    loggers = (logging.getLogger(name) for name in ("torch", "torch._dynamo", "torch._inductor", "torch._functorch"))
    handlers = [handler for logger in loggers for handler in logger.handlers]

    def nothing(_record: logging.LogRecord) -> bool:
        return False

    for handler in handlers:
        handler.addFilter(nothing)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(nothing)


def graph_breaks() -> list[GraphBreak]:
    """The breaks since the compiler was reset, each as often as it came up.

    Hides ``torch._dynamo.utils.graph_break_reasons``.
    """
    from torch._dynamo.utils import graph_break_reasons

    return [
        GraphBreak(stack, _words(found.reason))
        for found in graph_break_reasons
        if (stack := tuple((frame.filename, frame.lineno or 0) for frame in found.user_stack))
    ]


def _words(reason: str) -> str:
    said = " ".join(reason.strip().partition("\n")[0].split())
    return said if " " in said else "torch cannot trace this statement"


class CompilationLog:
    """The compilations of this process, from the moment on at which the log is made.

    Hides ``torch._dynamo.utils.get_compilation_metrics``, which keeps the last 64.
    """

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self.new()

    def new(self) -> list[Compilation]:
        """Those since the last call."""
        from torch._dynamo.utils import get_compilation_metrics

        found = get_compilation_metrics()
        new = [one for one in found if not any(one is seen for seen in self._seen)]
        self._seen = found
        return [
            Compilation(one.co_filename, one.co_firstlineno or 0, one.co_name, *_failed(one))
            for one in new
            if one.co_filename and one.co_name
        ]


_GUARD = re.compile(r"^\d+/\d+(?:_\d+)?: ")
_USER_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_SHORT_LINE = re.compile(r"(?P<file>\S+):(?P<line>\d+) in \S+")


def _failed(found: Any) -> tuple[str, tuple[str, int]]:
    """The guard that failed, and the user's line that it comes from: torch writes it as a traceback, older ones as a
    comment with the end of the path only."""
    said = getattr(found, "recompile_reason", None) or ""  # torch 2.6 keeps none
    guard = _GUARD.sub("", " ".join(said.partition("\n")[0].partition("  #")[0].split()))
    long = list(_USER_LINE.finditer(said))
    if long:
        return guard, (long[-1]["file"], int(long[-1]["line"]))
    short = _SHORT_LINE.search(said)
    if short is not None and found.co_filename.endswith(short["file"].lstrip(".")):
        return guard, (found.co_filename, int(short["line"]))
    return guard, ("", 0)


def recompile_limit() -> int:
    """The number of times that a function is compiled before torch runs it without: ``torch._dynamo.config``."""
    from torch._dynamo import config

    return int(getattr(config, "recompile_limit", 8))


def schema_of(func: Any) -> str:
    """What an operator's schema says of it. Hides ``OpOverload._schema``."""
    return str(func._schema)


def fake_results(func: Any, args: Any, kwargs: Any) -> Any:
    """What the compiler believes that an operator returns: tensors without values.

    Hides ``FakeTensorMode``.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map

    with FakeTensorMode() as mode:
        fake = lambda value: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value  # noqa: E731
        return func(*tree_map(fake, args), **tree_map(fake, kwargs))


_COMPILE = torch.compile
"""As torch has it, whatever replaces it during a run."""


@contextlib.contextmanager
def compiled_alone(module: torch.nn.Module, backend: Any) -> Iterator[None]:
    """Compile the calls of one module, as they are made."""
    had, before = "forward" in vars(module), module.forward
    module.forward = _COMPILE(before, backend=backend or "inductor")
    try:
        yield
    finally:
        if had:
            module.forward = before
        else:
            del module.forward
