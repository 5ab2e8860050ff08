"""Variants of torch's own steps agree in float64 and to rounding; where one does not, it is found."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.checks.numerics.optimizer_numerics import step_variants
from pytest_trainloop.checks.numerics.optimizer_numerics.step_variants import in_use, wrong_variants
from pytest_trainloop.optimizers.replay import ENTRYWISE, Group, Member, Snapshot


def snap(kind, dtype, size=1.0, **options):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, generator=generator) * scale for n, scale in ((133, 0.1), (32, 1.0), (1, 0.0))]
    grads = [torch.randn(len(w), generator=generator) * size for w in weights]
    params = [torch.nn.Parameter(w.to(dtype)) for w in weights]
    optimizer = kind(params, **options)
    members = tuple(
        Member(i, p.detach(), g.to(dtype), dict(optimizer.state.get(p, {})))
        for i, (p, g) in enumerate(zip(params, grads, strict=True))
    )
    known = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    return Snapshot(kind, (Group(known, members),))


@pytest.mark.parametrize("kind", ENTRYWISE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_torchs_variants_agree(kind, dtype, options, size):
    assert list(wrong_variants(snap(kind, dtype, size, lr=1e-2, **options))) == []


@pytest.mark.parametrize("options", [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}])
def test_a_variant_that_writes_into_gradients_agrees_as_well(options):
    assert list(wrong_variants(snap(torch.optim.SGD, torch.float32, lr=0.1, **options))) == []


@pytest.mark.parametrize("kind", ENTRYWISE)
def test_for_loop_and_foreach_agree_to_rounding_in_bfloat16(kind):
    found = wrong_variants(snap(kind, torch.bfloat16, lr=1e-2))
    assert {f.variant for f in found} <= {"fused"}


def test_a_second_moment_that_is_zero_in_float16_is_found():
    found = list(wrong_variants(snap(torch.optim.Adam, torch.float16, size=1e-3, eps=1e-4)))
    assert {"for-loop", "foreach"} <= {f.variant for f in found}
    assert all(f.error > f.allowed for f in found)
    assert {f.variant for f in found if f.in_use} == {"for-loop"}


def test_a_variant_that_does_nothing_is_found(monkeypatch):
    def lazy(snap, *, wide, steps=1, **options):
        if options.get("fused"):
            return {m.index: m.entries.to(torch.float64 if wide else m.entries.dtype) for m in snap.members}
        return original(snap, wide=wide, steps=steps, **options)

    original = step_variants.stepped
    monkeypatch.setattr(step_variants, "stepped", lazy)
    found = list(wrong_variants(snap(torch.optim.SGD, torch.float32, lr=0.1, fused=True)))
    assert {(f.variant, f.dtype, f.in_use) for f in found} == {
        ("fused", "float64", True),
        ("fused", "float32", True),
    }
    assert all(f.error >= f.update / 2 for f in found)
    assert all(f.right == ("for-loop", "foreach") for f in found)


@pytest.mark.parametrize(
    ("options", "variant"),
    [({}, "for-loop"), ({"foreach": True}, "foreach"), ({"fused": True}, "fused"), ({"foreach": False}, "for-loop")],
)
def test_the_variant_that_a_loop_uses(options, variant):
    assert in_use(snap(torch.optim.Adam, torch.float32, **options), 0) == variant


def test_torchs_fused_sgd_leaves_low_precision_weights_on_a_cpu_where_they_are():
    p = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=0.1, fused=True).step()
    if bool(p.any()):
        pytest.skip("this torch moves them")
    (found,) = wrong_variants(snap(torch.optim.SGD, torch.bfloat16, lr=0.1, fused=True))
    assert (found.variant, found.in_use) == ("fused", True)
    assert "for-loop" in found.right
    assert found.error >= found.update / 2
