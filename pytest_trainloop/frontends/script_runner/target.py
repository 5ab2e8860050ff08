"""The script or module that is run, as Python itself would run it."""

from __future__ import annotations

import builtins
import importlib.util
import io
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.errors import UsageError

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


@dataclass(frozen=True, slots=True)
class Target:
    """What is run: a file, or with ``-m`` a module by its dotted name."""

    name: str
    """As the user gave it."""
    is_module: bool
    args: tuple[str, ...] = ()
    """What follows it on the command line."""

    def prepare(self) -> types.CodeType:
        """Make ``__main__``, ``sys.argv`` and ``sys.path[0]`` what they are where Python runs the script, and return
        its code.

        Raises ``UsageError`` where there is no such script, and ``SyntaxError`` as Python does.
        """
        return self._prepare_module() if self.is_module else self._prepare_file()

    def _prepare_file(self) -> types.CodeType:
        script = Path(self.name)
        if script.is_dir() and not (script / "__main__.py").is_file():
            raise UsageError(
                f"{self.name} is a folder, and has no __main__.py; give the script in it, or start from the folder "
                "that holds the package: -m package.train"
            )
        file = Path.cwd() / (script / "__main__.py" if script.is_dir() else script)
        path = str(file)
        try:
            with io.open_code(path) as opened:
                source = opened.read()
        except OSError as error:
            needed = "the path of a Python script is needed"
            raise UsageError(f"{self.name} cannot be run: {error.strerror}; {needed}") from None
        # Python puts a folder on the path as it is, and of a script that is a link the folder of the file itself.
        _search_first(str(Path.cwd() / script if script.is_dir() else file.resolve().parent))
        code = compile(source, path, "exec", dont_inherit=True)
        self._become_main(path, None)
        return code

    def _prepare_module(self) -> types.CodeType:
        _search_first(str(Path.cwd()))
        spec = _spec_of(self.name)
        loader: Any = spec.loader
        code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
        if code is None:
            raise UsageError(f"-m {self.name}: there is no Python code for this module")
        self._become_main(spec.origin or self.name, spec)
        return code  # type: ignore[no-any-return]

    def _become_main(self, path: str, spec: ModuleSpec | None) -> None:
        """A fresh ``__main__``: pickle and multiprocessing look classes up there, and child processes run its file."""
        main = types.ModuleType("__main__")
        main.__file__ = path
        main.__spec__ = spec
        main.__dict__["__builtins__"] = builtins
        if spec is not None:
            main.__package__ = spec.parent
            main.__loader__ = spec.loader
        sys.modules["__main__"] = main
        sys.argv[:] = [path if self.is_module else self.name, *self.args]
        sys.orig_argv[:] = [sys.executable, *(("-m",) if self.is_module else ()), self.name, *self.args]


def run(code: types.CodeType) -> None:
    """Run the code of a prepared target; raises what it raises."""
    exec(code, sys.modules["__main__"].__dict__)


def _search_first(folder: str) -> None:
    """Put the folder where Python itself puts it: in the place of the working directory of ``python -m``."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _spec_of(name: str) -> ModuleSpec:
    """The spec of the module, or of the ``__main__`` of a package."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise UsageError(f"-m {name} cannot be run: {error}") from None
    if spec is None:
        raise UsageError(
            f"-m {name} cannot be run: there is no such module (or no __main__ in the package) on the path; start from "
            "the folder that holds it"
        )
    return spec
