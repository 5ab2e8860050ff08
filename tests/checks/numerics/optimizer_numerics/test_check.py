"""Which numbers of an optimizer are a fault and which are advice, from given copies of its steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_trainloop.checks.numerics.optimizer_numerics import step_variants
from pytest_trainloop.checks.numerics.optimizer_numerics.check import optimizer_numerics
from pytest_trainloop.checks.numerics.optimizer_numerics.first_steps import (
    FirstSteps,
    LowPrecisionCount,
    OptimizerStart,
    ZeroEps,
)
from pytest_trainloop.checks.numerics.optimizer_numerics.step_variants import WrongVariant
from pytest_trainloop.checks.numerics.optimizer_numerics.zero_denominators import DividedByZero, ZeroDenominators
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.optimizers.replay import Group, Member, Snapshot
from tests.helpers.records import ONE, FakeEvidence, parameter, record

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
FLAGS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False, "maximize": False}


def snap(kind=torch.optim.Adam, *, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(0)
    entries, grad = (torch.randn(64, generator=generator).to(dtype) for _ in range(2))
    return Snapshot(kind, (Group({**ADAM, **FLAGS, **options}, (Member(0, 0.1 * entries, grad, {}),)),))


class Given:
    """Experiments whose findings are given."""

    def __init__(self, made, *, zero=(), divided=(), counted=()):
        self.seen = record([parameter(0, "w")], held=[0], gradients={0: ONE})
        self.seen.steps = 3
        self.record, self.found = self.seen, {0: OptimizerStart(made)}
        self._zero, self._divided, self._counted = list(zero), list(divided), list(counted)

    def zero_eps(self):
        return self._zero

    def low_precision_counts(self):
        return self._counted

    @property
    def evidence(self):
        return FakeEvidence(
            self.seen, shared={FirstSteps.of: self, ZeroDenominators: SimpleNamespace(found=self._divided)}
        )


def verdicts(given):
    return [(f.level, f.cause) for f in optimizer_numerics(given.evidence)]


def test_nothing_is_said_of_the_defaults():
    assert verdicts(Given(snap())) == []


def test_no_further_run_is_made_where_nothing_steps():
    given = Given(snap())
    given.seen.steps = 0
    with pytest.raises(CannotDecide, match="no optimizer step"):
        list(optimizer_numerics(FakeEvidence(given.seen)))


def test_a_count_of_steps_in_low_precision_is_a_fault():
    (found,) = optimizer_numerics(Given(snap(), counted=[LowPrecisionCount("AdamW", "bfloat16", 256, ("w",))]).evidence)
    assert (found.level, found.cause, found.culprits) == ("fault", "step_count_saturates", ("w",))
    assert "256 + 1 is 256" in found.summary


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_swapped_betas_are_a_fault(kind):
    (found,) = optimizer_numerics(Given(snap(kind, betas=(0.999, 0.9))).evidence)
    assert (found.level, found.cause, found.culprits) == ("fault", "betas_swapped", ("w",))
    assert "1.053" in found.measured
    assert found.repair == "betas=(0.9, 0.999)"


@pytest.mark.parametrize(
    "betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.95), (0.0, 0.9), (0.5, 0.9), (0.0, 0.0), (0.95, 0.9)]
)
def test_other_betas_pass(betas):
    assert verdicts(Given(snap(betas=betas))) == []


def test_betas_under_which_steps_grow_a_little_are_advice():
    assert verdicts(Given(snap(betas=(0.99, 0.95)))) == [("advice", "betas_swapped")]


def test_amsgrad_forgets_no_second_moment():
    assert verdicts(Given(snap(betas=(0.999, 0.9), amsgrad=True))) == []


def divided(eps, **fields):
    given = {"step": 1, "count": 3, "without": 0, "entries": 64, **fields}
    return DividedByZero("w", "Adam", eps, "float16", **given)


def test_an_eps_that_is_zero_and_was_divided_by_is_a_fault_and_hides_the_variants():
    given = Given(snap(dtype=torch.float16), zero=[ZeroEps("Adam", 1e-8, "float16", ("w",))], divided=[divided(1e-8)])
    (found,) = optimizer_numerics(given.evidence)
    assert (found.level, found.cause) == ("fault", "eps_underflows")
    assert "3 of 64 entries of w" in found.measured


def test_an_eps_that_is_zero_and_did_no_harm_is_advice():
    assert verdicts(Given(snap(), zero=[ZeroEps("Adam", 1e-8, "float16", ("w",))])) == [("advice", "eps_underflows")]


def test_an_eps_of_zero_is_a_fault_only_where_it_is_seen():
    zero = [ZeroEps("Adam", 0.0, "float32", ("w",))]
    assert verdicts(Given(snap(), zero=zero)) == []
    (found,) = optimizer_numerics(Given(snap(), zero=zero, divided=[divided(0.0, without=2)]).evidence)
    assert (found.level, found.cause) == ("fault", "eps_missing")
    assert "2 of them with a gradient of exactly 0 (0/0)" in found.measured


def off(variant="fused", *, by=1e-2, in_use=True, right=("for-loop",), **fields):
    return WrongVariant("SGD", variant, 0, "bfloat16", by, 1e-2, 1e-4, in_use, right, **fields)


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (off(), "fault"),
        (off(by=1e-3), "advice"),
        (off(in_use=False), "advice"),
        (off(right=()), "advice"),
        (off("for-loop", right=("fused",)), "advice"),
    ],
)
def test_a_variant_that_goes_wrong(monkeypatch, found, level):
    monkeypatch.setattr(step_variants, "wrong_variants", lambda snap: [found])
    (said,) = optimizer_numerics(Given(snap()).evidence)
    assert (said.level, said.cause, said.culprits) == (level, "variants_differ", ("w",))
    assert found.variant in said.summary


def test_variants_of_one_dtype_make_one_finding_with_their_peaks(monkeypatch):
    peaks = {"for-loop": 2**20, "foreach": 3 * 2**20}
    found = [off("for-loop", right=(), peaks=peaks), off("foreach", in_use=False, right=(), peaks=peaks)]
    monkeypatch.setattr(step_variants, "wrong_variants", lambda snap: found)
    (said,) = optimizer_numerics(Given(snap()).evidence)
    assert "for-loop and foreach step" in said.summary
    assert "for-loop 1.0 MiB, foreach 3.0 MiB" in said.measured
