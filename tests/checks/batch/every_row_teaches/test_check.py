"""The smallest batches that show the faults, and what another seed makes of them."""

import pytest

from pytest_trainloop.frontends.api import check_loop
from tests.loops.corpus import PAIRS

SMALL = ("logistic_loss_on_labels_of_0_and_1", "last_row_cut_off", "first_row_taken_for_the_first_output")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("seed", [0, 3])
def test_the_smallest_batch_has_at_most_three_rows(name, seed):
    report = check_loop(PAIRS[name].faulty, only=["every_row_teaches"], raises=False, seed=seed)
    (found,) = report.results[0].faults
    assert found.cause == PAIRS[name].cause
    assert 1 <= len(found.composition.rows) <= 3
    assert found.smallest.startswith("row")


def test_one_row_is_not_enough_to_tell():
    def make():
        loop = PAIRS["last_row_cut_off"].fixed()
        loop.batch = tuple(t[:1] for t in loop.batch)
        return loop

    (result,) = check_loop(make, only=["every_row_teaches"], raises=False).results
    assert result.outcome == "skipped"
    assert "one row" in result.reason
