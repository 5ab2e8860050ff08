"""The planted faults are named as their table says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^\| \[`(?P<fault>\w+)`\].*\| `(?P<check>\w+)` \| `(?P<cause>\w+)` \|$", re.M)
ROWS = list(TABLE.finditer((ROOT / "examples/planted/README.md").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The JSON report on the planted faults, by fault."""
    report = tmp_path_factory.mktemp("planted") / "report.json"
    options = [
        "-q",
        "-n",
        "2",
        "-p",
        "no:randomly",
        "--trainloop-timeout=600",
    ]  # a slow machine shall change no verdict
    subprocess.run(
        [sys.executable, "-m", "pytest", "--trainloop", "examples/planted", *options, f"--trainloop-json={report}"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        timeout=1500,
    )
    loops = json.loads(report.read_text(encoding="utf-8"))["loops"]
    return {loop["nodeid"].rpartition("::test_")[2]: loop["checks"] for loop in loops}


@pytest.mark.corpus
@pytest.mark.processes
def test_every_planted_fault_is_the_only_root_cause(planted):
    assert set(planted) == {row["fault"] for row in ROWS}
    for row in ROWS:
        findings = [f for check in planted[row["fault"]] for f in check["findings"]]
        found = [(f["check"], f["cause"]) for f in findings if f["level"] == "fault"]
        wanted = (row["check"], row["cause"])
        explained = {name for f in findings if (f["check"], f["cause"]) == wanted for name in f["explains"]}
        assert wanted in found, row["fault"]
        assert [f for f in found if f != wanted and not {f[0], ":".join(f)} & explained] == [], row["fault"]
