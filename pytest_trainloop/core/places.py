"""Places in the user's files, for messages. Standard library only."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.ours import is_our_file

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable
    from types import CodeType, FrameType

GENERATED = "<string>"
"""The file of what ``dataclass`` generates."""


def caller() -> tuple[str, int]:
    """File and line of the nearest frame outside this package; an empty file where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def shown(file: str, line: int) -> str:
    """``train.py:57``, the path shortened against the working directory; empty without a file."""
    if not file or not line:
        return ""
    path = Path(file)
    return f"{path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else path.name}:{line}"


def of_function(function: object) -> str:
    """The line where a function of the user's begins; empty for other callables and for those of libraries."""
    code = code_of(function)
    return "" if code is None or not _of_the_user(code.co_filename) else shown(code.co_filename, code.co_firstlineno)


def first_line(code: CodeType) -> int:
    """The line of a function's ``def``, past its decorators, at which its code begins."""
    import linecache  # on the way to a message only

    line = code.co_firstlineno
    for number in range(line, line + _MOST_DECORATORS):
        if linecache.getline(code.co_filename, number).lstrip().startswith(("def ", "async def ")):
            return number
        if not linecache.getline(code.co_filename, line).lstrip().startswith("@"):
            return line
    return line


_MOST_DECORATORS = 20
"""Lines of decorators that are passed over."""


def of_keyword(file: str, line: int, call: str, keyword: str) -> str:
    """The line of one keyword of the call of this name around a line; that line where there is none."""
    import ast  # on the way to an error only

    for node in ast.walk(syntax_of(file)):
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or line):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found = next((k.value.lineno for k in node.keywords if k.arg == keyword), None)
            if name == call and found is not None:
                return shown(file, found)
    return shown(file, line)


def syntax_of(file: str) -> ast.Module:
    """The syntax tree of a file; empty where its source is not known."""
    import linecache

    return _parsed("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=256)
def _parsed(source: str) -> ast.Module:
    import ast

    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def code_of(function: object) -> CodeType | None:
    """The code of a function, past partials, bound methods and decorators that say what they wrap."""
    while isinstance(function, functools.partial):
        function = function.func
    plain: Any = getattr(function, "__func__", function)
    wrapped: Callable[..., object] = getattr(plain, "__wrapped__", plain)
    return getattr(wrapped, "__code__", None)


def is_ours(file: str) -> bool:
    """Whether a file is one of this package, or of what ``dataclass`` generates."""
    return is_our_file(file) or file == GENERATED


def _of_the_user(file: str) -> bool:
    return not is_ours(file) and "site-packages" not in file
