"""Statements of the project that look like a slip, each with the statement that was probably intended.

They are read from the source of the modules that the loop's function refers to. Nothing is said of them here: the loop
is run with the other statement.
"""

from __future__ import annotations

import ast
import difflib
import functools
import linecache
import sys
import types
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.wiring.no_typos.calls import Functions
from pytest_trainloop.checks.wiring.no_typos.edited_source import PREFIX
from pytest_trainloop.checks.wiring.no_typos.expressions import Slip, name_of, path_of, shown, stored
from pytest_trainloop.checks.wiring.no_typos.loops import returns_inside_loop, state_not_carried
from pytest_trainloop.checks.wiring.no_typos.names import Known, copied, key_misspelt, repeated, same_twice
from pytest_trainloop.checks.wiring.no_typos.reshapes import reshaped
from pytest_trainloop.core.places import code_of
from pytest_trainloop.instruments.tracing.call_expressions import called_name
from pytest_trainloop.instruments.tracing.syntax import source_of
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def slips(make: Any) -> Iterator[Slip]:
    """Those in functions of the files that a loop's function refers to."""
    sources = [source_of(file) for file in _files(make)]
    functions, known = Functions(sources), Known(sources)
    for source in sources:
        for node in (
            n for n in source.parents if isinstance(n, (*_SIMPLE, ast.For)) and source.function(n) is not None
        ):
            if isinstance(node, ast.For):
                yield from returns_inside_loop(source, node)
                continue
            yield from reshaped(source, node)
            yield from functions.arguments_swapped(source, node)
            yield from functions.argument_not_given(source, node, known)
            yield from repeated(source, node)
            yield from same_twice(source, node)
            yield from key_misspelt(source, node, known)
            if isinstance(node, ast.Expr):
                yield from _without_effect(source, node)
            elif isinstance(node, ast.Assign):
                yield from _assigned(source, node)
                yield from copied(source, node, known)
                yield from state_not_carried(source, node, functions)
                yield from functions.results_swapped(source, node)


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
        called = ast.Call(name_of(CALLED), [value], [])
        yield Slip("method_not_called", source, node, ast.Expr(called), f"{ast.unparse(value)}()", (value.attr,))
    elif isinstance(value, ast.Compare) and isinstance(value.ops[0], ast.Eq) and len(value.ops) == 1:
        if isinstance(value.left, (ast.Attribute, ast.Subscript)):
            assigned = ast.Assign([stored(value.left)], value.comparators[0])
            yield Slip("comparison_as_statement", source, node, assigned, shown(assigned), (shown(value.left),))
    elif isinstance(value, ast.Call) and (kept := _kept(value, _libraries(source))) is not None:
        keeper = ast.Call(ast.Call(name_of(KEPT), [kept], []), [value], [])
        assigned = ast.Assign([stored(kept)], value)
        run = ast.Assign([stored(kept)], keeper)
        facts = {"kept": shown(kept)}
        yield Slip("result_not_kept", source, node, run, shown(assigned), (shown(value.func),), facts)


def _kept(call: ast.Call, libraries: frozenset[str]) -> ast.expr | None:
    """What a call gives a changed copy of: what it is a method of, or the first argument of a library's function."""
    path = path_of(call.func)
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
        text = shown(added).replace("+= +", "+= ")
        yield Slip("plus_behind_the_equals_sign", source, node, added, text, (shown(target),))
    likeness = difflib.SequenceMatcher(None, getattr(target, "attr", ""), "requires_grad").ratio()
    if isinstance(target, ast.Attribute) and LIKE <= likeness < 1 and not _is_read(source, target.attr):
        given = [target.value, ast.Constant(target.attr), node.value]
        text = f"{shown(target.value)}.requires_grad = {shown(node.value)}"
        run = ast.Expr(ast.Call(name_of(SET), given, []))
        facts = {"attribute": target.attr, "object": shown(target.value)}
        yield Slip("attribute_without_effect", source, node, run, text, (shown(target),), facts)


def _is_read(source: Source, attribute: str) -> bool:
    """Whether code of the file may read an attribute: a private one may be read elsewhere (odd: module_with_a_flag)."""
    loaded = (n for n in source.parents if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
    return attribute.startswith("_") or (attribute != "requires_grad_" and any(n.attr == attribute for n in loaded))
