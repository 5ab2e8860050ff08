"""The statements of the tests, and what two functions of them have in common: for the edit between two twins."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import re
import textwrap
import types
from functools import cache
from pathlib import Path
from typing import Any

from pytest_trainloop.instruments.tracing import syntax

ROOT = Path(__file__).parents[1]

ORDERED = ("backward", "step", "zero_grad", "clip_grad", "unscale_", "update", "load_state_dict", "train", "eval")

Parameter = tuple["Source", Any, str]
"""A function in its file, and the name."""

Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Source(syntax.Source):
    """The syntax tree of a file, by lines and nodes."""

    def at(self, line: int, kinds: Any = Function) -> list[Any]:
        """The nodes of these kinds that begin at a line, with their decorators, or hold it."""
        return [n for n in ast.walk(self.tree) if isinstance(n, kinds) and first_line(n) <= line <= n.end_lineno]

    def holding(self, node: ast.AST) -> ast.stmt | None:
        """The statement that a node is, or lies in."""
        return next((n for n in self.above(node) if isinstance(n, ast.stmt)), None)


source = cache(Source)


def first_line(node: Any) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def plain_lines(text: list[str]) -> list[str]:
    """The lines of a function or class without its indentation and its name."""
    whole = textwrap.dedent("\n".join(t.rstrip() for t in text))
    return re.sub(r"^((async )?def|class) \w+", r"\1 _", whole, count=1, flags=re.MULTILINE).split("\n")


def blocks_of(parent: Any) -> list[list[ast.stmt]]:
    found = (getattr(parent, part, None) for part in ("body", "orelse", "finalbody"))
    return [block for block in found if isinstance(block, list)]


def results_of(function: Any) -> list[Any]:
    """What gives the result of a function: its ``return`` statements, or a lambda itself."""
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
    return [function] if isinstance(function, ast.Lambda) else returns


def values_of(function: Any) -> list[Any]:
    """The expressions that a function gives."""
    return [n.body if isinstance(n, ast.Lambda) else n.value for n in results_of(function)]


def only_adds(faulty: tuple[Source, Any] | None, fixed: tuple[Source, Any] | None) -> bool:
    """Whether a faulty function gives nothing or one of its arguments, or the repaired one applies more to its
    result."""
    results = [] if faulty is None else values_of(faulty[1])
    if faulty is None or len(results) > 1 or (fixed is not None and ast.dump(faulty[1]) == ast.dump(fixed[1])):
        return False
    own, nothing = results[0] if results else None, ast.dump(ast.Constant(None))
    if own is None or ast.dump(own) == nothing or (isinstance(own, ast.Name) and own.id in bound_in(faulty[1])):
        return isinstance(faulty[1], ast.Lambda) or len(faulty[1].body) == 1
    return fixed is not None and any(ast.dump(n) == ast.dump(own) for r in values_of(fixed[1]) for n in ast.walk(r))


def targets_of(statement: ast.Assign) -> set[str]:
    return {n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def builtin_calls(statement: ast.stmt) -> set[tuple[str, ...]]:
    """The builtin functions that a statement calls with keywords, with the names of these."""
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and n.keywords]
    return {(n.func.id, *(k.arg or "" for k in n.keywords)) for n in calls if isinstance(n.func, ast.Name)
            and hasattr(builtins, n.func.id)}  # fmt: skip


def default_of(function: Any, place: str | int) -> Any:
    """What a function takes where it is not given an argument."""
    with contextlib.suppress(TypeError, ValueError):
        named = inspect.signature(function).parameters
        one = named.get(place) if isinstance(place, str) else [*named.values()][place] if place < len(named) else None
        return None if one is None or one.default is one.empty else one.default
    return None


def neighbours_of(function: Any) -> dict[str, list[tuple[Any, str, str, type]]]:
    """The plain statements of a function by their text, each with that of the ones before and after it in its block,
    and what the block belongs to."""
    found: dict[str, list[tuple[Any, str, str, type]]] = {}
    for holder, block in ((n, b) for n in ast.walk(function) for b in blocks_of(n)):
        texts = ["", *(ast.unparse(n).partition("\n")[0] for n in block), ""]
        for i, statement in enumerate(block):
            if not hasattr(statement, "body") and not isinstance(statement, ast.Return):
                found.setdefault(texts[i + 1], []).append((statement, texts[i], texts[i + 2], type(holder)))
    return found


def names_in(node: ast.AST) -> set[str]:
    """The variables that a statement uses, with the first attribute of each: ``self.optimizer``."""
    held = {n.value: n for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    called = {n.func for n in ast.walk(node) if isinstance(n, ast.Call)}
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return {f"{n.id}.{held[n].attr}" if n in held and held[n] not in called else n.id for n in names}


def related(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def is_ordered(statement: ast.stmt) -> bool:
    """Whether a statement calls what reads or writes weights and gradients in order."""
    calls = (n.func for n in ast.walk(statement) if isinstance(n, ast.Call))
    return any(getattr(f, "attr", getattr(f, "id", "")).startswith(ORDERED) for f in calls)


def assigned_to(statement: ast.stmt, use: ast.AST) -> list[ast.expr]:
    """What a statement assigns a value to, unchanged or chosen by it, alone or in a list or a dict."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "append" and is_chosen_by(call.args[0], use):
        return [call.func.value]  # type: ignore[attr-defined]
    if not isinstance(statement, ast.Assign):
        return []
    value, targets = statement.value, list(statement.targets)
    if isinstance(value, ast.Tuple) and isinstance(targets[0], ast.Tuple) and use in value.elts:
        return [targets[0].elts[value.elts.index(use)]]
    if value is use or is_chosen_by(value, use):
        return [n for t in targets for n in (t.elts if isinstance(t, ast.Tuple) else [t])]
    while isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("dict", "list", "tuple", "zip"):
        if use in value.args:
            return targets
        value = value.args[0] if value.args else None
    return []


def iterated_by(loop: ast.stmt, use: ast.AST) -> list[ast.expr]:
    """The variables of a loop that take a value out of what it goes over: of a list of several, of one of several that
    are zipped, or of a part of it."""
    if not isinstance(loop, ast.For) or use not in ast.walk(loop.iter):
        return []
    over, target = loop.iter, loop.target
    together = [[a] for a in over.args] if isinstance(over, ast.Call) and getattr(over.func, "id", "") == "zip" else []
    if isinstance(over, (ast.Tuple, ast.List)) and all(isinstance(n, ast.Tuple) for n in over.elts):
        together = [list(column) for column in zip(*(n.elts for n in over.elts), strict=False)]  # type: ignore[attr-defined]
    if together and isinstance(target, ast.Tuple):
        columns = zip(target.elts, together, strict=False)
        return [t for t, column in columns if any(use in ast.walk(n) for n in column)]
    return [target] if isinstance(over, ast.Subscript) else []


def is_chosen_by(value: ast.expr, use: ast.AST) -> bool:
    """Whether a value is chosen by a name, or is a condition that has it."""
    condition = isinstance(value, (ast.BoolOp, ast.Compare)) or (
        isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    )
    chosen = any(isinstance(n, ast.IfExp) and use in ast.walk(n.test) for n in ast.walk(value))
    if isinstance(value, ast.Subscript) and isinstance(value.value, (ast.Dict, ast.Tuple, ast.List)):
        chosen = chosen or use in ast.walk(value.slice)
    return chosen or (condition and use in ast.walk(value))


def bound_in(node: Any) -> set[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    found = {a.arg for a in every if a is not None}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
        elif isinstance(inner, ast.FunctionDef):
            found.add(inner.name)
    return found


def definition_of(within: Source, name: str, depth: int = 3, near: Any = None) -> tuple[Source, Any]:
    """The function or class of the tests that a name means, ``near`` a call of it."""
    for scope in within.above(near) if near is not None else ():
        for node in getattr(scope, "body", ()) if isinstance(scope, ast.FunctionDef) else ():
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return within, node
    for node in ast.walk(within.tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return within, node
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests") and depth:
            file = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
            if any((a.asname or a.name) == name for a in node.names) and file.is_file():
                return definition_of(source(str(file)), name, depth - 1)
    return within, None


def given(function: Any) -> dict[str, Any]:
    """What a function was given when it was made: its closure and its defaults."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    named = inspect.signature(function).parameters.values()
    return found | {p.name: p.default for p in named if p.default is not p.empty}


def differ(one: Any, other: Any) -> bool:
    if one is other:
        return False
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        ours, theirs = given(one), given(other)
        return one.__code__ != other.__code__ or any(differ(ours[n], theirs.get(n)) for n in ours)
    try:
        return bool(one != other)
    except (RuntimeError, ValueError):  # tensors
        return True


def node_of(function: Any) -> tuple[Source, Any] | None:
    """The syntax tree of a function of the tests."""
    code = getattr(function, "__code__", None)
    if code is None or not Path(code.co_filename).is_relative_to(ROOT / "tests"):
        return None
    within = source(code.co_filename)
    kind = ast.Lambda if function.__name__ == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [n for n in within.at(code.co_firstlineno, kind) if first_line(n) == code.co_firstlineno]
    if kind is ast.Lambda and len(found) > 1:  # several in one line: the innermost that holds the whole code
        spans = [
            (a, c, b, d)
            for a, b, c, d in getattr(code, "co_positions", tuple)()
            if None not in (a, b, c, d) and (a, c) != (b, d)
        ]
        holding = [
            n
            for n in found
            if all((n.lineno, n.col_offset) <= at[:2] and at[2:] <= (n.end_lineno, n.end_col_offset) for at in spans)
        ]
        found = holding[-1:] or found
    return (within, found[0]) if found else None


def value_of(function: Any, node: ast.AST | None) -> Any:
    """The function or class that a name of a function's means."""
    if not isinstance(node, ast.Name) or not isinstance(function, types.FunctionType):
        return None
    return given(function).get(node.id, function.__globals__.get(node.id))


def parameter_of(
    within: Source, call: ast.Call, place: str | int | None, caller: Any
) -> tuple[Source, Any, str] | None:
    """The function of the tests that is given an argument of a call, and the parameter that takes it."""
    value = None if caller is None else value_of(caller, call.func)
    if caller is not None and getattr(call.func, "attr", "") == "apply":  # of a function of autograd, without its ctx
        value = getattr(value_of(caller, call.func.value), "forward", None)  # type: ignore[attr-defined]
        place = place + 1 if isinstance(place, int) else place
    if isinstance(value, functools.partial):
        place = place + len(value.args) if isinstance(place, int) else place
        value = value.func
    if isinstance(value, type):
        place = place + 1 if isinstance(place, int) else place
        value = value.__init__
    if isinstance(value, types.FunctionType):
        where, node = node_of(value) or (within, None)
    else:
        where, node = definition_of(within, call.func.id if isinstance(call.func, ast.Name) else "", near=call)
        if node is None and getattr(call.func, "attr", "") == "__init__":  # of super()
            kind = next((n for n in within.above(call) if isinstance(n, ast.ClassDef) and n.bases), None)
            where, node = definition_of(within, getattr(kind.bases[0], "id", "") if kind else "")
    if isinstance(node, ast.ClassDef):
        node = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        place = place + 1 if isinstance(place, int) else place
    if node is None or place is None:
        return None
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    return where, node, place if isinstance(place, str) else names[place] if place < len(names) else ""


def lines_of(thing: Any) -> tuple[str, int, list[str]] | None:
    """File, first line and lines of a function or class of the tests."""
    try:
        file, (lines, first) = inspect.getsourcefile(thing), inspect.getsourcelines(thing)
    except (OSError, TypeError):
        return None
    if file is None or not Path(file).is_relative_to(ROOT / "tests"):
        return None
    if isinstance(thing, types.FunctionType) and thing.__name__ == "<lambda>":
        nodes = [n for n in source(file).at(thing.__code__.co_firstlineno, ast.Lambda) if n.lineno == first]
        last = max((n.end_lineno for n in nodes), default=first)
        lines = Path(file).read_text(encoding="utf-8").splitlines()[first - 1 : last]
    return file, first, lines
