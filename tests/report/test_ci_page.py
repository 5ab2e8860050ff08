"""docs/ci.md: its commands do what it says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_trainloop.core.report.json import text
from pytest_trainloop.core.report.sarif import document
from pytest_trainloop.judging.explain import rule
from tests.helpers.report_data import plain, report, result, stale

PAGE = (Path(__file__).parents[2] / "docs" / "ci.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"jq '([^']+)'", PAGE)


@pytest.fixture
def filtered(told):
    """What a program of the page makes of a log with a fault, advice and an expected fault."""
    data = report(
        {
            "t::a": [result(stale()), result(plain("finite", "b", level="advice"))],
            "t::b": [result(plain("causality", "c"), outcome="xfailed", reason="issue 12")],
        }
    )
    log = text(document(told(data), data["environment"], rule))
    jq = shutil.which("jq") or pytest.skip("jq is not installed")
    return lambda program: json.loads(
        subprocess.run([jq, program], input=log, capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.processes
def test_expected_faults_are_left_out_of_what_is_uploaded(filtered):
    log = filtered(PROGRAMS[0])
    assert [found["ruleId"] for found in log["runs"][0]["results"]] == ["step_order:not_zeroed", "finite:b"]


@pytest.mark.processes
def test_gitlab_gets_a_report_on_code_quality(filtered):
    fault, advice = filtered(PROGRAMS[1])
    assert fault["location"] == {"path": "train.py", "lines": {"begin": 4}}
    assert (fault["check_name"], fault["severity"], advice["severity"]) == ("step_order:not_zeroed", "major", "minor")
    assert fault["description"].startswith("2 weights are stepped with old gradients.")
    assert "](" not in fault["description"]  # a link of SARIF to another location
    assert fault["description"].endswith("Found in t::a.")
    assert len({fault["fingerprint"], advice["fingerprint"]}) == 2
