"""A loop whose project has statements edited: the functions around them run with the edited code, and no file changes.

A repair of one line can so be tried on the loop before it is offered. Functions that are defined while the loop is
built get the edit too, since the function around them does.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import gc
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.places import syntax_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Edit = tuple[str, ast.stmt, Sequence[ast.stmt]]
    """A file, a statement of its syntax tree (``syntax_of``), and what takes its place."""

PREFIX = "_trainloop_"
"""Begins the names by which edited code calls functions of this package."""


@contextlib.contextmanager
def edited(edits: Sequence[Edit], helpers: Mapping[str, Any]) -> Iterator[None]:
    """Run functions with other statements. ``helpers`` are what these call, by names that begin with ``PREFIX``.

    An edit is left out where no function holds its statement, or where a function would need other names of the
    functions around it.
    """
    codes: dict[tuple[str, str, int], CodeType] = {}
    for file in dict.fromkeys(file for file, _, _ in edits):
        mine = [(old, new) for name, old, new in edits if name == file]
        codes |= _codes(_compiled(file, mine), {old.lineno for old, _ in mine})
    functions = [f for f in gc.get_objects() if type(f) is FunctionType and _key(f.__code__) in codes]
    before = [(f, f.__code__) for f in functions if f.__code__.co_freevars == codes[_key(f.__code__)].co_freevars]
    for name, helper in helpers.items():
        setattr(builtins, name, helper)
    try:
        for function, _ in before:
            function.__code__ = codes[_key(function.__code__)]
        yield
    finally:
        for function, code in before:
            function.__code__ = code
        for name in helpers:
            delattr(builtins, name)


def _compiled(file: str, edits: Sequence[tuple[ast.stmt, Sequence[ast.stmt]]]) -> CodeType:
    """The file's code with these statements replaced; the tree, which others read, is as before afterwards."""
    tree, wanted = syntax_of(file), {id(old): (old, new) for old, new in edits}
    changed: list[tuple[list[ast.stmt], list[ast.stmt]]] = []
    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and any(id(statement) in wanted for statement in block):
                changed.append((block, list(block)))
                pairs = [wanted.get(id(statement), (statement, [statement])) for statement in block]
                block[:] = [part for old, new in pairs for part in _placed(old, new)]
    try:
        return compile(tree, file, "exec", dont_inherit=True)
    finally:
        for block, before in changed:
            block[:] = before


def _placed(old: ast.stmt, new: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Copies of new statements, all of them on the line of the old one."""
    placed = [part if part is old else copy.deepcopy(part) for part in new]
    for node in (node for part in placed if part is not old for node in ast.walk(part)):
        for name in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
            if name in node._attributes:
                setattr(node, name, getattr(old, name))
    return placed


def _codes(code: CodeType, lines: set[int]) -> dict[tuple[str, str, int], CodeType]:
    """The code of each function that holds one of these lines, the outer ones too."""
    found: dict[tuple[str, str, int], CodeType] = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _codes(constant, lines)
            if inner or lines & {number for _, _, number in constant.co_lines() if number is not None}:
                found |= {_key(constant): constant} | inner
    return found


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_name, code.co_firstlineno
