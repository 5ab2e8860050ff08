"""How many files of the package a failure walks through: from ``pytest --trainloop`` to the printed text.

python scripts/walks.py [--json]

Each of four checks meets a loop with a fault of its own, in a process of its own. A file counts once a function in it
is called; what runs while modules are imported does not count. The table also has the package's size and its imports,
counted from its own statements.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=generator), torch.arange(8) % 3


@pytest.mark.trainloop
def test_it({knobs}):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
"""

TAIL = """
    return TrainLoop(model=model, optimizer=optimizer, batch=data(), fit=fit)
"""

LOOPS = {
    "step_order": (
        "",
        """
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
""",
    ),
    "accumulation_equivalence": (
        "accumulate=1",
        """
        for i, (x, y) in enumerate(batches):
            F.cross_entropy(model(x), y).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
""",
    ),
    "precision_parity": (
        'precision="fp32"',
        """
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                hidden = model[1](model[0](x))
                far = hidden.to(torch.bfloat16 if precision == "bf16" else torch.float32) + 1000
                loss = F.cross_entropy(model[2]((far - 1000).float()), y)
            loss.backward()
            optimizer.step()
""",
    ),
    "loss_contract": (
        "",
        """
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x).softmax(1), y).backward()
            optimizer.step()
""",
    ),
}


def package() -> Path:
    import pytest_trainloop

    return Path(pytest_trainloop.__file__).parent


def walk(check: str) -> dict[str, Any]:
    """The files entered while one check judges its loop, in the order of their first call."""
    knobs, body = LOOPS[check]
    root, entered = str(package()), dict[str, None]()

    def profile(frame: Any, event: str, _arg: Any) -> None:
        code = frame.f_code
        function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")  # no class body, no module
        if event == "call" and function and code.co_filename.startswith(root):
            entered.setdefault(code.co_filename, None)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test_loop.py"
        file.write_text(HEAD.replace("{knobs}", knobs) + body + TAIL, encoding="utf-8")
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            words = ["--trainloop", f"--trainloop-only={check}", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
            code = pytest.main([*words, f"--rootdir={folder}", str(file)])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    files = [Path(name).relative_to(root) for name in entered]
    below = [file for file in files if file.parts[0] != "plugin"]
    return {
        "failed": code == 1,
        "files": len(files),
        "folders below plugin": len({file.parent for file in below if file.parent != Path()}),
        "files of the check's own": sum(check in file.parts for file in files),
        "in order": [str(file) for file in files],
    }


def in_a_process_of_its_own(check: str) -> dict[str, Any]:
    words = [sys.executable, __file__, "--walk", check]
    found: dict[str, Any] = json.loads(
        subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )
    return found


def size() -> dict[str, int]:
    files = sorted(package().rglob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    lines = [text.count("\n") for text in texts]
    arrows = {(file, name) for file, text in zip(files, texts, strict=True) for name in _imports(ast.parse(text))}
    return {
        "modules": len(files),
        "modules with code": sum(len(ast.parse(text).body) > 1 for text in texts),
        "lines": sum(lines),
        "longest file": max(lines),
        "imports from one module to another": len(arrows),
    }


def _imports(tree: ast.Module) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {str(node.module) for node in nodes if str(node.module).startswith("pytest_trainloop.")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything, the order of the files included")
    parser.add_argument("--walk", choices=LOOPS, help="one of the walks alone, as JSON in the last line")
    given = parser.parse_args()
    if given.walk:
        print(f"\n{json.dumps(walk(given.walk))}")
        return 0
    found = {"size": size(), **{check: in_a_process_of_its_own(check) for check in LOOPS}}
    if given.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, figures in found.items():
        print(f"{name}: {', '.join(f'{value} {key}' for key, value in figures.items() if key != 'in order')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
