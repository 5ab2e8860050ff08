"""Which numbers of an optimizer are a fault, and which are advice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.checks.numerics.optimizer_numerics import repeated_steps
from pytest_trainloop.checks.numerics.optimizer_numerics.check import optimizer_numerics
from pytest_trainloop.checks.numerics.optimizer_numerics.watched_steps import FirstSteps, OptimizerStart
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.optimizers.replay import ENTRYWISE, Group, Member, Snapshot
from tests.helpers.records import ONE, FakeEvidence, parameter, record


def findings_on(build, dtype=torch.float32, scale=1.0):
    """Of a loop on one layer whose loss is multiplied."""

    def make():
        model = nn.Linear(6, 4).to(dtype)
        optimizer = build(model.parameters())

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                (scale * F.mse_loss(model(x.to(dtype)).float(), y)).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randn(8, 4)), fit=fit)

    return check_loop(make, only=["optimizer_numerics"], raises=False).results[0].findings


def findings_of(kind=torch.optim.Adam, *, dtype=torch.float32, size=1.0, **options):
    """Of three given tensors that this optimizer steps for the first time."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, generator=generator) * scale for n, scale in ((133, 0.1), (32, 1.0), (1, 0.0))]
    grads = [torch.randn(len(w), generator=generator) * size for w in weights]
    params = [nn.Parameter(w.to(dtype)) for w in weights]
    optimizer = kind(params, **options)
    members = [
        Member(i, p.detach(), g.to(dtype), dict(optimizer.state.get(p, {})))
        for i, (p, g) in enumerate(zip(params, grads, strict=True))
    ]
    known = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    first, seen = FirstSteps(), record([parameter(i, "abc"[i]) for i in range(3)], held=[0], gradients={0: ONE})
    first.record = seen
    first.found = {0: OptimizerStart(Snapshot(kind, (Group(known, tuple(members)),)))}
    return list(optimizer_numerics(FakeEvidence(seen, shared={FirstSteps.of: first})))


def test_without_a_step_nothing_can_be_said():
    with pytest.raises(CannotDecide, match="no optimizer step"):
        list(optimizer_numerics(FakeEvidence(record([], held=[], gradients={}, batches=0))))


SWAPPED = (0.999, 0.9)


@pytest.mark.parametrize(
    ("kind", "betas", "level"),
    [
        *((kind, SWAPPED, "fault") for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)),
        (torch.optim.Adam, (0.99, 0.95), "advice"),
        *((torch.optim.Adam, betas, None) for betas in ((0.9, 0.999), (0.95, 0.95), (0.5, 0.9), (0.0, 0.0))),
    ],
)
def test_betas_under_which_steps_grow(kind, betas, level):
    found = findings_of(kind, betas=betas)
    assert [(f.level, f.cause, f.culprits) for f in found] == (
        [(level, "betas_swapped", ("a", "b", "c"))] * bool(level)
    )
    if betas == SWAPPED:
        assert "1.053" in found[0].measured
        assert found[0].repair == "betas=(0.9, 0.999)"


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_small_gradients_in_float16_are_divided_by_zero(kind):
    (found,) = findings_on(lambda params: kind(params, lr=1e-3), torch.float16, scale=1e-3)
    assert (found.level, found.cause, set(found.culprits)) == ("fault", "eps_underflows", {"weight", "bias"})
    assert found.measured.startswith("step 1: ")


@pytest.mark.parametrize(("dtype", "eps", "least"), [(torch.float16, 1e-8, "6e-08"), (torch.float32, 1e-50, "1e-45")])
def test_an_eps_that_is_zero_and_did_no_harm_is_advice(dtype, eps, least):
    (found, *_) = findings_on(lambda params: torch.optim.Adam(params, lr=1e-3, eps=eps), dtype, scale=100.0)
    assert (found.level, found.cause) == ("advice", "eps_underflows")
    assert f"the smallest number above 0 in {str(dtype).removeprefix('torch.')} is {least}" in found.measured


@pytest.mark.parametrize("kind", ENTRYWISE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_torchs_variants_agree(kind, dtype, options, size):
    assert findings_of(kind, dtype=dtype, size=size, lr=1e-2, **options) == []


@pytest.mark.parametrize("options", [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}])
def test_a_variant_that_writes_into_gradients_agrees_as_well(options):
    assert findings_of(torch.optim.SGD, lr=0.1, **options) == []


@pytest.mark.parametrize("kind", ENTRYWISE)
def test_for_loop_and_foreach_agree_to_rounding_in_bfloat16(kind):
    assert all("the fused step" in f.summary for f in findings_of(kind, dtype=torch.bfloat16, lr=1e-2))


def test_a_second_moment_that_is_zero_in_float16_is_found():
    (found,) = findings_of(dtype=torch.float16, size=1e-3, eps=1e-4)
    assert found.summary.startswith("the for-loop and foreach ")


@pytest.mark.parametrize(
    ("lazy", "part", "options", "level"),
    [
        (["fused"], 0.0, {"fused": True}, "fault"),
        (["fused"], 0.9, {"fused": True}, "advice"),
        (["fused"], 0.0, {}, "advice"),
        (["foreach"], 0.0, {"foreach": True}, "advice"),
        (["fused", "for-loop"], 0.0, {"fused": True}, "advice"),
    ],
    ids=["wrong by far", "wrong by little", "not used", "not fused", "no other is right"],
)
def test_a_variant_that_makes_a_part_of_its_step(monkeypatch, lazy, part, options, level):
    def stepped(snap, *, wide, steps=1, **given):
        variant = next(iter(given), "for-loop")
        after = original(snap, wide=wide, steps=steps, **given)
        if wide or variant not in lazy:
            return after
        return {m.index: m.entries + part * (after[m.index] - m.entries) for m in snap.members}

    original = repeated_steps.stepped
    monkeypatch.setattr(repeated_steps, "stepped", stepped)
    (found,) = findings_of(torch.optim.SGD, lr=0.1, **options)
    assert (found.level, found.cause) == (level, "variants_differ")
    used = "" if options else ", which this loop does not use,"
    assert found.summary.startswith(f"the {' and '.join(lazy)} step of SGD{used} gives a wrong ")
    assert ("for-loop" in found.repair) == ("for-loop" not in lazy)


def test_torchs_fused_sgd_leaves_low_precision_weights_on_a_cpu_where_they_are():
    p = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=0.1, fused=True).step()
    if bool(p.any()):
        pytest.skip("this torch moves them")
    (found,) = findings_of(torch.optim.SGD, dtype=torch.bfloat16, lr=0.1, fused=True)
    assert (found.level, found.repair) == ("fault", "use the for-loop step (foreach=False, fused=False)")
