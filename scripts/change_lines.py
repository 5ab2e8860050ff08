"""Whether the line that a finding says to change is the line that its repaired twin changes.

python scripts/change_lines.py [-k TEXT] [--only CHECK,...] [--share I/N] [--minutes M] [--show] [--store]
python scripts/change_lines.py --folder FOLDER REPORT.json [--show]

The faulty loop of each pair is judged by the pair's own check. Its ``change`` is *right* where it is a line of the
edit: a line that only the faulty source has, or the statement before, after or around what only the repaired one has.
An inserted statement may be anywhere in its block up to one that uses its names, or that trains, steps or zeroes.
Both loops of a pair are mostly one function that got other values, so the edit is every statement that uses such a
value, up to the function that it is passed to. Where the twins share no source, the pair is not measured.
``--folder`` reads files ``*_bad.py`` with ``*_good.py`` next to them and a report of ``--trainloop-json``.
``--store`` keeps the counts by check for the table of docs/contributing/change-lines.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import inspect
import io
import json
import re
import sys
import textwrap
import time
import types
import warnings
import zlib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pytest_trainloop.instruments.tracing import syntax  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

KEPT = ROOT / "scripts" / "change_lines.json"
KINDS = ("right", "wrong", "missing", "not measured")

ORDERED = ("backward", "step", "zero_grad", "clip_grad", "unscale_", "update", "load_state_dict", "train", "eval")

Line = tuple[str, int]
Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Source(syntax.Source):
    """The syntax tree of a file, by lines and nodes."""

    def at(self, line: int, kinds: Any = Function) -> list[Any]:
        """The nodes of these kinds that begin at a line, with their decorators, or hold it."""
        return [n for n in ast.walk(self.tree) if isinstance(n, kinds) and _first(n) <= line <= n.end_lineno]

    def holding(self, node: ast.AST) -> ast.stmt | None:
        """The statement that a node is, or lies in."""
        return next((n for n in self.above(node) if isinstance(n, ast.stmt)), None)


source = cache(Source)


def _first(node: Any) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


class Edit:
    """The lines of the faulty loop that its repair touches."""

    def __init__(self) -> None:
        self.lines: set[Line] = set()
        self._seen: set[tuple[Any, ...]] = set()
        self._keys: dict[str, set[str]] = {}
        """What differs in a dict of options, by its name: ``**options``."""
        self._caller: Any = None

    def compare(self, faulty: Any, fixed: Any) -> None:
        """Note where two values that play one part differ."""
        if faulty is fixed or (id(faulty), id(fixed)) in self._seen:
            return
        self._seen.add((id(faulty), id(fixed)))
        if isinstance(faulty, functools.partial) or isinstance(fixed, functools.partial):
            one, other = (f.func if isinstance(f, functools.partial) else f for f in (faulty, fixed))
            self.compare(one, other)
            own = one.__init__ if isinstance(one, type) else one
            if one is other and isinstance(own, types.FunctionType):
                bound = [f if isinstance(f, functools.partial) else functools.partial(f) for f in (faulty, fixed)]
                values = [inspect.signature(one).bind_partial(*f.args, **f.keywords) for f in bound]
                for arguments in values:
                    arguments.apply_defaults()
                self._each(own, *(arguments.arguments for arguments in values), same=True)
            return
        faulty, fixed = getattr(faulty, "__func__", faulty), getattr(fixed, "__func__", fixed)
        if isinstance(faulty, types.FunctionType) and isinstance(fixed, types.FunctionType):
            self._functions(faulty, fixed)
        elif isinstance(faulty, (types.FunctionType, type)):
            self._sources(faulty, fixed if isinstance(fixed, (types.FunctionType, type)) else None)
            for name, one in vars(faulty).items() if isinstance(fixed, type) else ():
                one, other = (getattr(f, "__func__", f) for f in (one, vars(fixed).get(name)))
                if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
                    self._each(one, given(one), given(other), same=one.__code__ == other.__code__)
        elif isinstance(faulty, (list, tuple)) and isinstance(fixed, (list, tuple)):
            for one, other in zip(faulty, fixed, strict=False):
                self.compare(one, other)
            for one in faulty[len(fixed) :]:
                self.compare(one, None)
        elif isinstance(faulty, dict) and isinstance(fixed, dict):
            for name in faulty.keys() & fixed.keys():
                self.compare(faulty[name], fixed[name])

    def _functions(self, faulty: Any, fixed: Any) -> None:
        same = faulty.__code__ == fixed.__code__
        if not same:
            self._sources(faulty, fixed)
        ours, theirs = given(faulty), given(fixed)
        self._each(faulty, ours, theirs, same=same)
        if not same:
            mine, other = ([v for n, v in x.items() if n not in y] for x, y in ((ours, theirs), (theirs, ours)))
            for one, two in zip(mine, other, strict=False):
                self.compare(one, two)
            self._bodies(faulty, fixed)

    def _each(self, faulty: Any, ours: dict[str, Any], theirs: dict[str, Any], *, same: bool) -> None:
        """The values of one name in both."""
        for name in ours.keys() | theirs.keys():
            if name not in ours or name not in theirs or differ(ours[name], theirs[name]):
                one, other = ours.get(name), theirs.get(name)
                if isinstance(one, dict) and isinstance(other, dict):
                    changed = {k for k in one.keys() | other.keys() if k not in one or differ(one[k], other.get(k))}
                    self._keys.setdefault(name, set()).update(changed)
                    for key in one.keys() - other.keys():
                        self.compare(one[key], None)
                if same:
                    self._caller = faulty
                    self._uses(faulty.__code__, name)
                if name in ours and name in theirs:
                    self.compare(ours[name], theirs[name])

    def _bodies(self, faulty: Any, fixed: Any) -> None:
        """The calls of one function with other arguments, of two functions that differ in that."""
        mine, other = (_node(f) for f in (faulty, fixed))
        if mine is None or other is None:
            return
        theirs = [n for n in ast.walk(other[1]) if isinstance(n, ast.Call)]
        self._wrapped(faulty, mine[1], other[1])
        ours = [n for n in ast.walk(mine[1]) if isinstance(n, ast.Call)]
        names = [{ast.dump(n.func) for n in calls} for calls in (ours, theirs)]
        alone = [
            [n for n in calls if ast.dump(n.func) not in name] for calls, name in ((ours, names[1]), (theirs, names[0]))
        ]
        for call, same in zip(*alone, strict=False):  # one function in place of another
            values = _value(faulty, call.func), _value(fixed, same.func)
            if None not in values:
                self.compare(*values)
        for call in ours:
            if fixed is _value(faulty, call.func):  # what is the whole of the other one, with more arguments
                for near in getattr(mine[1], "body", ()) if isinstance(mine[1].body, list) else ():
                    self._add(mine[0].file, (near.lineno,))
                for keyword in call.keywords:
                    self._passed(mine[0], call, keyword.arg, faulty)
            same = next((n for n in theirs if ast.dump(n.func) == ast.dump(call.func)), None)
            if same is None:
                continue
            theirs.remove(same)
            for i, (one, two) in enumerate(zip(call.args, same.args, strict=False)):
                self._arguments(mine[0], call, i, (faulty, one), (fixed, two))
            named = {k.arg: k.value for k in same.keywords}
            for keyword in call.keywords:
                self._arguments(
                    mine[0], call, keyword.arg, (faulty, keyword.value), (fixed, named.pop(keyword.arg, None))
                )
            for name in named:
                self._passed(mine[0], call, name, faulty)
            for i in range(len(call.args), len(same.args)):
                self._passed(mine[0], call, i, faulty)

    def _wrapped(self, faulty: Any, mine: Any, other: Any) -> None:
        """Where the repair only changes the result of a function, ``1 - f(x)`` for ``f(x)``: what that returns."""
        for result in (n.body if isinstance(n, ast.Lambda) else n.value for n in _results(mine)):
            called = _value(faulty, result.func) if isinstance(result, ast.Call) else None
            inside = [n for r in _results(other) for n in ast.walk(r) if ast.dump(n) == ast.dump(result)]
            found = _node(called) if isinstance(called, types.FunctionType) and inside else None
            for returned in _results(found[1]) if found is not None else ():
                self._add(found[0].file, range(returned.lineno, returned.end_lineno + 1))

    def _arguments(self, within: Source, call: ast.Call, place: Any, mine: Any, other: Any) -> None:
        if other[1] is None or ast.dump(mine[1]) != ast.dump(other[1]):
            self._passed(within, call, place, mine[0])
            values = [_value(of, node) for of, node in (mine, other)]
            if None not in values:
                self.compare(*values)

    def _sources(self, faulty: Any, fixed: Any) -> None:
        """Two functions or classes of other source: the lines that differ."""
        mine, theirs = _lines(faulty), _lines(fixed)
        if mine is None:
            return
        file, first, text = mine
        if theirs is not None:
            self._moved_about(source(file).at(first), source(theirs[0]).at(theirs[1]), file)
        other = [] if theirs is None else theirs[2]
        text, other = (_plain(one) for one in (text, other))
        if text == other and isinstance(faulty, types.FunctionType) and faulty.__code__ != fixed.__code__:
            # two lambdas of one line
            self._add(file, range(first, first + len(text)))
        compared = difflib.SequenceMatcher(None, text, other, autojunk=False)
        for kind, a, b, c, d in compared.get_opcodes():
            if kind == "insert":
                if theirs is not None:
                    self._moved(source(file), first + a, source(theirs[0]), range(theirs[1] + c, theirs[1] + d))
                a, b = a - 1, a + 1
            if kind != "equal":
                self._add(file, range(first + a, first + b))

    def _moved_about(self, mine: list[Any], other: list[Any], file: str) -> None:
        """Statements that the repaired function has less often, or between other statements: which copy a comparison of
        lines takes for the changed one is an accident."""
        if not mine or not other:
            return
        ours, theirs = (_neighbours(max(nodes, key=_first)) for nodes in (mine, other))
        for text, places in ours.items():
            fewer = 0 < len(theirs.get(text, ())) < len(places)
            moved = len(places) == len(theirs.get(text, ())) == 1 and not any(
                a == b for a, b in zip(places[0][1:], theirs[text][0][1:], strict=True)
            )
            for statement, *_ in places if fewer or moved else ():
                self._add(file, (statement.lineno,))

    def _moved(self, within: Source, line: int, twin: Source, inserted: range) -> None:
        """Where else an inserted statement may be, up to one that uses its names or whose order counts."""
        new = [n for n in twin.at(inserted[0], ast.stmt) if n.lineno in inserted and n.end_lineno in inserted]
        after = next((n for n in within.at(line, ast.stmt) if n.lineno == line), None)
        block: Any = next((b for b in _blocks(within.parents.get(after)) if after in b), [])
        at = block.index(after) if block else 0
        self._slide(within, {name for n in new for name in _names(n)}, block[at:], block[:at][::-1])

    def _slide(self, within: Source, used: set[str], *sides: list[ast.stmt]) -> None:
        for near in sides if used else ():
            for statement in near:
                self._add(within.file, (statement.lineno,))
                if _ordered(statement) or any(_related(a, b) for a in used for b in _names(statement)):
                    break

    def _add(self, file: str, numbers: Iterable[int]) -> None:
        """These lines, each with the rest of its statement."""
        for number in numbers:
            self.lines.add((file, number))
            for node in source(file).at(number, ast.stmt):
                if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not hasattr(node, "body"):
                    self.lines.update((file, n) for n in range(node.lineno, node.end_lineno + 1))

    def _uses(self, code: types.CodeType, name: str) -> None:
        """Every use of a name that a function closes over."""
        within = source(code.co_filename)
        holding = [n for n in within.at(code.co_firstlineno) if name in _bound(n)]
        if holding:
            self._within(within, max(holding, key=_first), name)

    def _within(self, within: Source, node: ast.AST, name: str) -> None:
        if (within.file, node, name) in self._seen:
            return
        self._seen.add((within.file, node, name))
        for use in ast.walk(node):
            if isinstance(use, ast.Name) and use.id == name and isinstance(use.ctx, ast.Load):
                self._use(within, node, use)

    def _use(self, within: Source, scope: ast.AST, use: Any) -> None:
        statement = within.holding(use)
        if statement is None:
            return
        if isinstance(statement, (ast.If, ast.While, ast.For, ast.With)):
            header = statement.body[0].lineno - 1
            self._add(within.file, range(statement.lineno, max(header, statement.lineno) + 1))
            if isinstance(statement, ast.If):
                self._add(within.file, range(statement.lineno, statement.end_lineno + 1))
                for text, places in _neighbours(within.function(statement) or within.tree).items():
                    if text in [ast.unparse(n) for n in statement.body]:  # it is moved there
                        self._add(within.file, (one.lineno for one, *_ in places))
                self._around(within, statement)
                block = next((b for b in _blocks(within.parents[statement]) if statement in b), [])
                if isinstance(statement.body[-1], ast.Return):  # only one of the twins runs what is behind it
                    self._add(within.file, (n.lineno for n in block[block.index(statement) + 1 :]))
        elif not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            self._add(within.file, range(statement.lineno, statement.end_lineno + 1))
        for choice in (n for n in ast.walk(statement) if isinstance(n, ast.IfExp) and use in ast.walk(n.test)):
            either = [_definition(within, getattr(n, "id", ""))[1] for n in (choice.body, choice.orelse)]
            if all(isinstance(n, ast.FunctionDef) for n in either):
                self._alternatives(within, *either)
                self._alternatives(within, *either[::-1])
        parent = within.parents.get(use)
        called = isinstance(parent, ast.Call) and parent.func is use and isinstance(statement, ast.Expr)
        if called or any(isinstance(n, ast.IfExp) and use in ast.walk(n.test) for n in ast.walk(statement)):
            self._around(within, statement)  # one of the twins has more there
        if isinstance(parent, ast.Call) and parent.func is use:
            self._applied(within, parent)
        value = use
        while isinstance(parent, ast.IfExp):  # one of the two that a condition chooses
            value, parent = parent, within.parents.get(parent)
        while isinstance(parent, ast.Call) and value in parent.args and isinstance(parent.func, ast.Attribute):
            outer = within.parents.get(parent)  # what a library makes of it is another value as well
            if not isinstance(outer, (ast.Call, ast.keyword)):
                break
            value, parent = parent, outer
        keyword = parent if isinstance(parent, ast.keyword) else None
        call = within.parents.get(keyword) if keyword else parent
        if isinstance(call, ast.Call) and call.func is not use:
            options = self._keys.get(use.id, ()) if keyword and isinstance(use, ast.Name) else ()
            at = keyword.arg if keyword else call.args.index(value) if value in call.args else None
            for place in options if keyword and keyword.arg is None else (at,):
                self._passed(within, call, place)
        for target in _assigned(statement, use):
            if isinstance(target, ast.Name):
                self._within(within, scope, target.id)
            elif isinstance(target, ast.Attribute):
                self._attribute(within, target.attr)

    def _applied(self, within: Source, call: ast.Call) -> None:
        """The statement that makes what a function that differs is applied to, where nothing else reads it."""
        for given in (n for n in call.args if isinstance(n, ast.Name)):
            made = syntax.assignment_of(within, given)
            scope = within.function(made) if isinstance(made, ast.Assign) else None
            names = [n for n in ast.walk(scope or call) if isinstance(n, ast.Name) and n.id == given.id]
            if scope is not None and scope is within.function(call) and len(names) == 2:
                self._add(within.file, (made.lineno,))

    def _alternatives(self, within: Source, faulty: Any, fixed: Any) -> None:
        """The lines of one of two functions of a file that the other one has not, or that its own stand next to."""
        lines = Path(within.file).read_text(encoding="utf-8").splitlines()
        texts = [_plain(lines[n.lineno - 1 : n.end_lineno]) for n in (faulty, fixed)]
        for kind, a, b, _, _ in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
            if kind != "equal":
                near = (a - 1, a + 1) if kind == "insert" else (a, b)
                self._add(within.file, range(faulty.lineno + near[0], faulty.lineno + near[1]))

    def _around(self, within: Source, statement: ast.stmt) -> None:
        """The neighbours of a statement that only one of the two loops runs."""
        parent: Any = within.parents[statement]
        for block in _blocks(parent):
            if statement in block:
                at = block.index(statement)
                for near in block[max(at - 1, 0) : at + 2]:
                    self._add(within.file, (near.lineno,))
                if at and not isinstance(block[at - 1], Function):
                    self._add(within.file, (block[at - 1].end_lineno or 0,))
                own = statement.body if isinstance(statement, ast.If) and not statement.orelse else []
                self._slide(within, {name for n in own for name in _names(n)}, block[at + 1 :], block[:at][::-1])
                if at in (0, len(block) - 1) and hasattr(parent, "lineno"):
                    self._add(within.file, (parent.lineno,))

    def _passed(self, within: Source, call: ast.Call, place: str | int | None, caller: Any = None) -> None:
        """The same in a function of the tests that is given the value."""
        value = None if caller is None else _value(caller, call.func)
        if (
            caller is not None and getattr(call.func, "attr", "") == "apply"
        ):  # of a function of autograd, without its ctx
            value = getattr(_value(caller, call.func.value), "forward", None)
            place = place + 1 if isinstance(place, int) else place
        if isinstance(value, functools.partial):
            place = place + len(value.args) if isinstance(place, int) else place
            value = value.func
        if isinstance(value, type):
            place = place + 1 if isinstance(place, int) else place
            value = value.__init__
        if isinstance(value, types.FunctionType):
            where, node = _node(value) or (within, None)
        else:
            where, node = _definition(within, call.func.id if isinstance(call.func, ast.Name) else "")
            if node is None and value is None and _value(self._caller, call.func) is not None:
                self._passed(within, call, place, self._caller)
                return
        if node is None or place is None:
            return
        if isinstance(node, ast.ClassDef):
            node = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
            place = place + 1 if isinstance(place, int) else place
        if node is None:
            return
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        name = place if isinstance(place, str) else names[place] if place < len(names) else ""
        if name in _bound(node):
            self._within(where, node, name)
        elif name and node.args.kwarg is not None:
            self._keys.setdefault(node.args.kwarg.arg, set()).add(name)
            self._within(where, node, node.args.kwarg.arg)

    def _attribute(self, within: Source, name: str) -> None:
        if (within.file, name) in self._seen:
            return
        self._seen.add((within.file, name))
        for use in ast.walk(within.tree):
            if isinstance(use, ast.Attribute) and use.attr == name and isinstance(use.ctx, ast.Load):
                self._use(within, within.tree, use)


def _plain(text: list[str]) -> list[str]:
    """The lines of a function or class without its indentation and its name."""
    whole = textwrap.dedent("\n".join(t.rstrip() for t in text))
    return re.sub(r"^((async )?def|class) \w+", r"\1 _", whole, count=1, flags=re.MULTILINE).split("\n")


def _blocks(parent: Any) -> list[list[ast.stmt]]:
    found = (getattr(parent, part, None) for part in ("body", "orelse", "finalbody"))
    return [block for block in found if isinstance(block, list)]


def _results(function: Any) -> list[Any]:
    """What gives the result of a function: its ``return`` statements, or a lambda itself."""
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
    return [function] if isinstance(function, ast.Lambda) else returns


def _neighbours(function: Any) -> dict[str, list[tuple[Any, str, str]]]:
    """The plain statements of a function by their text, each with that of the ones before and after it in its block."""
    found: dict[str, list[tuple[Any, str, str]]] = {}
    for block in (b for node in ast.walk(function) for b in _blocks(node)):
        texts = ["", *(ast.unparse(n).partition("\n")[0] for n in block), ""]
        for i, statement in enumerate(block):
            if not hasattr(statement, "body") and not isinstance(statement, ast.Return):
                found.setdefault(texts[i + 1], []).append((statement, texts[i], texts[i + 2]))
    return found


def _names(node: ast.AST) -> set[str]:
    """The variables that a statement uses, with the first attribute of each: ``self.optimizer``."""
    held = {n.value: n for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    called = {n.func for n in ast.walk(node) if isinstance(n, ast.Call)}
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return {f"{n.id}.{held[n].attr}" if n in held and held[n] not in called else n.id for n in names}


def _related(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _ordered(statement: ast.stmt) -> bool:
    """Whether a statement calls what reads or writes weights and gradients in order."""
    calls = (n.func for n in ast.walk(statement) if isinstance(n, ast.Call))
    return any(getattr(f, "attr", getattr(f, "id", "")).startswith(ORDERED) for f in calls)


def _assigned(statement: ast.stmt, use: ast.AST) -> list[ast.expr]:
    """What a statement assigns a value to, unchanged or chosen by it."""
    if not isinstance(statement, ast.Assign):
        return []
    value, targets = statement.value, list(statement.targets)
    if isinstance(value, ast.Tuple) and isinstance(targets[0], ast.Tuple) and use in value.elts:
        return [targets[0].elts[value.elts.index(use)]]
    return targets if value is use or _chooses(value, use) else []


def _chooses(value: ast.expr, use: ast.AST) -> bool:
    """Whether a value is chosen by a name, or is a condition that has it."""
    condition = isinstance(value, (ast.BoolOp, ast.Compare)) or (
        isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    )
    chosen = any(isinstance(n, ast.IfExp) and use in ast.walk(n.test) for n in ast.walk(value))
    return chosen or (condition and use in ast.walk(value))


def _bound(node: Any) -> set[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    found = {a.arg for a in every if a is not None}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
        elif isinstance(inner, ast.FunctionDef):
            found.add(inner.name)
    return found


def _definition(within: Source, name: str, depth: int = 3) -> tuple[Source, Any]:
    """The function or class of the tests that a name means."""
    for node in ast.walk(within.tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return within, node
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests") and depth:
            file = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
            if any((a.asname or a.name) == name for a in node.names) and file.is_file():
                return _definition(source(str(file)), name, depth - 1)
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


def _node(function: Any) -> tuple[Source, Any] | None:
    """The syntax tree of a function of the tests."""
    code = getattr(function, "__code__", None)
    if code is None or not Path(code.co_filename).is_relative_to(ROOT / "tests"):
        return None
    within = source(code.co_filename)
    kind = ast.Lambda if function.__name__ == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [n for n in within.at(code.co_firstlineno, kind) if _first(n) == code.co_firstlineno]
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


def _value(function: Any, node: ast.AST | None) -> Any:
    """The function or class that a name of a function's means."""
    if not isinstance(node, ast.Name) or not isinstance(function, types.FunctionType):
        return None
    return given(function).get(node.id, function.__globals__.get(node.id))


def _lines(thing: Any) -> tuple[str, int, list[str]] | None:
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


def edited(faulty: Any, fixed: Any) -> set[Line]:
    edit = Edit()
    edit.compare(faulty, fixed)
    return edit.lines


def place(text: str) -> tuple[str, int]:
    """File and line of a ``file:line   source``."""
    file, _, number = text.partition("   ")[0].rpartition(":")
    return file, int(number) if number.isdigit() else 0


def judged(findings: Iterable[Any], edit: set[Line], root: Path) -> tuple[str, str]:
    """Of the findings of one cause the best line, and the line."""
    found = []
    for finding in findings:
        file, number = place(finding["change"])
        if not finding["change"]:
            found.append(("missing", ""))
        elif not edit:
            found.append(("not measured", finding["change"]))
        else:
            hit = any(n == number and (Path(f) == root / file or Path(f).name == file) for f, n in edit)
            found.append(("right" if hit else "wrong", finding["change"]))
    return min(found, key=lambda one: KINDS.index(one[0]), default=("", ""))


def of_pairs(given: argparse.Namespace) -> Iterator[tuple[str, str, str, str, bool, str]]:
    """Of each pair: its check, cause and name, whether the line is right, whether a repair was tried, and the line."""
    import torch

    from pytest_trainloop import check_loss
    from tests.loops.corpus import PAIRS
    from tests.loops.corpus import judged as judge
    from tests.losses.corpus import PAIRS as LOSSES

    torch.set_num_threads(1)
    began = time.monotonic()
    index, count = map(int, given.share.split("/"))

    def asked(name: str, check: str) -> bool:
        chosen = not given.only or check in given.only.split(",")
        return chosen and given.k in name and zlib.crc32(name.encode()) % count == index

    jobs: list[tuple[Any, Callable[[], Any], tuple[Any, Any]]] = [
        (p, lambda p=p: judge(p, p.faulty, only=[p.check]), (p.faulty, p.fixed))
        for p in PAIRS.values()
        if asked(p.name, p.check)
    ]
    jobs += [
        (p, lambda p=p: check_loss(p.faulty, only=[p.check], raises=False), (p.faulty.criterion, p.fixed.criterion))
        for p in LOSSES.values()
        if asked(p.name, p.check)
    ]
    for pair, run, twins in jobs:
        if given.minutes and time.monotonic() - began > 60 * given.minutes:
            break
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            report = run()
        every = [f.to_json() for r in report.results for f in r.findings]
        mine = [f for f in every if f["check"] == pair.check and f["cause"] == pair.cause]
        kind, line = judged(mine, edited(*twins), Path.cwd())
        yield pair.check, pair.cause, pair.name, kind, any(f["tried"] for f in mine), line


def of_folder(folder: Path, report: Path) -> Iterator[tuple[str, str, str, str, bool, str]]:
    """The same of files ``*_bad.py``, of every fault that no other one explains."""
    for loop in json.loads(report.read_text(encoding="utf-8"))["loops"]:
        bad = folder / loop["nodeid"].partition("::")[0]
        good = bad.with_name(bad.name.replace("_bad", "_good"))
        if bad == good or not good.is_file():
            continue
        ours, theirs = (file.read_text(encoding="utf-8").splitlines() for file in (bad, good))
        edit = Edit()
        for kind, a, b, _, _ in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            if kind != "equal":
                edit._add(str(bad), range(a, a + 2) if kind == "insert" else range(a + 1, b + 1))
        faults = [f for c in loop["checks"] for f in c["findings"] if f["level"] == "fault"]
        explained = {e for f in faults for e in f["explains"]}
        for fault in faults:
            if fault["check"] not in explained and f"{fault['check']}:{fault['cause']}" not in explained:
                kind, line = judged([fault], edit.lines, folder)
                yield fault["check"], fault["cause"], bad.name, kind, bool(fault["tried"]), line


def table(kept: dict[str, dict[str, int]]) -> str:
    """The counts by check as a table."""
    head = "| check | pairs | right | wrong | no line | not measured | repair tried |\n|---|---|---|---|---|---|---|\n"
    rows = sorted(kept.items(), key=lambda row: (-row[1].get("wrong", 0) - row[1].get("missing", 0), row[0]))
    total: Counter[str] = Counter()
    for _, counted in rows:
        total.update(counted)
    parts = ("pairs", *KINDS, "tried")
    lines = [f"| `{check}` | " + " | ".join(str(of.get(p, 0)) for p in parts) + " |" for check, of in rows]
    whole = "| **all** | " + " | ".join(str(total[p]) for p in parts) + " |"
    return head + "\n".join([*lines, whole]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only pairs whose name contains this")
    parser.add_argument("--only", default="", help="checks, separated by commas")
    parser.add_argument("--share", default="0/1", help="I/N: one of N equal parts")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many")
    parser.add_argument("--show", action="store_true", help="a line for each pair")
    parser.add_argument("--store", action="store_true", help=f"write the counts to {KEPT.name}")
    parser.add_argument("--folder", nargs=2, type=Path, metavar=("FOLDER", "REPORT"))
    given = parser.parse_args()
    counted: dict[str, Counter[str]] = {}
    for check, cause, name, kind, tried, line in of_folder(*given.folder) if given.folder else of_pairs(given):
        if given.show:
            print(f"{kind or 'not found':12} {check} {cause} {name}: {line}", flush=True)
        if kind:
            counted.setdefault(check, Counter()).update(["pairs", kind, *(["tried"] if tried else [])])
    kept = {check: dict(of) for check, of in sorted(counted.items())}
    if given.store:
        before = json.loads(KEPT.read_text(encoding="utf-8")) if given.only and KEPT.is_file() else {}
        KEPT.write_text(json.dumps(before | kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(table(kept))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
