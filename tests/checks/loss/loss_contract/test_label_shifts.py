"""How sure labels make ``loss_contract`` of a shift."""

import math
from itertools import permutations

import pytest
import torch

from pytest_trainloop.api import check_loop
from pytest_trainloop.checks.loss.loss_contract.label_shifts import chance
from tests.checks.loss.loss_contract.faults_label_shifts import given, moved_on_again, tuned


@pytest.mark.parametrize("labels", [[1, 2, 3], [1, 1, 2], [2, 2]])
def test_the_chance_is_the_share_of_orders_that_put_the_labels_where_they_are(labels):
    pool = [1, 1, 2, 2, 3, 4]
    orders = list(permutations(pool))
    share = sum(list(order[: len(labels)]) == labels for order in orders) / len(orders)
    found = chance(torch.tensor(labels), torch.tensor(pool))
    assert math.exp(found) == pytest.approx(share)


def test_equal_labels_in_equal_ids_prove_nothing():
    assert chance(torch.full((30,), 7), torch.full((60,), 7)) == pytest.approx(0.0)


def findings(make):
    report = check_loop(make, only=["loss_contract"], raises=False)
    return [(f.cause, f.level) for r in report.results for f in r.findings]


def test_few_labels_are_advice_and_more_of_them_a_fault():
    assert findings(tuned(moved_on_again, prompt=10)) == []  # three kinds of labels
    assert findings(tuned(moved_on_again, prompt=8, rows=2)) == [("shifted_twice", "advice")]
    assert findings(tuned(moved_on_again, prompt=10, one_batch=False)) == [("shifted_twice", "fault")]


def test_few_labels_that_are_right_are_silent():
    assert findings(tuned(given, prompt=9)) == []
    assert findings(tuned(given, prompt=10)) == []
