"""One further run for all checks that look at each step of the loop."""

import pytest
import torch
from torch import nn

from pytest_trainloop.core.errors import OwnMistake
from pytest_trainloop.frontends.api import check_loop
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.second_run import SecondRun
from tests.loops import plain


def make():
    batch = (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    return plain.loop(nn.Linear(6, 3), batch, plain.cross_entropy)


class Counting:
    def __init__(self):
        self.batches = 0

    @classmethod
    def listening(cls, evidence):
        return cls()

    def contexts(self, watch):
        return ()

    def take_batch(self, number, item):
        self.batches += 1


class Failing(Counting):
    def contexts(self, watch):
        raise OwnMistake("ours")


def evidence_with(*kinds):
    evidence = Evidence(make)
    evidence.listeners = lambda: [f"{__name__}:{kind.__name__}" for kind in kinds]
    return evidence


def test_listeners_of_checks_to_come_share_the_run():
    evidence = evidence_with(Counting)
    evidence.shared(SecondRun).heard(Counting)
    steps = evidence.own_steps
    assert evidence.shared(SecondRun).heard(Counting).batches > 0
    assert evidence.own_steps == steps


def test_a_listener_that_fails_leaves_the_run_to_the_others():
    evidence = evidence_with(Counting, Failing)
    assert evidence.shared(SecondRun).heard(Counting).batches > 0
    with pytest.raises(OwnMistake):
        evidence.shared(SecondRun).heard(Failing)


def test_determinism_compares_with_a_run_that_others_listened_to():
    results = check_loop(make, only=["target_networks", "loss_contract", "determinism"], raises=False).results
    steps = {result.check: result.steps for result in results}
    assert steps["target_networks"] > 0
    assert steps["determinism"] == steps["loss_contract"] == 0
