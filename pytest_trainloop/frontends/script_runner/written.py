"""The test file for a script: its loop given to the checks, as far as it is known; else the script itself, run once."""

from __future__ import annotations

import os
import re
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_trainloop.declare.script import WATCHED_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.frontends.script_runner.handover import Loop
    from pytest_trainloop.frontends.script_runner.options import Options
    from pytest_trainloop.frontends.script_runner.target import Target
    from pytest_trainloop.frontends.script_runner.values import Imports

LINE = 108
"""Characters of a line in a function."""


def alias_of(target: Target) -> str:
    """The name by which the test refers to the script: one that neither Python nor the test uses."""
    stem = target.name.rpartition(".")[2] if target.is_module else Path(target.name).resolve().stem
    name = re.sub(r"[^0-9a-zA-Z_]", "_", stem)
    return f"{'_' if name[:1].isdigit() else ''}{name}_script"


def test_file(loop: Loop, imports: Imports, target: Target, file: Path) -> str:
    """The text of the file."""
    body = "\n".join(f"    {line}".rstrip() for line in _body(loop, imports, target))
    parts = [_loading(target, file)] if imports.script_used else []
    parts.append(f"@pytest.mark.trainloop\ndef {_name(target)}():\n{body}")
    code = "\n\n\n".join(parts)
    docstring = (
        f'"""The loop of {_shown(target)}, given to all checks: pytest --trainloop.\n\n'
        "Written by python -m pytest_trainloop --write-test from what the script made when it ran. Look it through:\n"
        'values are those of that run.\n"""\n\nfrom __future__ import annotations'
    )
    return f"{docstring}\n\n{_imports(loop, imports, code)}\n\n\n{code}\n"


def script_file(loop: Loop, imports: Imports, options: Options, file: Path, *, torchrun: bool) -> str:
    """The text of a file whose test runs the script itself, once; a comment has what is known of the better form."""
    target = options.target
    given = [repr(target.name), *([repr(list(target.args))] if target.args else [])]
    given.append(f"cwd={path_code(Path.cwd(), file)}")
    given += ["module=True"] * target.is_module + ["torchrun=True"] * torchrun
    given += [f"steps={options.steps}"] * (options.steps != WATCHED_STEPS)
    given += [f"limit_batches={options.limit_batches}"] * bool(options.limit_batches)
    made = "\n".join(f"    {part}" for part in _wrapped(f"return Script({', '.join(given)})"))
    missing = "\n".join(
        textwrap.fill(sentence, LINE, initial_indent="- ", subsequent_indent="  ", break_long_words=False)
        for sentence in loop.missing
    )
    known = ""
    if loop.fields:
        body = "\n".join(f"#     {line}".rstrip() for line in _body(loop, imports, target, begun=True))
        known = f"\n\n# As a TrainLoop, as far as it is known; {alias_of(target)} is the script, imported:\n#\n{body}\n"
    return OF_A_SCRIPT.format(shown=_shown(target), missing=missing, name=_name(target), made=made, known=known)


OF_A_SCRIPT = '''"""{shown} as a test: pytest --trainloop.

Written by python -m pytest_trainloop --write-test. The script is run once, from the start, with the arguments below.
Checks that run a loop again, with one thing changed, are skipped. They take a TrainLoop, whose fit is a function of
its batches. For it this is missing:

{missing}
"""

from __future__ import annotations

import pytest
from pathlib import Path
from pytest_trainloop import Script


@pytest.mark.trainloop
def {name}():
{made}
{known}'''


def _name(target: Target) -> str:
    return f"test_{alias_of(target).removesuffix('_script').lstrip('_')}"


def _shown(target: Target) -> str:
    return f"-m {target.name}" if target.is_module else target.name


def _imports(loop: Loop, imports: Imports, code: str) -> str:
    """The imports of what the code names: of what was tried and given up there are more."""
    lines = set(imports.lines) | {"import pytest", "import functools", "import importlib.util", "import importlib"}
    lines |= {"import sys", "from pathlib import Path", "from unittest import mock"}
    if not loop.adapter:
        lines.add("from pytest_trainloop import TrainLoop")
    used = {line for line in lines if re.search(rf"\b{re.escape(line.split()[-1])}\b[.(]", code)}
    used.add("import pytest")
    if "import importlib.util" in used:
        used.discard("import importlib")
    plain = sorted(line for line in used if line.startswith("import"))
    return "\n".join([*plain, *sorted(line for line in used if line.startswith("from"))])


def _loading(target: Target, file: Path) -> str:
    """A function that imports the script: its ``if __name__ == "__main__"`` block does not run."""
    alias = alias_of(target)
    argv = [target.name, *target.args]
    if target.is_module:
        load = [f"    sys.path.insert(0, str({path_code(Path.cwd(), file)}))"]
        load += [
            f'    with mock.patch.object(sys, "argv", {argv!r}):',
            f'        return importlib.import_module("{target.name}")',
        ]
    else:
        script = Path(target.name).resolve()
        script = script / "__main__.py" if script.is_dir() else script
        load = [
            f"    path = {path_code(script, file)}",
            "    sys.path.insert(0, str(path.parent))",
            f'    spec = importlib.util.spec_from_file_location("{alias}", path)',
            "    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)",
            f'    with mock.patch.object(sys, "argv", {argv!r}):',
            "        spec.loader.exec_module(module)",
            "    return module",
        ]
    return "\n".join(
        [
            "@functools.cache",
            "def load():",
            '    """The script, imported with the arguments that it was run with."""',
            *load,
        ]
    )


def path_code(wanted: Path, file: Path) -> str:
    """Code for a path: from the test file where the two lie in one project and move together; as it is elsewhere."""
    folder, wanted = file.parent.resolve(), wanted.resolve()
    shared = Path(os.path.commonpath([folder, wanted]))
    together = shared not in (Path(shared.anchor), Path.home(), Path(tempfile.gettempdir()).resolve())
    if not together:
        return f'Path("{_plain(str(wanted))}")'
    path = os.path.relpath(wanted, folder)
    return "Path(__file__).parent" + (f' / "{_plain(path)}"' if path != "." else "")


def _plain(path: str) -> str:
    return path.replace(os.sep, "/").replace('"', '\\"')


def _body(loop: Loop, imports: Imports, target: Target, *, begun: bool = False) -> Sequence[str]:
    """The lines of the function, with ``...`` for what is missing. One that is only ``begun`` has no data, and no
    function that imports the script."""
    lines: list[str] = []
    if imports.script_used and not begun:
        lines.append(f"{alias_of(target)} = load()")
    if loop.data and begun:
        lines.append("data = ...  # a small DataLoader that gives what the script's gives")
    elif loop.data:
        kept = "rows" if loop.kept is not None else "random numbers, of the shapes and ranges"
        lines += [f"# {kept} that the script's data had", loop.data]
    lines += loop.statements
    if loop.fit:
        lines += ["", "def fit(batches):", *(f"    {line}" for line in loop.fit), ""]
    further = [] if loop.adapter else [f"# give {field} too, from {call}" for field, call in loop.further.items()]
    needed = ("model", "optimizer", "batch", "fit") if loop.missing else ()
    order = ("model", "optimizer", "batches", "batch", "fit")
    given = [f"    {n}={loop.fields.get(n, '...')}," for n in order if n in loop.fields or n in needed]
    lines += [f"return {loop.adapter}"] if loop.adapter else [*further, "return TrainLoop(", *given, ")"]
    return [part for line in lines for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    """A line that is too long with each argument of its outermost call on a line of its own."""
    code, _, comment = line.partition("  # ")
    comment = f"  # {comment}" if comment else ""
    text = code.rstrip(",")
    start = _opening(text)
    if len(line) <= LINE or start is None:
        return [line]
    indent = " " * (len(code) - len(code.lstrip()))
    inner = [part.strip() for part in _split(text[start + 1 : -1])]
    rest = code[len(text) :]
    parts = [each for part in inner for each in _wrapped(f"{indent}    {part},")]
    return [f"{text[: start + 1]}{comment}", *parts, f"{indent}{text[-1]}{rest}"]


def _opening(text: str) -> int | None:
    """Where the bracket opens that the last character of a line closes."""
    depth, quote, openings = 0, "", []
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[at - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            openings.append(at)
        elif char in ")]}":
            depth = openings.pop() if openings else 0
    return depth if text.endswith(")") and not quote and not openings else None


def _split(text: str) -> list[str]:
    """The parts between the outermost commas."""
    parts, depth, quote, since = [], 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[at - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and not depth:
            parts.append(text[since:at])
            since = at + 1
    return [part for part in (*parts, text[since:]) if part.strip()]
