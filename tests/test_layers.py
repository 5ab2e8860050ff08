"""Imports run downward only, and the heavy ones stay where they belong."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pytest_trainloop

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(pytest_trainloop.__file__).parent
NAME = "pytest_trainloop"

# From the top down. A package counts as one layer: its modules may import each other.
LAYERS = (
    *("plugin", "explain", "runner", "baseline", "report", "checks", "evidence", "observe", "adapters", "strategies"),
    *("roles", "losscases", "batch", "loop", "contract", "plan", "knobs", "wording", "finding", "weighing", "errors"),
)
HEAVY = ("torch", "hypothesis", "numpy")
MAY_BE_HEAVY = ("evidence", "observe", "adapters", "strategies", "roles", "losscases", "batch", "loop")

FILES = sorted(ROOT.rglob("*.py"))
IDS = [str(file.relative_to(ROOT)) for file in FILES]


def layer(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST, *, nested: bool = True) -> Iterator[str]:
    """The modules that a file imports, outside ``if TYPE_CHECKING``; with ``nested`` also inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from (name for other in node.orelse for name in imports(other, nested=nested))
        elif nested or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(node, nested=nested)


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_imports_run_downward(file):
    own = layer(file)
    if own == "__init__":
        return  # the public names, which are loaded from everywhere
    assert own in LAYERS, f"{own} is in no layer: give it its place in the list above"
    for name in imports(parsed(file)):
        if name.startswith(f"{NAME}."):
            other = name.split(".")[1]
            assert other in LAYERS, f"imports {name}"
            assert LAYERS.index(other) >= LAYERS.index(own), f"imports {name}, which lies above"


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_heavy_imports_at_module_top_stay_below(file):
    heavy = {name.split(".")[0] for name in imports(parsed(file), nested=False)} & set(HEAVY)
    assert not heavy or layer(file) in MAY_BE_HEAVY


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_pytest_stays_in_the_plugin_and_only_its_public_side_is_used(file):
    names = {name.split(".")[0] for name in imports(parsed(file))}
    assert "_pytest" not in names
    assert "pytest" not in names or layer(file) == "plugin"


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_a_check_imports_no_other_check(file):
    if layer(file) == "checks" and file.name != "__init__.py":
        own = f"{NAME}.checks.{file.stem}"
        others = {f"{NAME}.checks.{other.stem}" for other in file.parent.glob("*.py") if other.stem != "__init__"}
        assert not {
            name for name in imports(parsed(file)) if name in others - {own} or name.rpartition(".")[0] in others
        }


@pytest.mark.parametrize("module", ["__init__", "plugin/__init__", "plugin/options"])
def test_what_every_start_loads_is_not_rewritten(module):
    assert "PYTEST_DONT_REWRITE" in (ast.get_docstring(parsed(ROOT / f"{module}.py")) or "")
