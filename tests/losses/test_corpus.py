"""The corpora of losses: every fault is named, every repaired twin and every odd but correct loss is silent."""

from __future__ import annotations

import copy
import random

import hypothesis
import pytest
import torch
from torch import nn

from pytest_trainloop import LossContract, check_loss
from tests.helpers.every_pair import parametrized, parametrized_in_corpus
from tests.helpers.findings import assert_complete, assert_survives_json, described, named
from tests.helpers.texts import assert_stored
from tests.losses.corpus import MODULES, ODD, PAIRS

every_pair = parametrized(PAIRS)
every_pair_in_corpus = parametrized_in_corpus(PAIRS)


def calls(few, many):
    """Try each of the eight properties on few calls, and under the marker ``corpus`` on many."""
    corpus = pytest.param(many, marks=pytest.mark.corpus)
    return pytest.mark.parametrize("examples", [few, corpus], ids=["few", "many"], indirect=True)


def only(count):
    return pytest.mark.parametrize("examples", [count], ids=[f"{count}"], indirect=True)


@pytest.fixture
def examples(request):
    """How many calls a property is tried on, as a user's profile gives it."""
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("corpus", max_examples=request.param)
    hypothesis.settings.load_profile("corpus")
    yield
    hypothesis.settings.load_profile(before)


def assert_named(pair):
    report = check_loss(pair.faulty, only=[pair.check], raises=False)
    findings = named(report, pair.check, pair.cause, pair.level)
    assert_complete(findings)
    assert_survives_json(report)
    assert pair.level == "advice" or not report.ok
    assert "row" in findings[0].smallest
    assert findings[0].culprits == (getattr(pair.faulty.criterion, "__name__", None),)
    assert_stored(report, pair)


def assert_passes(pair):
    report = check_loss(pair.fixed, raises=False)
    assert report.ok, described(report)
    assert pair.cause not in {f.cause for r in report.results for f in r.findings if f.check == pair.check}


@only(8)
@every_pair
def test_the_fault_is_named(pair, examples):
    assert_named(pair)


@only(12)
@every_pair_in_corpus
def test_the_fault_is_named_on_many_calls(pair, examples):
    assert_named(pair)


@only(3)
@every_pair
def test_the_repaired_loss_passes(pair, examples):
    assert_passes(pair)


@only(5)
@every_pair_in_corpus
def test_the_repaired_loss_passes_on_many_calls(pair, examples):
    assert_passes(pair)


@calls(3, 5)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_but_correct_loss_is_silent(name, examples):
    report = check_loss(ODD[name], raises=False)
    assert report.ok, described(report)
    assert any(r.outcome == "passed" for r in report.results)


@calls(8, 25)
@pytest.mark.parametrize("name", MODULES)
def test_a_loss_of_torch_used_right_is_silent(name, examples):
    report = check_loss(MODULES[name], raises=False)
    assert report.ok, described(report)


def test_nothing_of_the_users_changes():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, output, target):
            self.calls += 1
            torch.set_default_dtype(torch.float64)
            random.random()
            return self.scale * nn.functional.cross_entropy(output, target)

    criterion = Counting()
    before = copy.deepcopy(criterion.state_dict()), torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    check_loss(LossContract(criterion=criterion, expects="logits", num_classes=3), raises=False)
    after = criterion.state_dict(), torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert torch.equal(before[1], after[1])
    assert before[2:] == after[2:]
    assert criterion.scale.grad is None


def test_a_verdict_repeats_itself():
    reports = [check_loss(PAIRS["broadcasts-huber"].faulty, raises=False).results for _ in range(2)]
    assert [r.findings for r in reports[0]] == [r.findings for r in reports[1]]


def test_a_failure_is_shrunk_to_few_rows():
    report = check_loss(PAIRS["counted_in_mean-mean_of_all"].faulty, only=["ignored_positions"], raises=False)
    assert report.results[0].faults[0].smallest.startswith("2 rows, 4 classes, target [")


def test_a_criterion_that_always_raises_is_an_error_once_with_the_users_lines():
    def criterion(output, target):
        raise RuntimeError("no such kernel")

    report = check_loss(LossContract(criterion=criterion, expects="logits", num_classes=3), raises=False)
    first, *others = report.results
    assert first.outcome == "error"
    assert "calling the criterion with tensors of (4, 3), (4,) raised RuntimeError: no such kernel" in first.reason
    assert first.error is not None
    assert 'raise RuntimeError("no such kernel")' in first.error.traceback
    assert {r.outcome for r in others} == {"skipped"}
