"""The planted faults are named as their table says; the README shows what pytest really prints."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = re.compile(
    r"^\| \[`(?P<fault>\w+)`\].*\| `(?P<check>\w+)` \| `(?P<cause>\w+)`(?P<advice> \(advice\))? \|$", re.M
)


def rows():
    return list(TABLE.finditer((ROOT / "examples/planted/README.md").read_text(encoding="utf-8")))


def chosen(number, row):
    """The items of a fault that are run: all of every eighth (with TRAINLOOP_WHOLE=1 of all), else its own check."""
    whole = os.environ.get("TRAINLOOP_WHOLE") or number % 8 == 0
    return f"test_{row['fault']}" if whole else f"(test_{row['fault']} and {row['check']})"


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The JSON report on the planted faults, by fault."""
    report = tmp_path_factory.mktemp("planted") / "report.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--trainloop",
        "examples/planted/test_planted.py",
        "-q",
        "-p",
        "no:randomly",
        "--trainloop-timeout=600",  # a slow machine shall change no verdict
        "-k",
        " or ".join(chosen(number, row) for number, row in enumerate(rows())),
    ]
    subprocess.run([*command, f"--trainloop-json={report}"], cwd=ROOT, check=False, capture_output=True, timeout=1500)
    loops = json.loads(report.read_text(encoding="utf-8"))["loops"]
    return {loop["nodeid"].rpartition("::test_")[2]: loop["checks"] for loop in loops}


@pytest.mark.processes
def test_every_planted_fault_is_named_as_the_table_says(planted):
    assert len(rows()) == 62
    wrong = []
    for row in rows():
        findings = [f for check in planted[row["fault"]] for f in check["findings"]]
        found = [(f["check"], f["cause"], f["level"]) for f in findings]
        wanted = (row["check"], row["cause"], "advice" if row["advice"] else "fault")
        explained = {name for f in findings if (f["check"], f["cause"]) == wanted[:2] for name in f["explains"]}
        others = [f for f in found if f[2] == "fault" and f != wanted and f[0] not in explained]
        if wanted not in found or others:
            wrong.append((row["fault"], wanted, found))
    assert not wrong
