"""How the objects of a running loop were made: the assignments that lead to them, as code of a test.

A name is followed to the statements that assign it, in the function that binds it, and from there to the names in these
statements. What is a plain value is written down as it was; functions, classes and modules are imported.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import sys
import types
from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_trainloop.core.places import shown
from pytest_trainloop.frontends.script_runner.recipes import recipe
from pytest_trainloop.frontends.script_runner.stack import ABSENT, Frame, assignments, targets
from pytest_trainloop.frontends.script_runner.values import OF_THE_TEST, Imports, Unknown, code_of
from pytest_trainloop.instruments.tracing.syntax import blocks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

LONG = 80
"""Characters of a plain value beyond which the call that gave it is written in its place."""

DEEPEST = 12
"""Names that are followed from one to the next."""


class Slices:
    """The statements of the written test, made as they are asked for."""

    def __init__(self, frames: Sequence[Frame], imports: Imports, loader: Any = None) -> None:
        self._frames = list(frames)
        self._imports = imports
        self._loader = loader
        """The training data: ``batches`` inside of ``fit``, ``data`` where another object is made of it."""
        self._names: dict[int, str] = {}
        """The code that refers to an object, by ``id``."""
        self._done: dict[tuple[int, str], str] = {}
        self._taken: set[str] = set(OF_THE_TEST)
        self._written: dict[int, Any] = {}
        self.statements: list[str] = []

    def expression(self, node: ast.expr, frame: Frame, depth: int = 0) -> str:
        """The expression with every name in it replaced. Raises ``Unknown``."""
        return ast.unparse(_Renamed(self, frame, depth).visit(_copied(node)))

    def name(self, name: str, frame: Frame, depth: int = 0) -> str:
        """Code for what a name means in a frame; statements that make it are added. Raises ``Unknown``."""
        value = frame.value(name)
        if value is ABSENT:
            raise Unknown(name)
        if known := self._name_of(value, depth):
            return known
        try:
            text = code_of(value, self._imports)
        except Unknown:
            return self._made(name, value, frame, depth)
        return self._shorter(text, name, value, frame)

    def _shorter(self, text: str, name: str, value: Any, frame: Frame) -> str:
        """The call that gave a long plain value, such as a whole configuration, where it can be repeated."""
        if len(text) <= LONG or isinstance(value, argparse.Namespace):
            return text
        try:
            return recipe(name, frame, self._frames, self._imports)
        except Unknown:
            return text

    def named(self, value: Any, code: str) -> str:
        """The code, which refers to this object from here on."""
        self._names.setdefault(id(value), code)
        return code

    def _name_of(self, value: Any, depth: int) -> str:
        if value is self._loader and value is not None:
            return "data" if depth else "batches"
        return self._names.get(id(value), "")

    def known(self, value: Any, depth: int = 0) -> str:
        """Code for a plain value, a function, a class, a module, or an object that has a name; empty for others."""
        if value is ABSENT:
            return ""
        if known := self._name_of(value, depth):
            return known
        plain = type(value) in (bool, int, float, str, type(None))
        if not plain and not isinstance(value, (types.ModuleType, type, types.FunctionType)):
            return ""
        try:
            return code_of(value, self._imports)
        except Unknown:
            return ""

    def _made(self, name: str, value: Any, frame: Frame, depth: int) -> str:
        if depth > DEEPEST:
            raise Unknown(name)
        frame, name = self._home(name, value, frame)
        known = self._done.get((id(frame), name))
        if known is not None:
            return known
        assigned = [s for s in assignments(frame, name) if not isinstance(s.value, ast.Constant)]
        if len(assigned) > 1:
            assigned = _that_ran(assigned, value, frame)
        if not assigned:
            raise Unknown(name)
        own = self._free(name)
        self._done[id(frame), name] = own
        try:
            for statement in assigned:
                self._write(own, statement, frame, depth)
        except Unknown:
            del self._done[id(frame), name]
            raise
        self._names[id(value)] = own
        self._write_calls_on(own, name, frame, assigned[-1].lineno, depth)
        return own

    def _write(self, own: str, statement: Any, frame: Frame, depth: int) -> None:
        if id(statement) in self._written:
            return
        text = self.expression(statement.value, frame, depth + 1)
        if "parse_args" in text:
            raise Unknown(f"{own}, which is read from the command line")
        if id(statement) in self._written:
            return  # by what it is made of: several names are assigned at once
        self._written[id(statement)] = statement
        target, left = targets(statement)[0], own
        if isinstance(target, (ast.Tuple, ast.List)):
            names = [getattr(element, "id", "_") for element in target.elts]
            left = ", ".join(self._done.setdefault((id(frame), name), self._free(name)) for name in names)
            left += "," * (len(names) == 1)
        self.statements.append(f"{left} = {text}  # {shown(frame.file, statement.lineno)}")

    def _write_calls_on(self, own: str, name: str, frame: Frame, after: int, depth: int) -> None:
        """Calls that change a module in place: ``model.apply(init_weights)``."""
        holders = ast.walk(ast.Module(frame.body(), []))
        blocks = (block for holder in holders for block in blocks_of(holder))
        block = next((b for b in blocks if any(statement.lineno == after for statement in b)), [])
        for node in block:
            call = node.value if isinstance(node, ast.Expr) else None
            if not isinstance(call, ast.Call) or not after < node.lineno < frame.line:
                continue
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            if isinstance(owner, ast.Name) and owner.id == name and isinstance(frame.value(name), nn.Module):
                text = self.expression(call, frame, depth + 1)
                self.statements.append(f"{text}  # {shown(frame.file, node.lineno)}")

    def _home(self, name: str, value: Any, frame: Frame) -> tuple[Frame, str]:
        """The frame that made what a parameter was given: the outer one that holds the same object by a name."""
        while name in frame.parameters and not assignments(frame, name):
            at = self._frames.index(frame) if frame in self._frames else 0
            outer = next(
                ((f, own) for f in reversed(self._frames[:at]) for own, v in f.locals.items() if v is value), None
            )
            if outer is None:
                raise Unknown(name)
            frame, name = outer
        if not frame.is_local(name) and (home := self._module_of(frame)) is not None:
            return home, name
        return frame, name

    def _module_of(self, frame: Frame) -> Frame | None:
        return next((f for f in self._frames if f.at_module_level and f.globals is frame.globals), None)

    def _free(self, name: str) -> str:
        own = name
        if name == "_":
            return name
        while own in self._taken:
            own += "_"
        self._taken.add(own)
        return own


class _Renamed(ast.NodeTransformer):
    def __init__(self, slices: Slices, frame: Frame, depth: int) -> None:
        self._slices, self._frame, self._depth = slices, frame, depth
        self._bound: set[str] = set()

    def visit_Name(self, node: ast.Name) -> ast.AST:
        of_python = self._frame.value(node.id) is ABSENT and hasattr(builtins, node.id)
        if node.id in self._bound or not isinstance(node.ctx, ast.Load) or of_python:
            return node
        return _parsed(self._slices.name(node.id, self._frame, self._depth))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """A plain value that hangs on an object is written down itself: ``args.lr`` becomes ``0.1``."""
        value = self._frame.evaluated(node)
        if value is sys.argv:
            return _parsed(repr(value))  # under pytest it is another
        code = self._slices.known(value, self._depth)
        return _parsed(code) if code else self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        before = set(self._bound)
        self._bound |= {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
        node.body = self.visit(node.body)
        self._bound = before
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Of a comprehension the generators come first: they bind the names that the rest uses."""
        generators = getattr(node, "generators", None)
        if generators is None:
            return super().generic_visit(node)
        before = set(self._bound)
        for generator in generators:
            generator.iter = self.visit(generator.iter)
            self._bound |= {n.id for n in ast.walk(generator.target) if isinstance(n, ast.Name)}
            generator.ifs = [self.visit(test) for test in generator.ifs]
        for part in ("elt", "key", "value"):
            if hasattr(node, part):
                setattr(node, part, self.visit(getattr(node, part)))
        self._bound = before
        return node


def _parsed(code: str) -> ast.expr:
    return ast.parse(code, mode="eval").body


def _copied(node: ast.expr) -> ast.expr:
    return _parsed(ast.unparse(node))


def _that_ran(assigned: list[Any], value: Any, frame: Frame) -> list[Any]:
    """Of several assignments those that led to this value: the last that makes such a value, under no condition that
    does not hold, with those before it where it takes the name again (``model = DDP(model)``)."""
    left = [s for s in assigned if not _was_skipped(s, frame)]
    last = max((i for i, s in enumerate(left) if not _makes_another(s, value, frame)), default=-1)
    chain = left[last : last + 1] if last >= 0 else []
    while last > 0 and _takes_again(chain[0]):
        last -= 1
        chain.insert(0, left[last])
    return chain


def _takes_again(statement: Any) -> bool:
    """Whether the value of an assignment is made of the name that it assigns."""
    names = {n.id for t in targets(statement) for n in ast.walk(t) if isinstance(n, ast.Name)}
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(statement.value))


def _makes_another(statement: Any, value: Any, frame: Frame) -> bool:
    kind = frame.evaluated(statement.value.func) if isinstance(statement.value, ast.Call) else None
    return isinstance(kind, type) and not isinstance(value, kind)


def _was_skipped(statement: Any, frame: Frame) -> bool:
    """Whether a condition around a statement, as far as it is one of plain values, says that it did not run."""
    for node in ast.walk(ast.Module(frame.body(), [])):
        if isinstance(node, ast.If):
            holds = frame.truth(node.test)
            other = node.orelse if holds is True else node.body if holds is False else []
            if any(statement is inner for part in other for inner in ast.walk(part)):
                return True
    return False
