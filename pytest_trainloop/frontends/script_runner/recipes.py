"""Objects that a call with plain arguments gave: ``load_config("tiny.toml")`` says more than all that it holds."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, Any

from pytest_trainloop.frontends.script_runner.stack import ABSENT, Frame, assignments, call_at, is_changed
from pytest_trainloop.frontends.script_runner.values import Imports, Unknown, code_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMAND_LINE = ("argv", "parse_args", "parse_known_args", "environ", "getenv", "input(")
"""What a function reads that is another in a test."""

_DEEPEST = 8


def recipe(name: str, frame: Frame, frames: Sequence[Frame], imports: Imports) -> str:
    """Code that builds the object of a name, where a call with plain arguments gave it, or what it hangs on. Raises
    ``Unknown`` where it came about in another way, or may have been changed since."""
    return _Recipe(frames, imports).of(ast.Name(name, ast.Load()), frame, _DEEPEST)


class _Recipe:
    def __init__(self, frames: Sequence[Frame], imports: Imports) -> None:
        self._frames = list(frames)
        self._imports = imports

    def of(self, node: ast.expr, frame: Frame, left: int) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self.of(node.value, frame, left)}.{node.attr}"
        if isinstance(node, ast.Name) and left:
            return self.of(*self._origin(node.id, frame), left - 1)
        if isinstance(node, ast.Call):
            return self._call(node, frame)
        raise Unknown(ast.unparse(node))

    def _origin(self, name: str, frame: Frame) -> tuple[ast.expr, Frame]:
        """The expression that a name was given: in its own function's only assignment, or by the call of it."""
        if is_changed(name, frame):
            raise Unknown(f"{name}, which is changed")
        assigned = assignments(frame, name)
        if name in frame.parameters and not assigned:
            return self._argument(name, frame)
        if len(assigned) != 1 or not isinstance(assigned[0], ast.Assign) or len(assigned[0].targets) != 1:
            raise Unknown(name)
        if not isinstance(assigned[0].targets[0], ast.Name):
            raise Unknown(name)
        return assigned[0].value, frame

    def _argument(self, name: str, frame: Frame) -> tuple[ast.expr, Frame]:
        at = next((i for i, each in enumerate(self._frames) if each is frame), 0)
        call = call_at(self._frames[at - 1], frame) if at else None
        if call is None or any(isinstance(a, ast.Starred) for a in call.args):
            raise Unknown(name)
        place = frame.parameters.index(name) - isinstance(call.func, ast.Attribute) * (frame.parameters[0] == "self")
        by_name = {k.arg: k.value for k in call.keywords}
        if name in by_name:
            return by_name[name], self._frames[at - 1]
        if 0 <= place < len(call.args):
            return call.args[place], self._frames[at - 1]
        raise Unknown(name)

    def _call(self, node: ast.Call, frame: Frame) -> str:
        function = frame.evaluated(node.func)
        if not inspect.isfunction(function) or _reads_command_line(function):
            raise Unknown(ast.unparse(node))
        given = [self._plain(a, frame) for a in node.args]
        given += [f"{k.arg}={self._plain(k.value, frame)}" for k in node.keywords if k.arg]
        if any(k.arg is None for k in node.keywords):
            raise Unknown(ast.unparse(node))
        return f"{self._imports.named(function)}({', '.join(given)})"

    def _plain(self, node: ast.expr, frame: Frame) -> str:
        value = plain(node, frame)
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise Unknown(ast.unparse(node))
        return code_of(value, self._imports)


def plain(node: ast.expr, frame: Frame) -> Any:
    """What an expression of plain values means there: also ``sys.argv[1] if len(sys.argv) > 1 else "tiny.toml"``.
    Raises ``Unknown``."""
    if isinstance(node, ast.IfExp):
        holds = frame.truth(node.test)
        if holds is None:
            holds = _compared_length(node.test, frame)
        return plain(node.body if holds else node.orelse, frame)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and type(node.slice.value) is int:
        owner = frame.evaluated(node.value)
        if isinstance(owner, (list, tuple)) and -len(owner) <= node.slice.value < len(owner):
            return owner[node.slice.value]
    value = frame.evaluated(node)
    if value is ABSENT:
        raise Unknown(ast.unparse(node))
    return value


def _compared_length(test: ast.expr, frame: Frame) -> bool:
    """Whether ``len(something) > number`` holds."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Call):
        call, bound = test.left, test.comparators[0]
        of = frame.evaluated(call.args[0]) if len(call.args) == 1 else ABSENT
        if isinstance(call.func, ast.Name) and call.func.id == "len" and isinstance(of, (list, tuple)):
            number = bound.value if isinstance(bound, ast.Constant) else None
            if isinstance(number, int):
                found = {ast.Gt: len(of) > number, ast.GtE: len(of) >= number, ast.Eq: len(of) == number}
                if type(test.ops[0]) in found:
                    return found[type(test.ops[0])]
    raise Unknown(ast.unparse(test))


def _reads_command_line(function: Any) -> bool:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return True
    return any(word in source for word in _COMMAND_LINE)
