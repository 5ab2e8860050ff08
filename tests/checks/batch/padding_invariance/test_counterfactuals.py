"""Each path that is blocked gives what the same rows give when they are cut."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.checks.batch.padding_invariance.counterfactuals import BlockedPaths
from pytest_trainloop.checks.batch.padding_invariance.slices import Span

TOTAL, REAL, WIDTH = 7, 4, 6
RIGHT, LEFT = Span(TOTAL, 0, REAL), Span(TOTAL, TOTAL - REAL, TOTAL)


def watch():
    return SimpleNamespace(is_suspended=False, stepping=0, backward=None, suspended=contextlib.nullcontext)


def run(compute, x, span, *paths):
    mode = BlockedPaths(span, frozenset(paths))
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        with contextlib.ExitStack() as around:
            for context in mode.contexts(watch()):
                around.enter_context(context)
            return compute(given), mode.flow


def rows(seed=0):
    return torch.randn(3, TOTAL, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def real(x, span):
    return x[:, span.start : span.stop]


def heads(x):
    return x.unflatten(-1, (2, 3)).transpose(1, 2)


MHA = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=torch.float64)
LSTM = nn.LSTM(WIDTH, 5, batch_first=True, dtype=torch.float64)
GRU = nn.GRU(WIDTH, 5, dtype=torch.float64)
TABLE = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hand(x):
    return (x @ x.transpose(1, 2)).softmax(-1) @ x


@pytest.mark.parametrize("span", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize(
    "compute",
    [
        by_hand,
        lambda x: F.softmax(x @ x.transpose(1, 2), dim=2) @ x,
        lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x)).transpose(1, 2).flatten(2),
        lambda x: (
            F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)
        ),
        lambda x: MHA(x, x, x)[0],
        lambda x: MHA(x, x, x, need_weights=False, key_padding_mask=torch.zeros(x.shape[:2], dtype=torch.bool))[0],
        lambda x: MHA(x, x, x, attn_mask=torch.ones(len(x[0]), len(x[0]), dtype=torch.bool).triu(1))[0],
    ],
)
def test_real_positions_look_at_no_padding(compute, span):
    out, flow = run(compute, rows(), span, "attention")
    torch.testing.assert_close(real(out, span), compute(real(rows(), span)))
    assert [m.path for m in flow.blocked] == ["attention"] or (span is RIGHT and not flow.blocked)
    assert flow.inverted is None


@pytest.mark.parametrize("span", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.mean(1),
        lambda x: torch.mean(x, dim=1, keepdim=True),
        lambda x: x.transpose(1, 2).sum(-1),
        lambda x: x.max(dim=1).values,
        lambda x: x.transpose(1, 2).amax((2,)),
        lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1),
        lambda x: nn.AdaptiveMaxPool1d(1)(x.transpose(1, 2)),
        lambda x: F.max_pool1d(x.transpose(1, 2), x.shape[1]),
        lambda x: (x[..., :1].softmax(1) * x).sum(1),
        lambda x: LSTM(x)[1][0][-1],
        lambda x: LSTM(x)[1][1],
        lambda x: GRU(x.transpose(0, 1))[1][-1],
        lambda x: GRU(x.transpose(0, 1))[0][-1],
    ],
)
def test_pooling_over_real_positions(compute, span):
    out, flow = run(compute, rows(), span, "pooling", "attention")
    torch.testing.assert_close(out, compute(real(rows(), span)))
    assert flow.blocked


@pytest.mark.parametrize(
    ("compute", "span"),
    [
        (lambda x: x[:, -1], RIGHT),
        (lambda x: x[:, TOTAL - 1] if x.shape[1] == TOTAL else x[:, -1], RIGHT),
        (lambda x: x[:, -1:, :2], RIGHT),
        (lambda x: x[..., -1, :], RIGHT),
        (lambda x: x.transpose(0, 1)[-1], RIGHT),
        (lambda x: x.select(1, -1), RIGHT),
        (lambda x: x[:, 0], LEFT),
    ],
)
def test_ends_that_are_read(compute, span):
    out, flow = run(compute, rows(), span, "pooling")
    torch.testing.assert_close(out, compute(real(rows(), span)))
    assert [m.path for m in flow.blocked] == ["pooling"]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + F.embedding(torch.arange(x.shape[1]), TABLE),
        lambda x: x + F.embedding(torch.arange(x.shape[1]).expand(3, -1), TABLE),
        lambda x: x + TABLE[: x.shape[1]],
        lambda x: x + TABLE[None][:, : x.shape[1]],
        lambda x: x + TABLE[torch.arange(x.shape[1])],
    ],
)
def test_positions_from_the_first_real_one(compute):
    out, flow = run(compute, rows(), LEFT, "positions")
    torch.testing.assert_close(real(out, LEFT), compute(real(rows(), LEFT)))
    assert [m.path for m in flow.blocked] == ["positions"]
    _, untouched = run(compute, rows(), RIGHT, "positions")
    assert not untouched.blocked
