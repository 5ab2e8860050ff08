"""Which checks a change of the package touches, by what each check imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_trainloop.core import registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = "pytest_trainloop"


def checks_touched(changed: Iterable[str]) -> tuple[set[str], set[str]]:
    """The checks in whose own folders (of the package or of the tests) files changed, and those that import a changed
    module of the package, at any distance. ``changed`` are paths below the top of the repository."""
    folders = {name: Path(*check.module.split(".")[1:-1]) for name, check in registry.registered().items()}
    paths = [Path(path) for path in changed if path.endswith(".py")]
    own, modules = set(), set()
    for path in paths:
        below = Path(*path.parts[1:])
        own |= {name for name, folder in folders.items() if below.is_relative_to(folder)}
        if path.parts[0] == PACKAGE:
            modules.add(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    shared = {name for name, check in registry.registered().items() if modules & reached(check.module)}
    return own, shared - own


@cache
def reached(module: str) -> frozenset[str]:
    """The modules of the package that a module imports, at any distance and at any place of its code."""
    found, todo = {module}, [module]
    while todo:
        for name in imported(todo.pop()):
            if name not in found:
                found.add(name)
                todo.append(name)
    return frozenset(found)


@cache
def imported(module: str) -> tuple[str, ...]:
    """The modules of the package that a module imports itself."""
    file = _file(module)
    return tuple(_imports(ast.parse(file.read_text(encoding="utf-8")))) if file else ()


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(PACKAGE))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            yield node.module
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in inner if _file(name))


@cache
def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    choices = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in choices if file.is_file()), None)
