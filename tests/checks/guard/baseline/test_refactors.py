"""Refactors that keep the mathematics pass, and the names that they change are told."""

from __future__ import annotations

import pytest

from pytest_trainloop.frontends.api import check_loop
from tests.checks.guard.baseline.refactors import REFACTORS
from tests.helpers.findings import described

DEFAULT = (
    "convolution_spelled_out",
    "names_shifted_onto_one_another",
    "optimizer_by_hand",
    "projections_joined",
)
"""Refactors that are compared by default; the others take the marker ``corpus``."""

every_refactor = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.corpus]) for name in REFACTORS]
)


def compared(before, after, file):
    """The result of the check on one loop, with the baseline of the other."""
    check_loop(before, only=["baseline"], baseline=file, update=True)
    report = check_loop(after, only=["baseline"], baseline=file, raises=False)
    return report, report.results[0]


@every_refactor
def test_a_refactor_passes_and_names_that_changed_are_told(name, tmp_path):
    case = REFACTORS[name]
    report, result = compared(case.before, case.after, tmp_path / "loop.json")
    assert result.outcome == "passed", described(report)
    told = " ".join(finding.summary for finding in result.notes)
    assert not result.advice
    assert case.says in told
    assert bool(case.says) == bool(told)
