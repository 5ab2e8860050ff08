"""One session over many loops that cannot be judged: what is said of each, how often, and where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest_trainloop
from tests.helpers.plugin_sessions import HEAD

CHECKS = ("step_order", "train_mode", "accumulation_equivalence")
"""The checks that judge each loop: the first meets what is refused, the others name it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a session said of one marked function."""

    failures: list[str]
    """Of its items, as shown."""
    skips: list[str]
    """Reasons of the others."""
    passed: int
    here: int
    """The line of the file that is marked so."""


def values_of(
    field: str, needed: str, values: dict[str, str], *, given: str = "loop({field}={value})"
) -> dict[str, tuple[str, str]]:
    """Sources in which a field is given each value, and what is said of each: ``values`` maps code to its words."""
    return {
        f"{field}-{number}-{words[:18]}": (
            f"return {given.format(field=field, value=value)}",
            f"TrainLoop.{field}{'' if words[0] in ':[' else ' '}{words}; {needed}",
        )
        for number, (value, words) in enumerate(values.items())
    }


def marked(name: str, source: str) -> str:
    """A marked function of this name; of a body, or of whole code in which ``test_it`` is it."""
    if "def test_it" not in source:
        source = f"@pytest.mark.trainloop\ndef test_it():\n{textwrap.indent(textwrap.dedent(source).strip(), '    ')}"
    return re.sub(r"\btest_it\b", test_name(name), textwrap.dedent(source)).strip()


def test_name(name: str) -> str:
    return f"test_{re.sub(r'[^a-z0-9]+', '_', name.lower())}"


test_name.__test__ = False  # type: ignore[attr-defined]


def judged(folder: Path, sources: dict[str, str]) -> dict[str, Said]:
    """What is said of each, by one session over one file with all of them."""
    file = folder / "test_loops.py"
    file.write_text("\n\n\n".join([textwrap.dedent(HEAD), *(marked(n, s) for n, s in sources.items())]), "utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "CI", "BUILD_NUMBER"))}
    environment["PYTHONPATH"] = str(Path(pytest_trainloop.__file__).parents[1])
    options = ["-p", "no:randomly", "--trainloop", f"--trainloop-only={','.join(CHECKS)}", "--trainloop-json=out.json"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 1, run.stdout + run.stderr
    for never in ("pytest_trainloop/", "please report", "INTERNALERROR"):
        assert never not in (run.stdout + run.stderr), run.stdout
    loops = json.loads((folder / "out.json").read_text("utf-8"))["loops"]
    lines = file.read_text("utf-8").splitlines()
    return {name: _said(test_name(name), loops, run.stdout, lines) for name in sources}


def _said(test: str, loops: list[dict], output: str, lines: list[str]) -> Said:
    checks = [check for loop in loops if loop["nodeid"].endswith(f"::{test}") for check in loop["checks"]]
    start = next(i for i, line in enumerate(lines) if line.startswith(f"def {test}("))
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith(("def test_", "@pytest"))), len(lines))
    begin = max((i for i in range(start) if not lines[i] and not lines[i - 1]), default=0)
    here = next((i + 1 for i in range(begin, end) if lines[i].endswith("# here")), 0)
    return Said(
        failures=_shown(test, output),
        skips=[c["reason"] for c in checks if c["outcome"] == "skipped"],
        passed=sum(c["outcome"] == "passed" for c in checks),
        here=here,
    )


def _shown(test: str, output: str) -> list[str]:
    """The texts under the headers of a function's failures and errors."""
    parts = re.split(r"^_{3,} (.+?) _{3,}$", output.partition("= trainloop =")[0], flags=re.MULTILINE)
    titled = zip(parts[1::2], parts[2::2], strict=True)
    own = [text for title, text in titled if re.search(rf"\b{test}(\[|$)", title)]
    return [re.split(r"^=====", text, flags=re.MULTILINE)[0].strip() for text in own]
