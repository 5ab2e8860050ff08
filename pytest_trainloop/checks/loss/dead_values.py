"""Whether the value that a line computes is ever read by the function around it, from the function's source.

Three forms are sure: a statement that throws the value away, a name that nothing in the function reads, and a name that
the next assignment of its block replaces before anything reads it. What a caller gets, what goes into a call, an
attribute or a container may be read elsewhere: nothing is said.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from pytest_trainloop.core.places import syntax_of
from pytest_trainloop.recording.torch_names import LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Site

Function = ast.FunctionDef | ast.AsyncFunctionDef


def never_read(site: Site) -> str:
    """How the value that was made at this call site is lost, in words; empty where it may be read.

    A line that returns the value passes the question on to its caller.
    """
    called = ""
    for filename, line in site:
        located = statement_at(filename, line)
        if located is None:
            return ""
        statement, block, function = located
        if function is None:
            return ""
        if not isinstance(statement, ast.Return):
            return _lost(function, block, statement, called)
        if not _is_the_call(statement.value, called):
            return ""
        called = function.name
    return ""


def statement_at(filename: str, line: int) -> tuple[ast.stmt, list[ast.stmt], Function | None] | None:
    """The simple statement on a line, the block that it belongs to, and the innermost function around it."""
    for statement, block, function in _simple(syntax_of(filename), None):
        if covers(statement, line):
            return statement, block, function
    return None


def _simple(node: ast.AST, function: Function | None) -> Iterator[tuple[ast.stmt, list[ast.stmt], Function | None]]:
    function = node if isinstance(node, Function) else function
    for block in _blocks(node):
        yield from ((s, block, function) for s in block if not list(_blocks(s)) and not isinstance(s, ast.Match))
    for child in ast.iter_child_nodes(node):
        yield from _simple(child, function)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block


def covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _lost(function: Function, block: list[ast.stmt], statement: ast.stmt, called: str) -> str:
    if isinstance(statement, ast.Expr):
        return "its value is thrown away" if _is_the_call(statement.value, called) else ""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return ""
    if not _is_the_call(statement.value, called):
        return ""
    target = statement.targets[0]
    if not isinstance(target, ast.Name) or target.id.startswith("_") or _escapes(function, target.id):
        return ""
    if not reads(function, target.id):
        return f"nothing in {function.name}() reads {target.id}"
    for later in block[block.index(statement) + 1 :]:
        if reads(later, target.id):
            return ""
        if isinstance(later, ast.Assign) and any(isinstance(t, ast.Name) and t.id == target.id for t in later.targets):
            return f"line {later.lineno} replaces {target.id} before anything reads it"
        if list(_blocks(later)):
            return ""  # a branch or a loop may leave the block
    return ""


def reads(node: ast.AST, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(node))


def _escapes(function: Function, name: str) -> bool:
    """Whether the name is not the function's own, or may be read by its text."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return True
        if isinstance(node, ast.Name) and node.id in ("locals", "vars", "eval", "exec"):
            return True
    return False


def _is_the_call(value: ast.expr | None, called: str) -> bool:
    """Whether an expression is a call, or arithmetic and methods of one: not a call that is given another's result,
    that of a loss or of the function ``called``."""
    while True:
        if isinstance(value, ast.BinOp):
            return _is_the_call(value.left, called) or _is_the_call(value.right, called)
        if isinstance(value, ast.UnaryOp):
            value = value.operand
        elif isinstance(value, ast.Call):
            if isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call):
                value = value.func.value
                continue
            given = [*value.args, *(k.value for k in value.keywords)]
            return not any(_may_be_a_loss(n, called) for g in given for n in ast.walk(g))
        else:
            return False


def _may_be_a_loss(node: ast.AST, called: str) -> bool:
    """Whether a call among the arguments may be the loss, whose result then goes into the outer call."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in LOSSES or name == called or "loss" in name or "criterion" in name
