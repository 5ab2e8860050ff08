"""Statements of the project that look like a slip, each with the statement that was probably intended.

They are read from the source of the modules that the loop's function refers to. Nothing is said of them here: the loop
is run with the other statement.
"""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import linecache
import sys
import types
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.wiring.no_typos.edited_source import PREFIX
from pytest_trainloop.core.places import code_of
from pytest_trainloop.instruments.tracing.call_expressions import called_name, unpacks
from pytest_trainloop.instruments.tracing.syntax import FUNCTIONS, parameters_of, source_of
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.instruments.tracing.syntax import Source

MOST_FILES = 60
"""Files of the project that are read."""

KEPT, CALLED, SET = f"{PREFIX}kept", f"{PREFIX}called", f"{PREFIX}set"

LIKE = 0.85
"""Similarity to ``requires_grad`` from which an attribute is taken for it."""

_COPIES = frozenset(
    "masked_fill masked_scatter index_fill index_add index_copy scatter scatter_add where clamp clip clamp_min "
    "clamp_max flip fliplr flipud roll tril triu mul div neg abs sqrt exp round softmax log_softmax sigmoid tanh relu "
    "detach nan_to_num rot90 cumsum renorm transpose rotate filter".split()
)
"""Methods of tensors, arrays and images that return a changed copy."""

_ARRAYS = frozenset("numpy torch torchvision torchaudio PIL cv2 scipy skimage kornia".split())
"""Libraries whose functions give changed copies; others, as of logging and plotting, are called for what they do."""

_EFFECTS = frozenset("random cuda dist distributed utils init autograd backends testing save manual_seed".split())
"""Parts of such a function's name behind which a call does something."""

_PLACES = (ast.Name, ast.Attribute, ast.Subscript)

_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)

_TURNED = ("swap", "reverse", "revers", "flip", "invers", "mirror", "symmetr", "transpose", "back", "cycle")


@dataclass(frozen=True)
class Slip:
    """One statement, and the one that was probably intended; ``run`` is what is run in its place, ``text`` is shown."""

    cause: str
    source: Source
    statement: ast.stmt
    run: ast.stmt
    text: str
    names: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)


def slips(make: Any) -> Iterator[Slip]:
    """Those in functions of the files that a loop's function refers to."""
    sources = [source_of(file) for file in _files(make)]
    functions = _Functions(sources)
    for source in sources:
        for node in (n for n in source.parents if isinstance(n, _SIMPLE)):
            found = [*functions.arguments_swapped(source, node), *_repeated(source, node)]
            if isinstance(node, ast.Expr):
                found += _without_effect(source, node)
            elif isinstance(node, ast.Assign):
                found += [*_assigned(source, node), *functions.results_swapped(source, node)]
            yield from (slip for slip in found if source.function(node) is not None)


def _files(make: Any) -> list[str]:
    """The project's files that hold the function, what its globals refer to, and so on."""
    code = code_of(make)
    start = [m for m in list(sys.modules.values()) if code and getattr(m, "__file__", None) == code.co_filename]
    todo, known = start, set(map(id, start))
    found: list[str] = []
    while todo and len(found) < MOST_FILES:
        module = todo.pop(0)
        file = getattr(module, "__file__", None) or ""
        if layer(file or "<frozen>") != 2:
            continue
        found.append(file)
        for value in list(vars(module).values()):
            other = value if isinstance(value, types.ModuleType) else sys.modules.get(_module_of(value))
            if other is not None and id(other) not in known:
                known.add(id(other))
                todo.append(other)
    return found


def _module_of(value: Any) -> str:
    plain = isinstance(value, (type, types.FunctionType))
    name = getattr(value if plain else type(value), "__module__", "")
    return name if isinstance(name, str) else ""


@functools.lru_cache(maxsize=64)
def _libraries(source: Source) -> frozenset[str]:
    """The names by which a file calls modules and functions of ``_ARRAYS``."""
    names = set[str]()
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            origin = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if (origin or alias.name).partition(".")[0] in _ARRAYS and not getattr(node, "level", 0):
                    names.add(alias.asname or alias.name.partition(".")[0])
    return frozenset(names)


def _without_effect(source: Source, node: ast.Expr) -> Iterator[Slip]:
    """A statement whose value is lost: a copy, a method without its parentheses, a comparison."""
    value = node.value
    if isinstance(value, ast.Attribute):
        called = ast.Call(_name(CALLED), [value], [])
        yield Slip("method_not_called", source, node, ast.Expr(called), f"{ast.unparse(value)}()", (value.attr,))
    elif isinstance(value, ast.Compare) and isinstance(value.ops[0], ast.Eq) and len(value.ops) == 1:
        if isinstance(value.left, (ast.Attribute, ast.Subscript)):
            assigned = ast.Assign([_stored(value.left)], value.comparators[0])
            yield Slip("comparison_as_statement", source, node, assigned, _shown(assigned), (_shown(value.left),))
    elif isinstance(value, ast.Call) and (kept := _kept(value, _libraries(source))) is not None:
        keeper = ast.Call(ast.Call(_name(KEPT), [kept], []), [value], [])
        assigned = ast.Assign([_stored(kept)], value)
        run = ast.Assign([_stored(kept)], keeper)
        facts = {"kept": _shown(kept)}
        yield Slip("result_not_kept", source, node, run, _shown(assigned), (_shown(value.func),), facts)


def _kept(call: ast.Call, libraries: frozenset[str]) -> ast.expr | None:
    """What a call gives a changed copy of: what it is a method of, or the first argument of a library's function."""
    path = _path(call.func)
    if path and path[0] in libraries:
        plain = not set(path) & _EFFECTS and not path[-1].endswith("_") and not path[-1].startswith(("set_", "use_"))
        given = call.args[0] if plain and call.args else None
    else:
        given = call.func.value if isinstance(call.func, ast.Attribute) and called_name(call) in _COPIES else None
    return given if isinstance(given, _PLACES) else None


def _assigned(source: Source, node: ast.Assign) -> Iterator[Slip]:
    """An assignment to an attribute that nothing reads, and ``=+`` for ``+=``."""
    target = node.targets[0]
    line, at = linecache.getline(source.file, node.value.lineno), node.value.col_offset
    if isinstance(target, _PLACES) and line[: at + 1].endswith(" =+"):
        added = ast.AugAssign(target, ast.Add(), node.value)
        text = _shown(added).replace("+= +", "+= ")
        yield Slip("plus_behind_the_equals_sign", source, node, added, text, (_shown(target),))
    likeness = difflib.SequenceMatcher(None, getattr(target, "attr", ""), "requires_grad").ratio()
    if isinstance(target, ast.Attribute) and LIKE <= likeness < 1 and not _is_read(source, target.attr):
        given = [target.value, ast.Constant(target.attr), node.value]
        text = f"{_shown(target.value)}.requires_grad = {_shown(node.value)}"
        run = ast.Expr(ast.Call(_name(SET), given, []))
        facts = {"attribute": target.attr, "object": _shown(target.value)}
        yield Slip("attribute_without_effect", source, node, run, text, (_shown(target),), facts)


def _is_read(source: Source, attribute: str) -> bool:
    """Whether code of the file may read an attribute: a private one may be read elsewhere (odd: module_with_a_flag)."""
    loaded = (n for n in source.parents if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
    return attribute.startswith("_") or (attribute != "requires_grad_" and any(n.attr == attribute for n in loaded))


def _repeated(source: Source, node: ast.stmt) -> Iterator[Slip]:
    """A name twice in a tuple, where another name of its kind is assigned and never read."""
    value = getattr(node, "value", None)
    if not isinstance(value, ast.Tuple) or len(value.elts) < 2:
        return
    targets = node.targets[0].elts if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) else []
    shown = Counter(map(_shown, value.elts))
    for place, element in enumerate(value.elts):
        names = {n.id for n in ast.walk(element) if isinstance(n, ast.Name)}
        first = next(i for i, e in enumerate(value.elts) if _shown(e) == _shown(element))
        if shown[_shown(element)] != 2 or place == first:
            continue
        if len(targets) == len(value.elts):  # h, c = h[rows], h[rows]
            pair = [t.id for t in (targets[first], targets[place]) if isinstance(t, ast.Name)]
            read, unread = pair if len(pair) == 2 else ("", "")
            if read not in names or unread in names or not _never_read(source, node, unread):
                continue
        else:  # return mean_a, logvar_a, mean_b, logvar_a
            read = element.id if isinstance(element, ast.Name) else ""
            others = [n for n in _locals(source, node) if n != read and _similar(n, read)] if read else []
            others = [n for n in others if n not in shown and _never_read(source, node, n)]
            if len(others) != 1:
                continue
            unread = others[0]
        run = copy.deepcopy(node)
        for n in ast.walk(run.value.elts[place]):  # type: ignore[attr-defined]
            if isinstance(n, ast.Name) and n.id == read:
                n.id = unread
        yield Slip("name_repeated", source, node, run, _shown(run), (read,), {"read": read, "unread": unread})


def _similar(one: str, other: str) -> bool:
    return difflib.SequenceMatcher(None, one, other).ratio() >= 0.6 and len(one) > 2


def _locals(source: Source, node: ast.stmt) -> list[str]:
    """The names that the function around assigns above a statement."""
    function = source.function(node)
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return list(dict.fromkeys(n.id for n in names if n.lineno < node.lineno and not n.id.startswith("_")))


def _never_read(source: Source, node: ast.stmt, name: str) -> bool:
    """Whether the function assigns a name, or is given it, and the value that it has at a statement is not read."""
    function = source.function(node)
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name]
    stored = [n.lineno for n in uses if isinstance(n.ctx, ast.Store) and n.lineno < node.lineno]
    stored += [function.lineno] if name in parameters_of(function) else []
    if not stored:
        return False
    read = (n.lineno for n in uses if isinstance(n.ctx, ast.Load))
    last = getattr(node, "end_lineno", None) or node.lineno
    rebound = any(isinstance(n.ctx, ast.Store) and node.lineno <= n.lineno <= last for n in uses)
    return not any(line > max(stored) and (not rebound or line <= last) for line in read)


class _Functions:
    """The functions that the project defines, by name; a class by its ``__init__``, its objects by ``forward``."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._defined: dict[str, list[tuple[Source, Any]]] = {}
        kinds: dict[str, dict[str, tuple[Source, Any]]] = {}
        for source in sources:
            for node in ast.walk(source.tree):
                if isinstance(node, FUNCTIONS):
                    self._defined.setdefault(node.name, []).append((source, node))
                elif isinstance(node, ast.ClassDef):
                    methods = {m.name: (source, m) for m in node.body if isinstance(m, FUNCTIONS)}
                    kinds[node.name] = methods
                    if "__init__" in methods:
                        self._defined.setdefault(node.name, []).append(methods["__init__"])
        for source in sources:  # criterion = FocalLoss(...); criterion(logits, labels)
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.targets) == 1:
                    methods = kinds.get(called_name(node.value), {})
                    path = _path(node.targets[0])
                    run = methods.get("forward") or methods.get("__call__")
                    if path and run is not None:
                        self._defined.setdefault(path[-1], []).append(run)

    def _of(self, source: Source, call: ast.Call) -> Any:
        """The only function that a call in a file can be of, one of this file before others."""
        known = [] if unpacks(call) else self._defined.get(called_name(call), [])
        near = {id(node): node for home, node in known if home is source}
        found = near or {id(node): node for _, node in known}
        return next(iter(found.values())) if len(found) == 1 else None

    def arguments_swapped(self, source: Source, node: ast.stmt) -> Iterator[Slip]:
        """Calls that give two arguments by position, each under the other's name."""
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call) and len(n.args) > 1):
            function = self._of(source, call)
            if function is None or source.function(node) is None:
                continue
            names = _positional(function)
            given = [_tokens(a) for a in call.args]
            for one, other in _crossed([_words(n) for n in names], given):
                if self._is_given_straight(function, one, other) or _turned(source, node, function):
                    continue
                run = copy.deepcopy(node)
                twin = next(c for c in ast.walk(run) if isinstance(c, ast.Call) and _at(c) == _at(call))
                twin.args[one], twin.args[other] = twin.args[other], twin.args[one]
                shown = _shown(call.args[one]), _shown(call.args[other])
                facts = {"function": function.name, "one": names[one], "other": names[other]}
                yield Slip("arguments_swapped", source, node, run, _shown(twin), shown, facts)

    def _is_given_straight(self, function: Any, one: int, other: int) -> bool:
        """Whether some call gives these two in the order of the parameters: then both orders may be intended."""
        words = [_words(n) for n in _positional(function)]
        for source in self._sources:
            for call in (n for n in ast.walk(source.tree) if isinstance(n, ast.Call)):
                if len(call.args) > max(one, other) and self._of(source, call) is function:
                    given = _tokens(call.args[one]), _tokens(call.args[other])
                    if given == (words[one], words[other]):
                        return True
        return False

    def results_swapped(self, source: Source, node: ast.Assign) -> Iterator[Slip]:
        """Two results of a function that are unpacked each under the other's name."""
        target = node.targets[0]
        call = node.value
        function = self._of(source, call) if isinstance(call, ast.Call) and isinstance(target, ast.Tuple) else None
        if function is None:
            return
        home = next(s for s, n in self._defined[called_name(call)] if n is function)  # type: ignore[arg-type]
        returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and home.function(n) is function]
        values = [n.value for n in returns]
        if len(values) != 1 or not isinstance(values[0], ast.Tuple):
            return
        wanted, got = [_tokens(e) for e in target.elts], [_tokens(e) for e in values[0].elts]  # type: ignore[attr-defined]
        for one, other in _crossed(wanted, got) if len(wanted) == len(got) else ():
            if _turned(source, node, function):
                continue
            run = copy.deepcopy(node)
            elements = run.targets[0].elts  # type: ignore[attr-defined]
            elements[one], elements[other] = elements[other], elements[one]
            names = tuple(_shown(target.elts[i]) for i in (one, other))  # type: ignore[attr-defined]
            facts = {"function": function.name, "returned": _shown(values[0])}
            yield Slip("results_swapped", source, node, run, _shown(run), names, facts)


def _crossed(one: Sequence[frozenset[str]], other: Sequence[frozenset[str]]) -> Iterator[tuple[int, int]]:
    """Two places, each of which has the name of the other; kl(q, p) of a ``def kl(p, q)`` says too little."""
    for i in range(min(len(one), len(other))):
        for j in range(i + 1, min(len(one), len(other))):
            named = one[i] != one[j] and all(len("".join(words)) > 1 for words in (one[i], one[j]))
            if named and (one[i], one[j]) == (other[j], other[i]):
                yield i, j


def _turned(source: Source, node: ast.stmt, function: Any) -> bool:
    """Whether the code says that it turns an order around, or a function calls itself."""
    around = source.function(node)
    names = " ".join([around.name, function.name]).lower()
    return around is function or any(word in names for word in _TURNED)


def _positional(function: Any) -> list[str]:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _tokens(expression: Any) -> frozenset[str]:
    """The words of the last name of an expression: ``self.obs_rate`` has obs and rate."""
    path = _path(expression)
    return _words(path[-1]) if path else frozenset()


def _words(name: str) -> frozenset[str]:
    return frozenset(word for word in name.lower().split("_") if word)


def _path(expression: Any) -> list[str]:
    """The names of ``a.b.c``; empty for another expression."""
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    return [*names, expression.id][::-1] if isinstance(expression, ast.Name) else []


def _at(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _stored(expression: ast.expr) -> ast.expr:
    stored = copy.deepcopy(expression)
    stored.ctx = ast.Store()  # type: ignore[attr-defined]
    return stored


def _shown(node: ast.AST) -> str:
    if isinstance(node, ast.Assign):
        return " = ".join(map(_shown, (*node.targets, node.value)))
    if isinstance(node, ast.Return) and node.value is not None:
        return f"return {_shown(node.value)}"
    if isinstance(node, ast.Tuple):
        return ", ".join(map(_shown, node.elts))
    return ast.unparse(node)
