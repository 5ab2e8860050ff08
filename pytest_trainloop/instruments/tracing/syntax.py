"""The statements of the project's files: which one is at a line, and which one made what an expression gives.

A name is followed to where it was assigned, a function of the file to what it returns, a parameter to the only call.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.places import syntax_of
from pytest_trainloop.instruments.tracing.call_expressions import called_name
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAME = frozenset(
    "contiguous detach clone items to bool long float type_as squeeze unsqueeze expand view flatten reshape transpose"
    .split()
)  # fmt: skip
FARTHEST = 6
"""Statements that a value is followed for."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Source:
    """The syntax tree of a file of the project's."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.tree = syntax_of(file)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The node and what holds it."""
        while True:
            yield node
            if node not in self.parents:
                return
            node = self.parents[node]

    def statement(self, line: int) -> Any:
        """The innermost statement at a line; of a block its first line alone."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and n.lineno <= line <= _last(n)]
        return max(found, key=lambda n: n.lineno, default=None)

    def function(self, node: ast.AST) -> Any:
        """The function that holds a node."""
        return next((n for n in self.above(self.parents.get(node, node)) if isinstance(n, FUNCTIONS)), None)

    def named(self, name: str) -> Any:
        """The only function of this name."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, FUNCTIONS) and n.name == name]
        return found[0] if len(found) == 1 else None

    def calls(self, name: str) -> list[ast.Call]:
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and called_name(n) == name]

    def text(self, node: Any) -> str:
        return str(place_of(self.file, node.lineno))


source_of = functools.lru_cache(maxsize=64)(Source)


def _last(node: Any) -> int:
    """The last line of a statement, of a block that of its header."""
    body = getattr(node, "body", None)
    return int(max(node.lineno, body[0].lineno - 1) if isinstance(body, list) and body else node.end_lineno)


def statement_at(line: str) -> tuple[Source, Any] | None:
    """The file and the statement of a line as findings have it."""
    name, _, number = line.partition("   ")[0].rpartition(":")
    file = _file(name) if number.isdigit() else ""
    if not file or layer(file) != 2:
        return None
    source = source_of(file)
    statement = source.statement(int(number))
    return None if statement is None else (source, statement)


def _file(name: str) -> str:
    if (path := Path.cwd() / name).is_file():
        return str(path)
    files = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    found = [file for file in files if file.replace("\\", "/").endswith(f"/{name}")]
    return found[0] if len(found) == 1 else ""


def nodes_within(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without those of a block that it opens."""
    blocks = [
        n for part in ("body", "orelse", "finalbody", "handlers") for n in as_list(getattr(statement, part, None))
    ]
    todo = [n for n in ast.iter_child_nodes(statement) if n not in blocks] if blocks else [statement]
    while todo:
        node = todo.pop(0)
        yield node
        todo += ast.iter_child_nodes(node)


def calls_at(line: str, name: str) -> list[tuple[Source, ast.Call]]:
    """The calls of this name in the statement at a line, with its file."""
    found = statement_at(line)
    nodes = [] if found is None else [n for n in nodes_within(found[1]) if isinstance(n, ast.Call)]
    return [(found[0], call) for call in nodes if found is not None and called_name(call) == name]


def argument_of(call: ast.Call, name: str, place: int) -> ast.expr | None:
    """What a call gives for a parameter, by its name or at its place."""
    keyword = next((k.value for k in call.keywords if k.arg == name), None)
    return keyword or (call.args[place] if 0 <= place < len(call.args) else None)


def blocks_of(node: Any) -> list[list[Any]]:
    return [as_list(getattr(node, part, None)) for part in ("body", "orelse", "finalbody")]


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def maker_of(source: Source, used: Any, depth: int = FARTHEST) -> str:
    """The statement that made what an expression gives: a name is followed to where it was assigned, a function of the
    file to what it returns, a parameter to the only call."""
    own = source.statement(used.lineno)
    base = base_of(used)
    if depth == 0 or own is None:
        return ""
    if isinstance(base, ast.Call):
        function = source.named(called_name(base))
        returns = [] if function is None else [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
        inside = [n for n in returns if source.function(n) is function]
        return maker_of(source, inside[0].value, depth - 1) if len(inside) == 1 else source.text(own)
    if isinstance(base, ast.Name):
        if (before := assignment_of(source, base)) is not None:
            whole = _iterated(before, base.id) if isinstance(before, ast.For) else getattr(before, "value", None)
            simple = isinstance(whole, (ast.Name, ast.Attribute, ast.Call)) and not isinstance(before, ast.AugAssign)
            return maker_of(source, whole, depth - 1) if simple else source.text(before)
        return given_for(source, base, depth) or source.text(own)
    if isinstance(base, ast.Attribute):
        return _attribute(source, base) or source.text(own)
    return source.text(own)


def base_of(used: Any) -> Any:
    """What lies behind a negation, a comparison with a constant, an index that adds axes, and casts."""
    while True:
        if isinstance(used, ast.UnaryOp):
            used = used.operand
        elif isinstance(used, ast.Subscript) and isinstance(used.slice, (ast.Tuple, ast.Constant)):
            used = used.value
        elif isinstance(used, ast.Compare) and isinstance(used.comparators[0], ast.Constant):
            used = used.left
        elif isinstance(used, ast.Call) and isinstance(used.func, ast.Attribute) and used.func.attr in _SAME:
            used = used.func.value
        elif isinstance(used, ast.Call) and getattr(used.func, "id", "") == "enumerate" and used.args:
            used = used.args[0]
        else:
            return used


def assignment_of(source: Source, name: ast.Name) -> Any:
    """The last statement before, in the same function or outside of all, that assigns a name."""
    function = source.function(name)
    while True:
        scope = source.tree if function is None else function
        found = [
            n
            for n in ast.walk(scope)
            if isinstance(n, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)) and name.id in targets_of(n)
            and (source.function(n) is function) and (n.lineno < name.lineno or source.function(name) is not function)
        ]  # fmt: skip
        if found:
            return max(found, key=lambda n: n.lineno)
        if function is None or name.id in parameters_of(function):
            return None
        function = source.function(function)


def _iterated(loop: Any, name: str) -> Any:
    """What a name of a loop goes over: of ``zip`` the argument in its place."""
    zipped = isinstance(loop.iter, ast.Call) and called_name(loop.iter) == "zip" and isinstance(loop.target, ast.Tuple)
    places = [getattr(n, "id", "") for n in loop.target.elts] if zipped else []
    place = places.index(name) if name in places else len(loop.iter.args) if zipped else 0
    return loop.iter.args[place] if zipped and place < len(loop.iter.args) else loop.iter


def targets_of(statement: Any) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def parameters_of(function: Any) -> list[str]:
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def given_for(source: Source, name: ast.Name, depth: int) -> str:
    """The statement that made what the only call of a function gives for a parameter, or all calls of one function."""
    function = source.function(name)
    if function is None or name.id not in parameters_of(function):
        return ""
    calls = [call for call in source.calls(function.name) if source.function(call) is not function]
    of_class = source.parents.get(function)
    if isinstance(of_class, ast.ClassDef):
        calls = [call for call in calls if of_class in source.above(call)] or calls
    place = parameters_of(function).index(name.id) - (parameters_of(function)[0] in ("self", "cls"))
    every = [argument_of(call, name.id, place) for call in calls]
    given = every[0] if every else None
    if len({source.function(call) for call in calls}) != 1 or any(e is None for e in every) or given is None:
        return ""
    one = len({ast.dump(e) for e in every if e is not None}) == 1
    return maker_of(source, given, depth - 1) if one else ""


def _attribute(source: Source, used: ast.Attribute) -> str:
    """The only statement that gives an attribute more than None, in a method or in the body of a class."""
    found: list[ast.AST] = []
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            in_class = isinstance(source.parents.get(node), ast.ClassDef)
            names = [n.attr for t in targets for n in ast.walk(t) if isinstance(n, ast.Attribute)]
            names += [n.id for t in targets if in_class for n in ast.walk(t) if isinstance(n, ast.Name)]
            empty = isinstance(node.value, ast.Constant) and node.value.value is None
            found += [node] if used.attr in names and not empty else []
        elif isinstance(node, ast.Call) and called_name(node) == "register_buffer" and node.args:
            found += [node] if getattr(node.args[0], "value", None) == used.attr else []
    return source.text(found[0]) if len(found) == 1 else ""
