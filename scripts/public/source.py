"""Run the source of a public script unchanged, except its data and its output."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, patch

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Source:
    """A script of a checkout. Its statements are run up to its training loop; ``skip`` names texts of statements that
    are left out (they read data), ``settings`` are put into its parsed arguments."""

    def __init__(self, path: Path, skip: tuple[str, ...] = (), settings: dict[str, Any] | None = None, **names: Any):
        self.text = path.read_text(encoding="utf-8")
        self.path, self.settings = path, settings or {}
        module = ModuleType(f"public_{path.stem}")
        sys.modules[module.__name__] = module  # where dataclasses look for the names of their fields' types
        self.names = vars(module)
        self.names.update(__builtins__=_lenient(path.parent), __file__=str(path), **names)
        self.loop: ast.stmt | None = None
        argv, sys.argv = sys.argv, [str(path)]
        try:
            for statement in ast.parse(self.text).body:
                text = ast.get_source_segment(self.text, statement) or ""
                if isinstance(statement, (ast.For, ast.While, ast.Try)) and (".backward(" in text or "train(" in text):
                    self.loop = statement
                    break
                if not any(words in text for words in (*skip, "__main__")):
                    self._run(statement)
        finally:
            sys.argv = argv

    def _run(self, *statements: ast.stmt) -> None:
        exec(compile(ast.Module([*statements], []), str(self.path), "exec"), self.names)
        for name in ("opt", "args"):
            for field, value in self.settings.items():
                if name in self.names and not isinstance(self.names[name], MagicMock):
                    setattr(self.names[name], field, value)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]

    def train(self, **names: Any) -> None:
        """Run the script's own training loop with these names replaced."""
        assert self.loop is not None
        self.names.update(names)
        self._run(self.loop)

    def nested(self, function: str, **names: Any) -> Any:
        """A function that is defined inside another one, with these names for its variables."""
        found = [n for n in ast.walk(ast.parse(self.text)) if isinstance(n, ast.FunctionDef) and n.name == function]
        self.names.update(names)
        self._run(found[0])
        return self.names[function]

    def block(self, first: str, **names: Any) -> None:
        """Run the outermost loop inside the script whose first line begins with ``first``."""
        loops = (n for n in ast.walk(ast.parse(self.text)) if isinstance(n, (ast.For, ast.While, ast.If)))
        found = next(n for n in loops if (ast.get_source_segment(self.text, n) or "").startswith(first))
        self.names.update(names)
        self._run(found)


def _lenient(folder: Path) -> dict[str, Any]:
    """Builtins with an import that gives a stand-in for what is not installed, and looks next to the script first."""

    def lenient(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        own = folder / f"{name.replace('.', '/')}.py"
        if level == 0 and own.exists():
            module = ModuleType(name)
            vars(module).update(Source(own).names)
            return module
        if name == "torch.utils.tensorboard":
            return MagicMock(name=name)  # it may be there and fail, after a long time
        try:
            return builtins.__import__(name, globals_, locals_, fromlist, level)
        except Exception:
            return MagicMock(name=name)

    return {**vars(builtins), "__import__": lenient, "print": lambda *_values, **_settings: None}


class Loader:
    """Batches with what scripts ask of a DataLoader."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.dataset = range(96)
        self.batch_size = 8

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return 12


@cache
def imported(folder: Path, name: str, bare: str = "") -> Any:
    """A module of a checkout, imported as from ``folder``, with stand-ins for packages that are not installed.

    Its checkout's modules are forgotten again, since many checkouts have a ``utils`` and a ``models``. The package
    ``bare`` is entered without its ``__init__``, which imports more than the loop needs.
    """
    before, stubs = set(sys.modules), ["torch.utils.tensorboard"]
    sys.path.insert(0, str(folder))
    if bare:
        sys.modules[bare] = ModuleType(bare)
        sys.modules[bare].__path__ = [str(folder / bare)]
    try:
        while True:
            for stub in set(stubs) - before:
                sys.modules[stub] = MagicMock(name=stub, __path__=[], __spec__=ModuleSpec(stub, None))
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name is None or error.name in stubs:
                    raise
                stubs.append(error.name)
    finally:
        sys.path.remove(str(folder))
        made = {key: sys.modules[key] for key in set(sys.modules) - before}
        places = {key: (getattr(m, "__file__", None), *getattr(m, "__path__", ())) for key, m in made.items()}
        for key in made:  # a part of a package looks for its path in the whole: none may be gone before
            if key in stubs or any(str(folder) in str(place) for place in places[key]):
                del sys.modules[key]


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """What scripts move to a GPU stays where it is, and a process group has one rank: this process."""
    same = {"cuda": lambda self, *_args, **_settings: self}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with (
        patch.multiple(torch.Tensor, **same),
        patch.multiple(torch.nn.Module, **same),
        patch.object(torch.cuda, "synchronize", lambda *_args: None),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(torch.distributed.destroy_process_group)
        yield


class Nothing:
    """A writer, logger or progress bar that does nothing and, unlike a mock, keeps nothing."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __call__(self, *_values: Any, **_settings: Any) -> Nothing:
        return self


def definitions(path: Path) -> SimpleNamespace:
    """The imports, functions and classes of a notebook or a script, without what it runs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        sources = ("".join(cell["source"]) for cell in cells)
        text = "\n".join(source for source in sources if not source.startswith(("%", "!")))
    kinds = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef
    module = ModuleType(f"public_{path.stem}")
    sys.modules[module.__name__] = module
    names = vars(module)
    names["__builtins__"] = _lenient(path.parent)
    kept: list[ast.stmt] = [statement for statement in ast.parse(text).body if isinstance(statement, kinds)]
    exec(compile(ast.Module(kept, []), str(path), "exec"), names)
    return SimpleNamespace(names=names, **{key: value for key, value in names.items() if not key.startswith("__")})
