"""Patterns of weights, as plain numbers."""

import pytest

from pytest_trainloop.checks.scale.distributed_equivalence.diagnosis import Circumstances, of_weights
from pytest_trainloop.checks.scale.distributed_equivalence.weighing import Weighing

HALVES = (0.5, 0.5)


def weighing(*ranks, one=HALVES, lengths=(1.0, 3.0)):
    return Weighing(one, ranks, lengths)


@pytest.mark.parametrize(
    ("made", "pattern"),
    [
        (weighing((1, 0), (0, 1)), "own"),
        (weighing((0.3, 1e-9), (0, 2.0)), "own"),
        (weighing((1, 0), (1, 0)), "one_rank"),
        (weighing((0, 1), (0, 1)), "one_rank"),
        (weighing((1, 1), (1, 1)), "scaled"),
        (weighing((0.25, 0.25), (0.25, 0.25)), "scaled"),
        (weighing((0.5, 0.5), (0.5, 0.5), one=(0.52, 0.48)), "means"),
        (weighing((0.3, 0.1), (0.3, 0.1)), "clipped"),
        (weighing((0.3, 0.2), (0.3, 0.2)), "other"),
        (weighing((0.5, 0.4), (0.4, 0.5)), "other"),
        (weighing((1, 0), (0, 1), one=None), "own"),
    ],
)
def test_a_pattern_of_two_shares(made, pattern):
    assert made.pattern == pattern


def test_the_last_micro_batch_of_each_rank_is_its_own():
    last = Weighing((0.25,) * 4, ((0.25, 0.5, 0.25, 0), (0.25, 0, 0.25, 0.5)), (1.0,) * 4)
    assert last.pattern == "last_own"
    assert last.window == 2
    assert of_weights(last, Circumstances()).cause == "last_micro_batch_not_synchronised"


@pytest.mark.parametrize(
    ("ranks", "cause", "level"),
    [
        ((1.0, 1.0), "summed_over_ranks", "fault"),
        ((2.0, 2.0), "summed_over_ranks", "fault"),
        ((0.25, 0.25), "divided_twice", "fault"),
        ((0.15, 0.15), "divided_twice", "advice"),
        ((0.9, 0.9), "summed_over_ranks", "advice"),
    ],
)
def test_a_power_of_the_ranks_is_a_fault_and_any_other_factor_advice(ranks, cause, level):
    found = of_weights(weighing(ranks, ranks), Circumstances())
    assert (found.cause, found.level) == (cause, level)


def test_means_are_a_fault_where_valid_targets_explain_one_process():
    made = weighing((0.5, 0.5), (0.5, 0.5), one=(0.25, 0.75))
    assert of_weights(made, Circumstances(valid=(3, 9))).level == "fault"
    assert of_weights(made, Circumstances()).level == "advice"


def test_who_reads_only_own_rows_is_told_by_the_wrapper_and_by_the_others():
    made = weighing((1, 0), (0, 1))
    assert of_weights(made, Circumstances()).cause == "never_synchronised"
    assert of_weights(made, Circumstances(wrappers=1, calls=8)).cause == "never_synchronised"
    assert of_weights(made, Circumstances(wrappers=1)).cause == "wrapper_bypassed"
    some = of_weights(made, Circumstances(wrong=("head.bias",), others=3, wrappers=1, calls=8))
    assert (some.cause, some.culprits) == ("parameters_not_in_wrapper", ("head.bias",))


def test_what_follows_no_pattern_is_not_called():
    assert of_weights(weighing((0.3, 0.2), (0.3, 0.2)), Circumstances()) is None
