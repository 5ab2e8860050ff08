"""The user's frames of a script at its first optimizer step, and the source around them."""

from __future__ import annotations

import ast
import operator
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.places import shown, syntax_of
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    from types import CodeType, FrameType

ABSENT = object()

_PLAIN = (bool, int, float, str, type(None))
_COMPARED = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not}


@dataclass(slots=True)
class Frame:
    """One frame of the user's own, as it was then."""

    code: CodeType
    line: int
    locals: dict[str, Any]
    globals: dict[str, Any] = field(repr=False)
    through_library: bool = False
    """Whether the next frame of the user's that it called was called by a library."""

    @property
    def name(self) -> str:
        return self.code.co_name

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def at_module_level(self) -> bool:
        return self.name == "<module>"

    @property
    def place(self) -> str:
        return shown(self.file, self.line)

    def value(self, name: str) -> Any:
        """What a name means there; ``ABSENT`` where it means nothing."""
        if name in self.locals:
            return self.locals[name]
        return self.globals.get(name, ABSENT)

    def is_local(self, name: str) -> bool:
        """Whether the function itself binds the name; at module level every name of the module."""
        return name in self.locals and (self.at_module_level or name not in self.code.co_freevars)

    @property
    def parameters(self) -> tuple[str, ...]:
        count = self.code.co_argcount + self.code.co_kwonlyargcount
        return self.code.co_varnames[:count]

    def body(self) -> list[ast.stmt]:
        """The statements of its function, or of its module."""
        tree = syntax_of(self.file)
        if self.at_module_level:
            return tree.body
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == self.name:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if first <= self.code.co_firstlineno <= (node.end_lineno or 0) and self.line <= (node.end_lineno or 0):
                    return node.body
        return []

    def evaluated(self, node: ast.expr) -> Any:
        """What a name, or a chain of attributes and constant keys, means there; ``ABSENT`` for anything else: nothing
        is called."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.value(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.evaluated(node.value)
            return ABSENT if owner is ABSENT else _attribute(owner, node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self.evaluated(node.value)
            return owner.get(node.slice.value, ABSENT) if type(owner) is dict else ABSENT
        return ABSENT

    def truth(self, node: ast.expr) -> bool | None:
        """Whether a condition of plain values holds; None where it takes more to know."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(part) for part in node.values]
            decisive = isinstance(node.op, ast.Or)
            return decisive if decisive in parts else None if None in parts else not decisive
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
            left, right = self.evaluated(node.left), self.evaluated(node.comparators[0])
            plain = isinstance(left, _PLAIN) and isinstance(right, _PLAIN)
            return bool(_COMPARED[type(node.ops[0])](left, right)) if plain else None
        value = self.evaluated(node)
        return bool(value) if isinstance(value, _PLAIN) else None


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except Exception:  # of an attribute of the project's: it may be absent, or raise anything
        return ABSENT


def user_stack() -> list[Frame]:
    """The user's frames, the outermost first."""
    found: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    library = False
    while frame is not None:
        rank = layer(frame.f_code.co_filename)
        if rank == 2:
            found.append(Frame(frame.f_code, frame.f_lineno, dict(frame.f_locals), frame.f_globals, library))
            library = False
        elif found and not frame.f_code.co_filename.startswith("<"):
            library = True
        frame = frame.f_back
    return found[::-1]


def line_of_main_thread() -> str:
    """The user's innermost line of the main thread, from another thread; empty where there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and layer(frame.f_code.co_filename) != 2:
        frame = frame.f_back
    return "" if frame is None else shown(frame.f_code.co_filename, frame.f_lineno)


def call_at(caller: Frame, called: Frame) -> ast.Call | None:
    """The call in the caller's line that called the function of the other frame."""
    for node in ast.walk(ast.Module(caller.body(), [])):
        if isinstance(node, ast.Call) and node.lineno <= caller.line <= (node.end_lineno or node.lineno):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            function = caller.evaluated(node.func)
            same = getattr(getattr(function, "__func__", function), "__code__", None) is called.code
            if same or name == called.name or (called.name == "__call__" and function is not ABSENT):
                return node
    return None


def is_guarded(module: Frame) -> bool:
    """Whether the line of a module is under ``if __name__ == "__main__"``."""
    return any(
        isinstance(node, ast.If)
        and "__name__" in ast.unparse(node.test)
        and node.lineno <= module.line <= (node.end_lineno or 0)
        for node in module.body()
    )


def assignments(frame: Frame, name: str) -> list[Any]:
    """The statements of a frame's function, before its present line, that assign a name."""
    found: list[Any] = []
    for node in ast.walk(ast.Module(frame.body(), [])):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and node.lineno <= frame.line:
            names = {n.id for t in targets(node) for n in getattr(t, "elts", [t]) if isinstance(n, ast.Name)}
            if name in names:
                found.append(node)
    return sorted(found, key=lambda node: node.lineno)


def targets(statement: Any) -> list[ast.expr]:
    """What an assignment assigns."""
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def is_changed(name: str, frame: Frame) -> bool:
    """Whether a function changes what hangs on a name: ``cfg.lr = 1``, ``setattr(cfg, ...)``, ``cfg.update(...)``."""
    for node in ast.walk(ast.Module(frame.body(), [])):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if _root(node) == name:
                return True
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            inner = [c for c in ast.walk(call) if isinstance(c, ast.Call) and _root(c.func) in ("setattr", "vars")]
            by_function = any(_root(c.args[0]) == name for c in inner if c.args)
            if by_function or (isinstance(call.func, ast.Attribute) and _root(call.func) == name):
                return True
    return False


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes, items and calls begins with; empty for other expressions."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
