"""The search for the smallest call that violates a property."""

import pytest

from pytest_trainloop import Finding, LossContract
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.losses.evidence import LossEvidence
from pytest_trainloop.instruments.losses.search import Search
from pytest_trainloop.instruments.strategies.losses import cases


def criterion(output, target):
    return (output - target).square().mean()


CONTRACT = LossContract(criterion=criterion, expects="values", target="value")


def finding(cause):
    return Finding(cause=cause, summary="it is wrong", measured="1", shown_by="...")


def search(judge, **settings):
    return Search(0, **settings).violations(cases(CONTRACT, only=("ordinary",)), judge)


def test_each_cause_is_shrunk_alone():
    judge = lambda case: finding("few" if case.rows < 4 else "many")  # noqa: E731
    assert {v.finding.cause: v.case.rows for v in search(judge)} == {"few": 2, "many": 4}


def test_examples_that_show_a_cause_are_counted():
    (violation,) = search(lambda case: finding("any"))
    assert violation.times == violation.examples > 1
    (half,) = search(lambda case: finding("odd") if case.rows % 2 else None)
    assert 0 < half.times < half.examples


def test_a_property_that_holds_has_no_violation():
    assert search(lambda case: None) == []


def test_the_most_frequent_reason_is_given_where_no_case_can_be_judged():
    def judge(case):
        raise CannotDecide("rare" if case.rows == 6 else "frequent")

    with pytest.raises(CannotDecide, match="frequent"):
        search(judge)


def test_a_share_of_the_examples_is_searched():
    (all_of_them,) = search(lambda case: finding("any"))
    (some,) = search(lambda case: finding("any"), share=0.25)
    assert some.examples < all_of_them.examples


def violations(holds, **more):
    return list(LossEvidence(lambda: CONTRACT).violations(holds, only=("ordinary",), **more))


def test_a_finding_names_the_criterion_and_its_smallest_call():
    (found,) = violations(lambda loss, case: finding("any"))
    assert found.summary == "criterion: it is wrong"
    assert found.culprits == ("criterion",)
    assert "def criterion(output, target):" in found.where
    assert found.smallest.startswith("2 rows, target [")


def test_a_cause_may_need_every_example():
    holds = lambda loss, case: finding("odd") if case.rows % 2 else None  # noqa: E731
    assert [f.cause for f in violations(holds)] == ["odd"]
    assert violations(holds, in_every_example=("odd",)) == []
