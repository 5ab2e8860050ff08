"""Which function of a running script trains, and on which data."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from pytest_trainloop.frontends.script_runner.stack import ABSENT, Frame

if TYPE_CHECKING:
    from collections.abc import Iterator


def training_function(frames: list[Frame]) -> tuple[Frame, Frame, Any] | None:
    """The function that trains, with its caller before it and its DataLoader behind: the innermost one that is in a
    loop over a DataLoader that it was given, by a parameter, by an attribute of the object whose method it is, or as a
    name of its module; else the innermost one that names such a loader, or has one as a parameter."""
    given = [
        (caller, called, loaders)
        for caller, called in zip(frames[-2::-1], frames[:0:-1], strict=True)
        if not called.at_module_level and (loaders := _given(called))
    ]
    for caller, called, loaders in given:
        loader = iterated(called)
        if any(loader is each for each in loaders):
            return caller, called, loader
    for caller, called, loaders in given:
        named = [v for v in _loaders_in(ast.Module(called.body(), []), called) if any(v is each for each in loaders)]
        of_parameters = [v for v in map(called.value, called.parameters) if isinstance(v, DataLoader)]
        if named or of_parameters:
            return caller, called, (named or of_parameters)[0]
    return None


def iterated(frame: Frame) -> Any:
    """The DataLoader of the innermost loop or comprehension around a frame's line that goes over one; None without."""
    found: list[tuple[int, Any]] = []
    for node in ast.walk(ast.Module(frame.body(), [])):
        if not node_has_line(node, frame.line):
            continue
        heads = [node.iter] if isinstance(node, ast.For) else [g.iter for g in getattr(node, "generators", ())]
        found += [(node.lineno, loader) for head in heads for loader in _loaders_in(head, frame)]  # type: ignore[attr-defined]
    return max(found, key=lambda each: each[0])[1] if found else None


def node_has_line(node: ast.AST, line: int) -> bool:
    """Whether a statement or expression contains a line."""
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", 0) or 0)


def globals_used(frame: Frame) -> list[str]:
    """The names of its module that a function uses."""
    if frame.at_module_level:
        return []
    return [n for n in frame.code.co_names if n in frame.globals and frame.globals[n] is not ABSENT]


def _given(called: Frame) -> list[Any]:
    given = [called.value(name) for name in called.parameters]
    own = [v for value in given[:1] for v in getattr(value, "__dict__", {}).values()]
    shared = [called.value(name) for name in globals_used(called)]
    return [v for v in (*given, *own, *shared) if isinstance(v, DataLoader)]


def _loaders_in(node: ast.AST, frame: Frame) -> Iterator[Any]:
    """The DataLoaders that names and attributes in a piece of code refer to."""
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Name, ast.Attribute)):
            value = frame.evaluated(inner)
            if isinstance(value, DataLoader):
                yield value
