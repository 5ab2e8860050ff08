"""Rows that meet outside of the model: what is measured, and the fewest rows that show it."""

import pytest

from pytest_trainloop import check_loop
from tests.checks.batch.batch_independence import faults_outside
from tests.loops.pairs import PAIRS

FAULTY = [pair for pair in PAIRS.values() if pair.faulty.__module__ == faults_outside.__name__]


@pytest.mark.parametrize("pair", FAULTY[::4], ids=lambda pair: pair.name)
def test_three_rows_show_it(pair):
    report = check_loop(pair.faulty, only=["batch_independence"], raises=False)
    (finding,) = [f for result in report.results for f in result.findings]
    assert finding.composition is not None
    assert len(finding.composition.rows) <= 3
    assert finding.smallest == f"rows {list(finding.composition.rows)}, as a batch of their own"
