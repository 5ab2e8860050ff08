"""Contracts that a project adds are applied to the calls seen in its loops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop import CallContract, LossContract, UsageError, check_loop, register_contract
from pytest_trainloop.instruments.losses.table.registered import contracts_for_calls, forget, registered
from tests.loops.nets import mlp
from tests.loops.plain import loop


def overlap(scores, mask, from_logits=True):
    given = scores.sigmoid() if from_logits else scores
    return 1 - 2 * (given * mask).sum() / (given.sum() + mask.sum())


class Overlap(nn.Module):
    def __init__(self, from_logits=True):
        super().__init__()
        self.from_logits = from_logits

    def forward(self, scores, mask):
        given = scores.sigmoid() if self.from_logits else scores
        return 1 - 2 * (given * mask).sum() / (given.sum() + mask.sum())


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    forget(overlap)
    forget(Overlap)


def judged(loss_of):
    def make():
        model = mlp(6, 16, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
        return loop(
            model, (x, (x[:, :2] > 0).float()), lambda model, batch: loss_of(model(batch[0]), batch[1]), optimizer
        )

    return check_loop(make, only=["loss_contract"], raises=False).results[0]


def squashed(scores, mask):
    return overlap(scores.sigmoid(), mask)


def test_a_call_contract_names_the_argument():
    register_contract(overlap, CallContract(arguments={"scores": "logits", "mask": "binary"}))
    [finding] = judged(squashed).findings
    assert (finding.cause, finding.culprits) == ("probabilities_as_logits", ("sigmoid",))
    assert "overlap" in finding.summary
    assert judged(overlap).outcome == "passed"


def test_targets_are_judged_by_it():
    register_contract(overlap, CallContract(arguments={"scores": "logits", "mask": "binary"}))
    [finding] = judged(lambda scores, mask: overlap(scores, 255 * mask)).findings
    assert finding.cause == "target_outside_unit"
    assert "return" not in finding.where


def test_a_loss_contract_counts_for_calls_with_the_same_flags():
    register_contract(overlap, LossContract(criterion=overlap, expects="logits", target="binary"))
    assert [f.cause for f in judged(squashed).findings] == ["probabilities_as_logits"]
    other = judged(lambda scores, mask: overlap(scores.sigmoid(), mask, from_logits=False))
    assert other.outcome == "passed"


def test_flags_choose_among_contracts():
    for flag, word in ((True, "logits"), (False, "probabilities")):
        when = {"from_logits": flag}
        register_contract(overlap, CallContract(arguments={"scores": word, "mask": "binary"}, when=when))
    [finding] = judged(lambda scores, mask: overlap(scores, mask, from_logits=False)).findings
    assert finding.cause == "logits_as_probabilities"


def test_a_module_is_known_by_its_forward_and_its_settings():
    register_contract(Overlap, LossContract(criterion=Overlap(), expects="logits", target="binary"))
    assert [f.cause for f in judged(lambda s, m: Overlap()(s.sigmoid(), m)).findings] == ["probabilities_as_logits"]
    assert judged(lambda s, m: Overlap(from_logits=False)(s.sigmoid(), m)).outcome == "passed"


def test_contracts_beside_a_loop_count_meanwhile():
    with contracts_for_calls([LossContract(criterion=overlap, expects="logits", target="binary")]):
        assert [f.cause for f in judged(squashed).findings] == ["probabilities_as_logits"]
    assert registered(overlap.__code__) is None


@pytest.mark.parametrize(
    ("function", "contract", "words"),
    [
        (torch.relu, CallContract(arguments={"input": "logits"}), "a function or a class of modules"),
        (overlap, CallContract(arguments={"score": "logits"}), "overlap takes scores, mask, from_logits"),
        (overlap, {"scores": "logits"}, "a LossContract or CallContract"),
    ],
)
def test_what_cannot_be_registered_is_refused(function, contract, words):
    with pytest.raises(UsageError, match=words):
        register_contract(function, contract)


def test_words_that_are_not_known_are_refused():
    with pytest.raises(UsageError, match="the nearest name is 'logits'"):
        CallContract(arguments={"scores": "logit"})
    with pytest.raises(UsageError, match="gives"):
        CallContract(arguments={}, gives="score")
