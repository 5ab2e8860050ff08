"""The house rule: imports run downward, no check imports another, and what is heavy stays where it belongs."""

from __future__ import annotations

import ast
import graphlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pytest_trainloop

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(pytest_trainloop.__file__).parent
NAME = "pytest_trainloop"

ROOMS = (
    ("frontends", "__main__"),
    ("views",),
    ("judging",),
    ("checks",),
    ("instruments", "adapters"),
    ("runs",),
    ("recording",),
    ("declare",),
    ("core",),
)
"""From the top down. A module imports from its own room, one on its floor or a lower one, also for typing."""

FLOOR = {name: floor for floor, names in enumerate(ROOMS) for name in names}

HEAVY = ("torch", "hypothesis", "numpy")
LIGHT = (
    "frontends.api",
    "frontends.plugin",
    "views.outputs",
    "judging",
    "instruments.records",
    *(f"declare.{name}" for name in ("baseline_file", "knobs", "selection")),
    "core",
)
"""Packages and modules without torch, Hypothesis or NumPy at module top."""

PRIVATE_NAMES = (
    "recording.torch_internals",
    "recording.mode_stack",
    "recording.compiler_internals",
    "core.members",
)
"""The only modules that name anything of torch which begins with an underscore."""

PRIVATE_BY_PYTHON = frozenset({"_getframe", "_current_frames", "_exit", "_fields", "_asdict", "_run_exitfuncs"})
"""What ``sys``, ``os``, ``atexit`` and named tuples offer to everyone in spite of the underscore."""

OF_FRAMEWORKS = ("adapters.", "runs.accelerate_state")
"""Modules that read private names of the training frameworks that they serve."""

FILES = sorted(ROOT.rglob("*.py"))


def every_file(rule):
    """One test of a rule that holds for every file: an item a file would cost more than what it tests."""

    def test():
        broken = []
        for file in FILES:
            try:
                rule(file)
            except AssertionError as error:
                broken.append(f"{file.relative_to(ROOT)}: {error}")
        assert not broken, "\n".join(broken)

    test.__name__ = rule.__name__
    return test


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {module_of(file) for file in FILES}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(tree: ast.AST, *, in_functions: bool = True, for_typing: bool = True) -> Iterator[str]:
    """The dotted names that a file imports: with ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (name for alias in node.names for name in (str(node.module), f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for part in [*(node.body if for_typing else ()), *node.orelse]:
                yield from imports(ast.Module([part], []), in_functions=in_functions, for_typing=for_typing)
        elif in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(node, in_functions=in_functions, for_typing=for_typing)


@cache
def own_imports(file: Path) -> set[str]:
    """The modules of this package that a file imports."""
    names = {name.removeprefix(f"{NAME}.") for name in imports(parsed(file)) if name.startswith(f"{NAME}.")}
    found = names & MODULES
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)} - {module_of(file)}


def check_of(module: str) -> tuple[str, ...] | None:
    """The family and name of the check whose package a module lies in: ``checks.wiring.step_order.windows``."""
    parts = module.split(".")
    return tuple(parts[1:3]) if parts[0] == "checks" and len(parts) > 3 else None


@every_file
def test_imports_run_downward(file):
    own = module_of(file)
    if not own:
        return  # the public names, which are loaded from everywhere
    top = own.split(".")[0]
    assert top in FLOOR, f"{top} is no room: give it its place in ROOMS"
    for other in sorted(own_imports(file)):
        assert FLOOR[other.split(".")[0]] >= FLOOR[top], f"{own} imports {other}, which lies above"


@every_file
def test_no_check_imports_another(file):
    own = module_of(file)
    if own.startswith(("views.", "frontends.script_runner.ranks")):
        return  # it shows what several of them know, or notes for one what further processes do
    for other in sorted(own_imports(file)):
        assert check_of(other) in (None, check_of(own)), (
            f"{own} imports {other}: what two checks share belongs in their family's folder or in an instrument"
        )


FACES = (
    *("instruments.formulas.catalogue", "instruments.formulas.search", "runs.ranks.launch"),
    "recording.compiler_internals",
)
"""Modules of an instrument that one check calls, and that belong to the rest of it."""


def test_what_one_check_uses_lies_in_it():
    users: dict[str, set[str]] = {}
    for file in FILES:
        for other in own_imports(file):
            users.setdefault(other, set()).add(module_of(file))
    for module, those in users.items():
        of = {check_of(user) for user in those}
        assert module in FACES or len(of) > 1 or of <= {None, check_of(module)}, f"{module} is used by {of.pop()} alone"


def test_no_circles():
    order = graphlib.TopologicalSorter({module_of(file): own_imports(file) for file in FILES if module_of(file)})
    order.prepare()  # raises CycleError, which names the circle


def test_few_rooms_and_few_arrows_between_them():
    room = {module: module.split(".")[0] for module in MODULES}
    pairs = {(room[module_of(file)], room[other]) for file in FILES for other in own_imports(file) if module_of(file)}
    assert len(set(room.values()) - {""}) <= 11
    assert len({(one, other) for one, other in pairs if one != other}) <= 40


@every_file
def test_heavy_imports_at_module_top_stay_below(file):
    own = module_of(file)
    if own.startswith(LIGHT) or own.endswith(".check") or not own:
        heavy = {name.split(".")[0] for name in imports(parsed(file), in_functions=False, for_typing=False)}
        assert not heavy & set(HEAVY)


@every_file
def test_records_know_no_torch(file):
    if module_of(file).startswith("instruments.records"):
        assert "torch" not in {name.split(".")[0] for name in imports(parsed(file))}


@every_file
def test_private_names_of_torch_stand_in_one_file(file):
    if module_of(file) in PRIVATE_NAMES:
        return
    tree = parsed(file)
    private = [
        name
        for name in imports(tree)
        if name.startswith("torch") and any(part.startswith("_") and part != "__future__" for part in name.split("."))
    ]
    private += [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node).startswith("torch.")
    ]
    assert not private, f"{private}: {PRIVATE_NAMES[0]} is the place for them"


@every_file
def test_hooks_of_torch_are_put_on_in_one_file(file):
    """Those put on elsewhere would not stand aside while torch traces, or be copied with the project's model."""
    if module_of(file) == "recording.hooks":
        return
    for node in ast.walk(parsed(file)):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        own = {"register_step_pre_hook"} if module_of(file) == "recording.steps" else set()  # for the length of a step
        assert not (name.startswith("register_") and name.endswith("hook") and name not in own), name


@every_file
def test_no_private_name_is_read_that_the_package_does_not_define(file):
    """``func._schema``, ``optimizer._optimizer_step_pre_hooks``: torch's private names on objects of any name."""
    if module_of(file) in PRIVATE_NAMES or module_of(file).startswith(OF_FRAMEWORKS):
        return
    tree = parsed(file)
    of_others = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls")
        and node.attr not in PRIVATE_BY_PYTHON | bound(tree)
    ]
    assert not of_others, f"{of_others}: {PRIVATE_NAMES[0]} is the place for what is torch's"


def bound(tree: ast.Module) -> set[str]:
    """The names that a file gives to functions, classes, fields and attributes."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    targets = (t for node in ast.walk(tree) for t in _targets(node))
    return names | {ast.unparse(target).rpartition(".")[2] for target in targets}


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [part for target in node.targets for part in getattr(target, "elts", [target])]
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


@every_file
def test_pytest_stays_in_the_plugin_and_only_its_public_side_is_used(file):
    names = {name.split(".")[0] for name in imports(parsed(file))}
    assert "_pytest" not in names
    assert "pytest" not in names or module_of(file).startswith("frontends.plugin")


@every_file
def test_the_package_finds_its_own_files_in_one_place(file):
    if module_of(file) != "core.paths":
        assert "__file__" not in {node.id for node in ast.walk(parsed(file)) if isinstance(node, ast.Name)}


def test_the_caller_of_fit_is_where_paths_says():
    from pytest_trainloop.core import paths
    from pytest_trainloop.runs import guard

    assert guard.__file__ == paths.FIT_CALLER


@pytest.mark.parametrize(
    "module", ["__init__", "frontends/__init__", "frontends/plugin/__init__", "frontends/plugin/options"]
)
def test_what_every_start_loads_is_not_rewritten(module):
    assert "PYTEST_DONT_REWRITE" in (ast.get_docstring(parsed(ROOT / f"{module}.py")) or "")
