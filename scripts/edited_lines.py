"""The lines of a faulty loop that its repair touches: see docs/contributing/change-lines.md."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.instruments.tracing import syntax
from scripts.twin_nodes import (
    Function,
    Source,
    assigned_to,
    blocks_of,
    bound_in,
    builtin_calls,
    default_of,
    definition_of,
    differ,
    first_line,
    given,
    is_ordered,
    iterated_by,
    lines_of,
    names_in,
    neighbours_of,
    node_of,
    only_adds,
    parameter_of,
    plain_lines,
    related,
    results_of,
    source,
    targets_of,
    value_of,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

Line = tuple[str, int]


class Edit:
    """The lines of the faulty loop that its repair touches."""

    def __init__(self) -> None:
        self.lines: set[Line] = set()
        self._seen: set[tuple[Any, ...]] = set()
        self._keys: dict[str, set[str]] = {}
        """What differs in a dict of options, by its name: ``**options``."""
        self._caller: Any = None
        self._codes: list[types.CodeType] = []  # of the faulty functions that were compared, and were given to them
        self._adding: set[str] = set()  # names of functions to whose result the repair only adds

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
            if isinstance(faulty, type) and isinstance(fixed, type):
                self._members(faulty, fixed)
            elif isinstance(faulty, types.FunctionType) and (mine := node_of(faulty)) is not None:
                self._whole(mine, faulty, fixed)
        elif isinstance(faulty, (list, tuple)) and isinstance(fixed, (list, tuple)):
            for one, other in zip(faulty, fixed, strict=False):
                self.compare(one, other)
            for one in faulty[len(fixed) :]:
                self.compare(one, None)
        elif isinstance(faulty, dict) and isinstance(fixed, dict):
            for name in faulty.keys() & fixed.keys():
                self.compare(faulty[name], fixed[name])

    def _members(self, faulty: type, fixed: type) -> None:
        """The methods of two classes, also those that only one of them inherits, and the values in their bodies."""
        for name in vars(faulty).keys() | vars(fixed).keys():
            one, other = (inspect.getattr_static(kind, name, None) for kind in (faulty, fixed))
            one, other = (getattr(f, "__func__", f) for f in (one, other))
            if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
                one, other = inspect.unwrap(one), inspect.unwrap(other)
                self._each(one, given(one), given(other), same=one.__code__ == other.__code__)
                if name not in vars(faulty):
                    self._sources(one, other)
            elif isinstance(one, (bool, int, float, str)) and not name.startswith("__") and one != other:
                for lines in filter(None, map(lines_of, faulty.__mro__)):
                    self._attribute(source(lines[0]), name)

    def _functions(self, faulty: Any, fixed: Any) -> None:
        same = faulty.__code__ == fixed.__code__
        if not same:
            self._sources(faulty, fixed)
        ours, theirs = given(faulty), given(fixed)
        self._codes += [f.__code__ for f in (faulty, *ours.values()) if isinstance(f, types.FunctionType)]
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
                    if only_adds(*(node_of(f) for f in (one, other))):
                        self._adding.add(name)
                    self._uses(faulty.__code__, name)
                if name in ours and name in theirs:
                    self.compare(ours[name], theirs[name])

    def _bodies(self, faulty: Any, fixed: Any) -> None:
        """The calls of one function with other arguments, of two functions that differ in that."""
        mine, other = (node_of(f) for f in (faulty, fixed))
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
            values = value_of(faulty, call.func), value_of(fixed, same.func)
            if None not in values:
                self.compare(*values)
        self._whole(mine, faulty, fixed)
        self._around_whole(mine, other, faulty, fixed)
        for call in ours:
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
            for i in range(len(same.args), len(call.args)):
                self._arguments(mine[0], call, i, (faulty, call.args[i]), (fixed, None))

    def _whole(self, mine: tuple[Source, Any], faulty: Any, fixed: Any) -> None:
        """Where the faulty function is the whole of the repaired one, with more arguments or another result."""
        for call in (n for n in ast.walk(mine[1]) if isinstance(n, ast.Call)):
            made = value_of(faulty, getattr(call.func, "func", None))
            inner = f"{getattr(made, '__qualname__', '')}.<locals>."
            if fixed is value_of(faulty, call.func) or (made and getattr(fixed, "__qualname__", "").startswith(inner)):
                for near in mine[1].body if isinstance(mine[1].body, list) else ():
                    self._add(mine[0].file, (near.lineno,))
                for keyword in call.keywords:
                    self._passed(mine[0], call, keyword.arg, faulty)
                for name in self._left_out(fixed, call):
                    self._passed(mine[0], call, name, faulty)
                found = node_of(fixed) if any(call in ast.walk(r) for r in values_of(mine[1])) else None
                for returned in results_of(found[1]) if found is not None else ():
                    self._add(found[0].file, range(returned.lineno, returned.end_lineno + 1))

    def _left_out(self, fixed: Any, call: ast.Call) -> list[str]:
        """The parameters with a default that a call of a function leaves out."""
        named = list(inspect.signature(fixed).parameters.values()) if isinstance(fixed, types.FunctionType) else []
        given = {k.arg for k in call.keywords}
        return [p.name for p in named[len(call.args) :] if p.default is not p.empty and p.name not in given]

    def _around_whole(self, mine: tuple[Source, Any], other: tuple[Source, Any], faulty: Any, fixed: Any) -> None:
        """Where the repaired function is the whole of the faulty one and does more before or after it."""
        body, theirs = (n[1].body if isinstance(n[1].body, list) else [] for n in (mine, other))
        calls = [n for n in ast.walk(other[1]) if isinstance(n, ast.Call) and value_of(fixed, n.func) is faulty]
        for i, statement in enumerate(theirs if body else ()):
            if any(call in ast.walk(statement) for call in calls):
                ends = [body[0]] * (i > 0) + [body[-1]] * (i + 1 < len(theirs))
                self._add(mine[0].file, (n.lineno for n in ends))

    def _wrapped(self, faulty: Any, mine: Any, other: Any) -> None:
        """Where the repair only changes the result of a function, ``1 - f(x)`` for ``f(x)``: what that returns."""
        for result in values_of(mine):
            called = value_of(faulty, result.func) if isinstance(result, ast.Call) else None
            inside = [n for r in results_of(other) for n in ast.walk(r) if ast.dump(n) == ast.dump(result)]
            found = node_of(called) if isinstance(called, types.FunctionType) and inside else None
            for returned in results_of(found[1]) if found is not None else ():
                self._add(found[0].file, range(returned.lineno, returned.end_lineno + 1))

    def _arguments(self, within: Source, call: ast.Call, place: Any, mine: Any, other: Any) -> None:
        if other[1] is None or ast.dump(mine[1]) != ast.dump(other[1]):
            values = [value_of(of, node) for of, node in (mine, other)]
            if other[1] is None:
                values[1] = default_of(value_of(mine[0], call.func), place)
            lambdas = [
                (within, n) if isinstance(n, ast.Lambda) else node_of(v)
                for n, v in zip((mine[1], other[1]), values, strict=True)
            ]
            self._passed(within, call, place, mine[0], adds=only_adds(*lambdas))
            if None not in values:
                self.compare(*values)
            elif (
                isinstance(other[1], ast.Lambda)
                and isinstance(values[0], types.FunctionType)
                and values[0].__name__ not in {n.id for n in ast.walk(other[1]) if isinstance(n, ast.Name)}
            ):
                self._sources(values[0], None)

    def _sources(self, faulty: Any, fixed: Any) -> None:
        """Two functions or classes of other source: the lines that differ."""
        mine, theirs = lines_of(faulty), lines_of(fixed)
        if mine is None:
            return
        file, first, text = mine
        if theirs is not None:
            self._moved_about(source(file).at(first), source(theirs[0]).at(theirs[1]), file)
        other = [] if theirs is None else theirs[2]
        text, other = (plain_lines(one) for one in (text, other))
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
            if kind == "replace" and theirs is not None:
                self._left_behind(source(file), first + b, source(theirs[0]), range(theirs[1] + c, theirs[1] + d))

    def _moved_about(self, mine: list[Any], other: list[Any], file: str) -> None:
        """Statements that the repaired function has less often, or between other statements: which copy a comparison of
        lines takes for the changed one is an accident."""
        if not mine or not other:
            return
        ours, theirs = (neighbours_of(max(nodes, key=first_line)) for nodes in (mine, other))
        for text, places in ours.items():
            fewer = 0 < len(theirs.get(text, ())) < len(places)
            moved = bool(text in theirs) and {p[-1] for p in places}.isdisjoint(p[-1] for p in theirs[text])
            if len(places) == len(theirs.get(text, ())) == 1:
                near = zip(places[0][1:3], theirs[text][0][1:3], strict=True)
                moved = moved or not any(a == b for a, b in near)
            for statement, *_ in places if fewer or moved else ():
                self._add(file, (statement.lineno,))

    def _moved(self, within: Source, line: int, twin: Source, inserted: range) -> None:
        """Where else an inserted statement may be, up to one that uses its names or whose order counts."""
        new = [n for n in twin.at(inserted[0], ast.stmt) if n.lineno in inserted and n.end_lineno in inserted]
        after = next((n for n in within.at(line, ast.stmt) if n.lineno == line), None)
        block: Any = next((b for b in blocks_of(within.parents.get(after)) if after in b), [])
        at = block.index(after) if block else 0
        self._slide(within, {name for n in new for name in names_in(n)}, block[at:], block[:at][::-1])
        self._left_behind(within, line, twin, inserted)

    def _left_behind(self, within: Source, line: int, twin: Source, new: range) -> None:
        """What only the faulty function runs: behind a ``return`` that the repaired one has before it."""
        returns = [n for n in ast.walk(twin.tree) if isinstance(n, ast.Return) and n.lineno in new]
        after = next((n for n in within.at(line, ast.stmt) if n.lineno == line), None)
        block: Any = next((b for b in blocks_of(within.parents.get(after)) if after in b), [])
        self._add(within.file, (n.lineno for n in block[block.index(after) if block else 0 :] if returns))

    def _set_again(self, within: Source, statement: ast.stmt) -> None:
        """The same call of one object with another argument in the same block: which comes last decides."""
        call: Any = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and len(call.args) == 1 and isinstance(call.func, ast.Attribute):
            block = next((b for b in blocks_of(within.parents.get(statement)) if statement in b), [])
            for other in (n.value for n in block if isinstance(n, ast.Expr)):
                if isinstance(other, ast.Call) and ast.dump(other.func) == ast.dump(call.func):
                    self._add(within.file, (other.lineno,))

    def _scheduled(self, moved: ast.If) -> None:
        """What builds a schedule, where the repair calls it in another loop: it may count in the other unit instead."""
        called = [n.func for n in ast.walk(moved) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "step"]
        if any("sched" in getattr(f.value, "id", "") for f in called):  # type: ignore[attr-defined]
            for code in self._codes:
                within = source(code.co_filename)
                last = max((n.end_lineno for n in within.at(code.co_firstlineno)), default=code.co_firstlineno)
                built = (
                    n
                    for n in ast.walk(within.tree)
                    if isinstance(n, ast.Call) and "lr_scheduler." in ast.unparse(n.func)
                )
                self._add(within.file, (n.lineno for n in built if code.co_firstlineno <= n.lineno <= last))

    def _undone(self, within: Source, inserted: ast.If) -> None:
        """What makes a value that only the inserted statements read, and what writes in place to one that they copy."""
        scope = within.function(inserted)
        names = [n for n in ast.walk(scope or inserted) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        inside = {n for n in names if n in ast.walk(inserted)}
        for name in {n.id for n in inside} if scope is not None else ():
            made = [n for n in ast.walk(scope) if isinstance(n, ast.Assign) and name in targets_of(n)]
            if {n for n in names if n.id == name} <= inside:
                self._add(within.file, (n.lineno for n in made if n not in ast.walk(inserted)))
        for copied in (n for n in inserted.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)):
            if getattr(copied.value.func, "attr", "") in ("clone", "copy", "deepcopy"):  # type: ignore[attr-defined]
                writes = [n for n in ast.walk(scope or inserted) if isinstance(n, ast.Assign)]
                into = [n for n in writes if any(isinstance(t, ast.Subscript) and
                        getattr(t.value, "id", "") in targets_of(copied) for t in n.targets)]  # fmt: skip
                self._add(within.file, (n.lineno for n in into))

    def _sorts(self, within: Source, new: list[ast.stmt], block: list[ast.stmt]) -> None:
        """A call of a builtin function that the repair makes as well, on another value and with the same options."""
        kinds = {kind for n in new for kind in builtin_calls(n)}
        self._add(within.file, (n.lineno for n in block if kinds & builtin_calls(n)))

    def _slide(self, within: Source, used: set[str], *sides: list[ast.stmt]) -> None:
        for near in sides if used else ():
            for statement in near:
                self._add(within.file, (statement.lineno,))
                if is_ordered(statement) or any(related(a, b) for a in used for b in names_in(statement)):
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
        holding = [n for n in within.at(code.co_firstlineno) if name in bound_in(n)]
        if holding:
            self._within(within, max(holding, key=first_line), name)

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
                for text, places in neighbours_of(within.function(statement) or within.tree).items():
                    if text in [ast.unparse(n) for n in statement.body]:  # it is moved there
                        self._add(within.file, (one.lineno for one, *_ in places))
                self._around(within, statement)
                block = next((b for b in blocks_of(within.parents[statement]) if statement in b), [])
                self._sorts(within, statement.body, block)
                self._undone(within, statement)
                self._scheduled(statement)
                if isinstance(statement.body[-1], ast.Return):  # only one of the twins runs what is behind it
                    self._add(within.file, (n.lineno for n in block[block.index(statement) + 1 :]))
                function = within.parents[statement]
                if isinstance(function, ast.FunctionDef) and function.body == [statement]:  # a whole function
                    self._attribute(within, function.name)
                    self._within(within, within.function(function) or within.tree, function.name)
        elif not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            self._add(within.file, range(statement.lineno, statement.end_lineno + 1))
            self._set_again(within, statement)
        for choice in (n for n in ast.walk(statement) if isinstance(n, ast.IfExp) and use in ast.walk(n.test)):
            either = [definition_of(within, getattr(n, "id", ""), near=choice)[1] for n in (choice.body, choice.orelse)]
            if all(isinstance(n, ast.FunctionDef) for n in either):
                self._alternatives(within, *either)
                self._alternatives(within, *either[::-1])
        parent = within.parents.get(use)
        called = isinstance(parent, ast.Call) and parent.func is use and isinstance(statement, ast.Expr)
        if called or any(isinstance(n, ast.IfExp) and use in ast.walk(n.test) for n in ast.walk(statement)):
            self._around(within, statement)  # one of the twins has more there
        if isinstance(parent, ast.Call) and parent.func is use:
            self._applied(within, parent)
            if getattr(use, "id", getattr(use, "attr", "")) in self._adding:
                self._read_next(within, statement, parent)
                if isinstance(outer := within.parents.get(parent), ast.Call) and parent in outer.args:
                    self._passed(within, outer, outer.args.index(parent), self._caller)
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
        for target in (*assigned_to(statement, use), *iterated_by(statement, use)):
            if isinstance(target, ast.Name):
                self._within(within, scope, target.id)
            elif isinstance(target, ast.Attribute):
                self._attribute(within, target.attr)

    def _read_next(self, within: Source, statement: Any, made: ast.AST) -> None:
        """The only statement that reads a result to which the repair only adds."""
        scope = within.function(statement)
        values = getattr(statement, "value", None)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(values, ast.Tuple) and targets and isinstance(targets[0], ast.Tuple):
            targets = [t for t, v in zip(targets[0].elts, values.elts, strict=False) if made in ast.walk(v)]
        for name in (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)):
            reads = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name] if scope else []
            holding = {within.holding(n) for n in reads if isinstance(n.ctx, ast.Load)}
            written = {within.holding(n) for n in reads if isinstance(n.ctx, ast.Store)} - holding
            if len(holding) == 1 and (written == {statement} or len(written) == 0):
                self._add(within.file, (n.lineno for n in holding if n is not None))

    def _applied(self, within: Source, call: ast.Call) -> None:
        """The statement that makes what a function that differs is applied to, where nothing else reads it."""
        for one in (n for n in call.args if isinstance(n, ast.Name)):
            made = syntax.assignment_of(within, one)
            scope = within.function(made) if isinstance(made, ast.Assign) else None
            names = [n for n in ast.walk(scope or call) if isinstance(n, ast.Name) and n.id == one.id]
            if scope is not None and scope is within.function(call) and len(names) == 2:
                self._add(within.file, (made.lineno,))

    def _alternatives(self, within: Source, faulty: Any, fixed: Any) -> None:
        """The lines of one of two functions of a file that the other one has not, or that its own stand next to."""
        lines = Path(within.file).read_text(encoding="utf-8").splitlines()
        texts = [plain_lines(lines[n.lineno - 1 : n.end_lineno]) for n in (faulty, fixed)]
        for kind, a, b, _, _ in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
            if kind != "equal":
                near = (a - 1, a + 1) if kind == "insert" else (a, b)
                self._add(within.file, range(faulty.lineno + near[0], faulty.lineno + near[1]))

    def _around(self, within: Source, statement: ast.stmt) -> None:
        """The neighbours of a statement that only one of the two loops runs."""
        parent: Any = within.parents[statement]
        for block in blocks_of(parent):
            if statement in block:
                at = block.index(statement)
                for near in block[max(at - 1, 0) : at + 2]:
                    self._add(within.file, (near.lineno,))
                if at and not isinstance(block[at - 1], Function):
                    self._add(within.file, (block[at - 1].end_lineno or 0,))
                own = statement.body if isinstance(statement, ast.If) and not statement.orelse else []
                self._slide(within, {name for n in own for name in names_in(n)}, block[at + 1 :], block[:at][::-1])
                if isinstance(parent, (ast.For, ast.While)) and at == 0:  # the end of a loop is before its beginning
                    self._slide(within, {name for n in own or [statement] for name in names_in(n)}, block[:0:-1])
                if at in (0, len(block) - 1) and hasattr(parent, "lineno"):
                    self._add(within.file, (parent.lineno,))

    def _passed(
        self, within: Source, call: ast.Call, place: str | int | None, caller: Any = None, *, adds: bool = False
    ) -> None:
        """The same in a function of the tests that is given the value."""
        found = parameter_of(within, call, place, caller)
        if found is None and value_of(self._caller, call.func) is not None:
            found = parameter_of(within, call, place, self._caller)
        if found is None:
            return
        where, node, name = found
        if adds:
            self._adding.add(name)
        if name in bound_in(node):
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
