"""The expression of a call that is under way: what its author wrote, which a mode cannot tell from a default."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from typing import TYPE_CHECKING

from pytest_trainloop.core.places import syntax_of

if TYPE_CHECKING:
    from types import FrameType


def written_call(frame: FrameType, names: tuple[str, ...] = ()) -> ast.Call | None:
    """The call that a frame is making; None without its source.

    Python before 3.11 knows the line only: there it is the one call on that line to a function of these names, or None
    where several differ.
    """
    file = frame.f_code.co_filename
    if sys.version_info >= (3, 11):
        line, last, column, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        if line is not None and last is not None and column is not None and end is not None:
            return _call_at(file, line, last, column, end)
    return _call_on(file, frame.f_lineno, names)


def given_in(call: ast.Call, name: str, position: int) -> ast.expr | None:
    """The expression of an argument, by its name or its position from 0 on; None where it is left to its default."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if len(call.args) > position else None


def unpacks(call: ast.Call) -> bool:
    """Whether arguments come from a list or a dict, so that the expression does not tell which are given."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)


def called_name(call: ast.Call) -> str:
    """The last name of what is called: ``dropout`` of ``F.dropout(x)``; empty for another expression."""
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def names_in(expression: ast.expr) -> set[str]:
    """The names and attributes that an expression reads."""
    nodes = list(ast.walk(expression))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {n.id for n in nodes if isinstance(n, ast.Name)}


@functools.lru_cache(maxsize=1024)
def _call_at(file: str, line: int, last: int, column: int, end: int) -> ast.Call | None:
    lines = [text.encode() for text in linecache.getlines(file)[line - 1 : last]]  # columns count bytes
    if len(lines) != last - line + 1:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][column:]
    try:
        expression = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return expression if isinstance(expression, ast.Call) else None


@functools.lru_cache(maxsize=1024)
def _call_on(file: str, line: int, names: tuple[str, ...]) -> ast.Call | None:
    calls = [node for node in ast.walk(syntax_of(file)) if isinstance(node, ast.Call) and called_name(node) in names]
    found = [node for node in calls if node.lineno <= line <= (node.end_lineno or line)]
    signatures = {(len(c.args), tuple(sorted(k.arg or "" for k in c.keywords)), unpacks(c)) for c in found}
    return found[0] if len(signatures) == 1 else None
