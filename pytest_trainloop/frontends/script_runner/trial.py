"""A written test, tried as its reader will run it: what cannot be run is not left behind."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from pytest_trainloop.core.report.entry import entries_of
from pytest_trainloop.judging.script import run

CHECKS = "optimizer_holds_every_param,step_order,finite"
"""Three that look at the watched run alone."""

SECONDS = 120.0


def refusal(test: Path, folder: Path) -> str:
    """Why pytest judges nothing by a test file; empty where it does."""
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary, "results.json")
        options = ["--trainloop", f"--trainloop-only={CHECKS}", f"--trainloop-json={results}"]
        try:
            _, said = run(["pytest", *options, "-o", "addopts=", "-p", "no:cacheprovider", str(test)], folder, SECONDS)
        except subprocess.TimeoutExpired:
            return f"it was not through in {SECONDS:g} s"
        document = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {"loops": []}
    found = [entry.result for entry in entries_of(document)]
    if any(result.outcome in ("passed", "failed") for result in found):
        return ""
    errors = [line.removeprefix("E").strip() for line in said.splitlines() if line.startswith("E  ")]
    reasons = [result.reason.partition("\n")[0] for result in found if result.outcome == "error"]
    return next(iter([*reasons, *errors]), "no check could decide")
