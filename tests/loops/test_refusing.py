"""A loop that takes its own batches only is not accused by any check: those that need other batches are skipped.

By default two cheap cases; ``-m corpus`` runs every combination.
"""

import functools
import itertools

import pytest

from pytest_trainloop.frontends.api import check_loop
from tests.helpers.findings import described
from tests.loops.refusing import EXCEPTIONS, MESSAGE, NONSENSE, PLACES, Refusal, refusing

LOOPS = {
    "fit": {},
    "probed": {"declared": ("loss",)},
    "texts": {"declared": ("loss", "batches", "padding", "evaluate", "save", "load"), "texts": True},
    "knobs": {
        "declared": ("loss", "loader", "padding", "evaluate", "save", "load", "rows_interact", "ordered"),
        "texts": True,
        "knobs": ("accumulate", "precision", "checkpoint"),
    },
    "step": {"declared": ("loss", "batches", "evaluate", "save", "load"), "made_of": "step", "texts": True},
    "loss": {"made_of": "loss"},
    "split": {"declared": ("split_batch", "batches"), "knobs": ("accumulate",)},
}
"""What each loop declares, and what it is made of."""


def _places(name):
    """Which functions the loop has: one that is made of a loss has no fit of its own."""
    return {"loss": ("model", "loss"), "split": (*PLACES, "split")}.get(name, PLACES)


FEW = [("probed", "loss", AssertionError, "shapes"), ("loss", "loss", "number", "values")]
EVERY = [
    (name, where, how, sees)
    for name in LOOPS
    for where, how, sees in [
        *itertools.product(_places(name), EXCEPTIONS, ("shapes", "values")),
        *itertools.product(("fit",), NONSENSE, ("shapes", "values")),
    ]
]


@functools.cache
def taking_all(name):
    """The result of each check on the same loop where it refuses nothing."""
    report = check_loop(refusing(Refusal("fit", None), **LOOPS[name]), raises=False)
    return {result.check: result for result in report.results}


def judged(name, where, how, sees):
    refusal = Refusal(where, how, sees)
    return check_loop(refusing(refusal, **LOOPS[name]), raises=False), refusal


def assert_not_accused(name, where, how, sees):
    report, refusal = judged(name, where, how, sees)
    assert report.ok, described(report)
    assert refusal.times or where == "split"
    for result in report.results:
        known = taking_all(name)[result.check]
        assert {f.cause for f in result.findings} <= {f.cause for f in known.findings}, result.check
        if result.outcome == "skipped" and known.outcome != "skipped":
            assert any(words in result.reason for words in (" raise", MESSAGE, "NaN", "finite")), result


@pytest.mark.parametrize(("name", "where", "how", "sees"), FEW)
def test_a_loop_that_takes_its_own_batches_only(name, where, how, sees):
    assert_not_accused(name, where, how, sees)


@pytest.mark.corpus
@pytest.mark.parametrize(("name", "where", "how", "sees"), EVERY)
def test_a_loop_that_takes_its_own_batches_only_in_every_way(name, where, how, sees):
    assert_not_accused(name, where, how, sees)


@pytest.mark.parametrize("where", [pytest.param(p, marks=[pytest.mark.corpus] * (p != "model")) for p in PLACES])
def test_what_needs_other_batches_is_skipped_with_the_exception(where):
    report, _ = judged("knobs", where, ValueError, "values")
    quoting = {r.check for r in report.results if r.outcome == "skipped" and MESSAGE in r.reason}
    assert quoting >= {
        "accumulation_equivalence",
        "batch_independence",
        "every_row_teaches",
        "padding_invariance",
        "input_dependence",
    }


def test_what_raises_on_the_loops_own_batches_too_stays_an_error():
    def made():
        def refused(_model, _batch):
            raise ValueError(MESSAGE)

        loop = refusing(Refusal("fit", None))()
        loop.loss = refused
        return loop

    (result,) = check_loop(made, only=["accumulation_equivalence"], raises=False).results
    assert result.outcome == "error"
    assert MESSAGE in result.reason


@pytest.mark.parametrize("refused", [(2,), (3,), (4,), (2, 3, 4)], ids=str)
def test_a_loop_that_takes_few_numbers_of_micro_batches(refused):
    def made(accumulate=1):
        if accumulate in refused:
            raise ValueError(f"12 rows cannot be split into {accumulate}")
        return refusing(Refusal("fit", None), knobs=("accumulate",))(accumulate=accumulate)

    report = check_loop(made, only=["step_order", "accumulation_equivalence", "edge_batches"], raises=False)
    assert report.ok, described(report)
    reasons = {r.check: r.reason for r in report.results}
    assert ("cannot be split into 2 with accumulate=2" in reasons["accumulation_equivalence"]) == (len(refused) == 3)
