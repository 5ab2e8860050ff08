"""Calls of ``step()`` that stand in the source of a loop and were not made: an optimizer that waits for its turn."""

from __future__ import annotations

import ast
import linecache
from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import SchedulerStep, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def may_step_later(record: Record) -> bool:
    """Whether the loop's source holds a call of ``step()`` that this run did not make.

    The functions that call ``backward()`` are searched, and those of the same file that they call by name. True where
    there is no source.
    """
    made: dict[tuple[str, int], set[object]] = defaultdict(set)
    for step in record.of(Step):
        for line in step.site:
            made[line].add(step.optimizer)
    for scheduled in record.of(SchedulerStep):
        for line in scheduled.site:
            made[line].add("scheduler")
    places = {line for backward in record.backwards() for line in backward.site[:1]}
    return any(_uncalled(file, line, made) for file, line in places) or not places


def _uncalled(file: str, line: int, made: dict[tuple[str, int], set[object]]) -> bool:
    source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return True
    functions = [n for n in ast.walk(tree) if isinstance(n, _Function)]
    around = [f for f in functions if f.lineno <= line <= (f.end_lineno or f.lineno)]
    if not source:
        return True
    # a loop at the top of a script is in no function
    top = ast.Module([n for n in tree.body if not isinstance(n, _DEFINITIONS)], [])
    innermost = min(around, key=lambda f: (f.end_lineno or f.lineno) - f.lineno) if around else top
    called = set(_called(innermost))
    helpers = [f for f in functions if isinstance(f, ast.FunctionDef) and f.name in called and f not in around]
    calls: dict[int, int] = defaultdict(int)
    for function in (innermost, *helpers):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
                calls[node.lineno] += 1
    return any(count > len(made.get((file, at), ())) for at, count in calls.items())


def _called(function: ast.AST) -> Iterator[str]:
    """Names of functions and methods that are called in a function or module."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr
            elif isinstance(node.func, ast.Name):
                yield node.func.id
