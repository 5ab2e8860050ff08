"""Calls that give an argument in the place of another, or leave one out that seems intended."""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.checks.wiring.no_typos.expressions import Slip, at, name_of, path_of, shown, tokens_of, words_of
from pytest_trainloop.checks.wiring.no_typos.names import unread_in
from pytest_trainloop.instruments.tracing.call_expressions import called_name, unpacks
from pytest_trainloop.instruments.tracing.syntax import FUNCTIONS, parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.wiring.no_typos.names import Known
    from pytest_trainloop.instruments.tracing.syntax import Source

_OF_TORCH = (nn.Module, torch.Tensor, torch.optim.Optimizer, torch.utils.data.DataLoader)
"""Kinds whose methods may be called where a method of the project has the same name."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_TURNED = ("swap", "reverse", "revers", "flip", "invers", "mirror", "symmetr", "transpose", "back", "cycle")


class Functions:
    """The functions that the project defines, by name; a class by its ``__init__``, its objects by ``forward``."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._modules = {getattr(m, "__file__", None): m for m in reversed(list(sys.modules.values()))}
        self._built: dict[str, set[type]] = {}
        """The classes of libraries of which an object is made, by the name that it gets."""
        self._defined: dict[str, list[tuple[Source, Any]]] = {}
        self._unread_in: dict[Any, dict[str, ast.expr]] = {}
        self._kinds: dict[str, dict[str, tuple[Source, Any]]] = {}
        for source in sources:
            for node in ast.walk(source.tree):
                if isinstance(node, FUNCTIONS):
                    self._defined.setdefault(node.name, []).append((source, node))
                elif isinstance(node, ast.ClassDef):
                    methods = {m.name: (source, m) for m in node.body if isinstance(m, FUNCTIONS)}
                    self._kinds[node.name] = methods
                    if "__init__" in methods:
                        self._defined.setdefault(node.name, []).append(methods["__init__"])
        for source in sources:  # criterion = FocalLoss(...); criterion(logits, labels)
            for target, call in _made(source.tree):
                methods, path = self._kinds.get(called_name(call), {}), path_of(target)
                run = methods.get("forward") or methods.get("__call__")
                if path and run is not None:
                    self._defined.setdefault(path[-1], []).append(run)
                elif path and isinstance(built := self._resolved(source, call.func), type):
                    self._built.setdefault(path[-1], set()).add(built)

    def _resolved(self, source: Source, expression: ast.expr) -> Any:
        """What the globals of a file give for ``a.b.c``; None for another expression."""
        path = path_of(expression)
        value = getattr(self._modules.get(source.file), path[0], None) if path else None
        for name in path[1:] if isinstance(value, types.ModuleType) else ():
            value = getattr(value, name, None)
        return value

    def _of(self, source: Source, call: ast.Call) -> Any:
        """The only function that a call in a file can be of, one of this file before others."""
        known = [] if unpacks(call) else self._defined.get(called_name(call), [])
        called = self._resolved(source, call.func) if known and isinstance(call.func, ast.Attribute) else None
        if called is not None:
            file = getattr(getattr(called, "__code__", None), "co_filename", "")
            known = [(home, node) for home, node in known if home.file == file]  # F.cross_entropy is no function of its
        function, name = source.function(call), called_name(call)
        own = function is not None and path_of(call.func)[:-1] == parameters_of(function)[:1] != []
        if isinstance(call.func, ast.Attribute) and not own and any(hasattr(kind, name) for kind in _OF_TORCH):
            known = [(home, node) for home, node in known if node.name in ("forward", "__call__")]  # model.train()
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
            given = [tokens_of(a) for a in call.args]
            for one, other in _crossed([words_of(n) for n in names], given):
                if self._is_given_straight(function, one, other) or _turned(source, node, function):
                    continue
                run = copy.deepcopy(node)
                twin = next(c for c in ast.walk(run) if isinstance(c, ast.Call) and at(c) == at(call))
                twin.args[one], twin.args[other] = twin.args[other], twin.args[one]
                given_names = shown(call.args[one]), shown(call.args[other])
                facts = {"function": function.name, "one": names[one], "other": names[other]}
                yield Slip("arguments_swapped", source, node, run, shown(twin), given_names, facts)

    def argument_not_given(self, source: Source, node: ast.stmt, known: Known) -> Iterator[Slip]:
        """Calls without an argument that the function takes under the name of a variable, or of an attribute of the
        object, which nothing reads."""
        unread = self._unread(source, source.function(node), known)
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call) and unread and not unpacks(n)):
            names = self._taken(source, call)
            given = {*names[: len(call.args)], *(k.arg for k in call.keywords)}
            for name in (n for n in names if n in unread and n not in given):
                run = copy.deepcopy(node)
                twin = next(c for c in ast.walk(run) if isinstance(c, ast.Call) and at(c) == at(call))
                twin.keywords.append(ast.keyword(name, unread[name]))
                facts = {"function": shown(call.func), "argument": name}
                yield Slip("argument_not_given", source, node, run, shown(twin), (shown(unread[name]),), facts)

    def _unread(self, source: Source, function: Any, known: Known) -> dict[str, ast.expr]:
        """The variables and parameters of a function that nothing in it reads, and the attributes of its object that
        no file reads."""
        if function in self._unread_in:
            return self._unread_in[function]
        found: dict[str, ast.expr] = {n: name_of(n) for n in sorted(unread_in(function))}
        around, own = source.parents.get(function), parameters_of(function)[:1]
        if isinstance(around, ast.ClassDef) and all(self._is_known(base) for base in around.bases) and own:
            kept = [n for n in ast.walk(around) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
            mine = {n.attr for n in kept if isinstance(n.value, ast.Name) and n.value.id == own[0]}
            found |= {n: ast.Attribute(name_of(own[0]), n, ast.Load()) for n in sorted(mine) if not known.read[n]}
        return self._unread_in.setdefault(function, found)

    def is_recurrent(self, call: ast.Call) -> bool:
        """Whether a recurrent layer of torch is called."""
        kinds = self._built.get(called_name(call), set())
        return bool(kinds) and all(issubclass(kind, (nn.RNNBase, nn.RNNCellBase)) for kind in kinds)

    def _is_known(self, base: ast.expr) -> bool:
        """Whether a base class reads no attribute that the project's files do not show: one of theirs, or a module."""
        name = (path_of(base) or [""])[-1]
        return name in ("Module", "Dataset", "object", "ABC", "Function") or name in self._kinds

    def _taken(self, source: Source, call: ast.Call) -> list[str]:
        """The parameters of what is called, those first that are given by position; of ``super()`` none are known."""
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
            return []
        if (function := self._of(source, call)) is not None:
            return [*_positional(function), *(a.arg for a in function.args.kwonlyargs)]
        kinds = self._built.get(called_name(call), set())
        called: Any = next(iter(kinds)) if len(kinds) == 1 else self._resolved(source, call.func)
        if isinstance(called, type):
            called = getattr(called, "forward", None) if kinds else called.__init__  # type: ignore[misc]
        try:
            parameters = [p.name for p in inspect.signature(called).parameters.values() if p.kind in _BY_NAME]
        except (TypeError, ValueError):  # of C
            return []
        return parameters[1:] if parameters[:1] == ["self"] else parameters

    def _is_given_straight(self, function: Any, one: int, other: int) -> bool:
        """Whether some call gives these two in the order of the parameters: then both orders may be intended."""
        words = [words_of(n) for n in _positional(function)]
        for source in self._sources:
            for call in (n for n in ast.walk(source.tree) if isinstance(n, ast.Call)):
                if len(call.args) > max(one, other) and self._of(source, call) is function:
                    given = tokens_of(call.args[one]), tokens_of(call.args[other])
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
        wanted, got = [tokens_of(e) for e in target.elts], [tokens_of(e) for e in values[0].elts]  # type: ignore[attr-defined]
        for one, other in _crossed(wanted, got) if len(wanted) == len(got) else ():
            if _turned(source, node, function):
                continue
            run = copy.deepcopy(node)
            elements = run.targets[0].elts  # type: ignore[attr-defined]
            elements[one], elements[other] = elements[other], elements[one]
            names = tuple(shown(target.elts[i]) for i in (one, other))  # type: ignore[attr-defined]
            facts = {"function": function.name, "returned": shown(values[0])}
            yield Slip("results_swapped", source, node, run, shown(run), names, facts)


def _made(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.Call]]:
    """What is assigned the result of a call, one by one."""
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.Assign) and len(n.targets) == 1):
        target, value = node.targets[0], node.value
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
        pairs = zip(target.elts, value.elts, strict=True) if both else [(target, value)]  # type: ignore[attr-defined]
        yield from ((to, made) for to, made in pairs if isinstance(made, ast.Call))


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
