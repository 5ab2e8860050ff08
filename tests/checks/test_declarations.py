"""What a declaration changes in the verdict on a loop of the corpus."""

from __future__ import annotations

import pytest

from pytest_trainloop import check_loop
from tests.loops.corpus import ODD, PAIRS


@pytest.mark.parametrize(
    ("check", "make", "fields", "expected"),
    [
        ("batch_independence", PAIRS["attention_pooling_over_the_rows"].faulty, {"rows_interact": True}, "absent"),
        (
            "batch_independence",
            ODD["table_that_is_one_batch"].make,
            {"rows_interact": False},
            "normalised_over_rows fault",
        ),
        (
            "batch_independence",
            PAIRS["rows_attend_to_each_other_though_declared_apart"].faulty,
            {"rows_interact": None},
            "skipped",
        ),
        (
            "causality",
            PAIRS["the_mask_is_lost_in_evaluation"].faulty,
            {"evaluate": None},
            "mask_missing_in_eval advice",
        ),
        (
            "determinism",
            PAIRS["generator_at_module_level"].faulty,
            {"nondeterministic": False},
            "state_outside_loop fault",
        ),
        (
            "determinism",
            PAIRS["sum_in_order_of_arrival"].faulty,
            {"nondeterministic": False},
            "nondeterministic_kernel fault",
        ),
    ],
)
def test_the_verdict_follows_it(check, make, fields, expected):
    def declared():
        loop = make()
        for name, value in fields.items():
            setattr(loop, name, value)
        return loop

    (result,) = check_loop(declared, only=[check], raises=False).results
    assert ([f"{f.cause} {f.level}" for f in result.findings] or [result.outcome if result.applies else "absent"]) == [
        expected
    ]


def test_declared_steps_make_slow_learning_a_fault():
    make, options = PAIRS["plateau_of_saturated_layers"].faulty, {"overfit_one_batch": {"steps": 300}}
    (result,) = check_loop(make, only=["overfit_one_batch"], options=options, raises=False).results
    (finding,) = result.faults
    assert finding.cause == "learns_slowly"
    assert "steps=300 declares that it is learned by then" in finding.summary
