"""A call through which the rest comes in gives on its replacement what the same rows give when they are cut."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.instruments.batches.cut import Cut
from pytest_trainloop.instruments.tracing import lockstep
from pytest_trainloop.instruments.tracing.lockstep import Lockstep, Tape

TOTAL, REAL, WIDTH = 7, 4, 6
RIGHT, LEFT = range(REAL), range(TOTAL - REAL, TOTAL)
SIDES = pytest.mark.parametrize("kept", [RIGHT, LEFT], ids=["right", "left"])


def rows(seed=0, length=TOTAL):
    return torch.randn(3, length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def under(mode, compute, x, item=None):
    thread = SimpleNamespace(suspended=0, stepping=0)
    watch = SimpleNamespace(thread=thread, backward=None, suspended=contextlib.nullcontext, module_path=str)
    x = x.clone().requires_grad_()
    with torch.enable_grad(), contextlib.ExitStack() as around:
        for context in mode.contexts(watch):
            around.enter_context(context)
        if item is not None:
            mode.before_item(0, item)
        return compute(x), x


def in_step(compute, kept=RIGHT, patched=lambda entry: True, x=None, item=None):
    """What a computation gives on the part, what it gives on the whole in step with it, and the mode."""
    x = rows() if x is None else x
    tape = Tape()
    part, _ = under(tape, compute, x[:, list(kept)])
    mode = Lockstep(tape, Cut(TOTAL, kept), patched)
    whole, leaf = under(mode, compute, x, item)
    if whole.requires_grad:
        whole.sum().backward()
    mode.gradient = leaf.grad
    return part, whole, mode


def heads(x):
    return x.unflatten(-1, (2, 3)).transpose(1, 2)


MHA = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=torch.float64)
LSTM = nn.LSTM(WIDTH, 5, batch_first=True, dtype=torch.float64)
GRU = nn.GRU(WIDTH, 5, dtype=torch.float64)
LINEAR = nn.Linear(WIDTH, 2, dtype=torch.float64)
TABLE = rows(1)[0]


@SIDES
@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x, "softmax"),
        (lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x)).transpose(1, 2).flatten(2), "scaled"),
        (lambda x: MHA(x, x, x)[0], "multi_head"),
        (lambda x: MHA(x, x, x, need_weights=False)[0], "multi_head"),
        (lambda x: F.conv1d(x.transpose(1, 2), TABLE[:, :, None].repeat(1, 1, 3), padding=1).transpose(1, 2), "conv1d"),
        (lambda x: x - x.mean(1, keepdim=True), "mean"),
        (lambda x: x.cumsum(1), "cumsum"),
        (lambda x: x + TABLE[: x.shape[1]], "__getitem__"),
        (lambda x: x + F.embedding(torch.arange(x.shape[1]), TABLE), "embedding"),
        (lambda x: x.clone().add_(TABLE[: x.shape[1]]), "__getitem__"),
        (lambda x: x.clone().sub_(x.sum(1, keepdim=True)), "sum"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_by_position(compute, name, kept):
    part, whole, mode = in_step(compute, kept)
    torch.testing.assert_close(whole[:, list(kept)], part)
    assert all(name in entry.op for entry in mode.entries[:1])
    assert mode.entries or kept is RIGHT
    assert mode.unlike is None


@SIDES
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.mean(1),
        lambda x: x.transpose(1, 2).sum(-1),
        lambda x: x.max(dim=1).values,
        lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1),
        lambda x: (x[..., :1].softmax(1) * x).sum(1),
        lambda x: LSTM(x)[1][0][-1],
        lambda x: GRU(x.transpose(0, 1))[0][-1],
        lambda x: x[:, -1],
        lambda x: x[..., 0, :],
        lambda x: torch.zeros(3, WIDTH, dtype=x.dtype).index_add_(0, torch.arange(3).repeat(x.shape[1]), joined(x)),
    ],
)
def test_pooled(compute, kept):
    part, whole, mode = in_step(compute, kept)
    torch.testing.assert_close(whole, part)
    assert mode.unlike is None


def joined(x):
    return x.transpose(0, 1).flatten(0, 1)


def test_the_gradient_of_what_is_replaced_is_that_of_the_part():
    _, _, mode = in_step(lambda x: x.clone().mul_(x.amax(1, keepdim=True)).mean(1))
    assert not mode.gradient[:, REAL:].any()
    x = rows()[:, :REAL].requires_grad_()
    (x * x.amax(1, keepdim=True)).mean(1).sum().backward()
    torch.testing.assert_close(mode.gradient[:, :REAL], x.grad)


def test_nothing_is_replaced_that_is_not_asked_for():
    part, whole, mode = in_step(lambda x: x.mean(1), patched=lambda entry: False)
    assert not torch.allclose(part, whole)
    assert [(e.op, e.axes, e.lost, e.joins, e.moved) for e in mode.entries] == [("mean", 3, 1, True, False)]
    assert mode.entries[0].trained


def test_a_silent_one_gives_linear_layers_no_gradient_from_the_rest():
    layer, tape = nn.Linear(WIDTH, 2, dtype=torch.float64), Tape()

    def compute(x):
        return layer(x).square().sum()

    under(tape, compute, rows()[:, :REAL])
    loss, x = under(Lockstep(tape, Cut(TOTAL, RIGHT), lambda entry: False, silent=True), compute, rows())
    loss.backward()
    assert x.grad[:, :REAL].any()
    assert not x.grad[:, REAL:].any()


def test_a_call_that_cannot_be_made_on_the_part_is_named():
    _, _, mode = in_step(lambda x: x - x.mean(1, keepdim=True), patched=lambda entry: False)
    assert ([entry.op for entry in mode.entries], mode.unlike.op) == (["mean"], "sub")


@pytest.mark.parametrize(("real", "elsewhere"), [(-torch.inf, True), (0.0, False)])
def test_attention_to_the_rest_alone(real, elsewhere):
    def compute(x):
        bias = torch.zeros(x.shape[1], dtype=x.dtype)
        bias[:REAL] = real if x.shape[1] > REAL else 0.0
        return F.scaled_dot_product_attention(
            query=heads(x), key=heads(x), value=heads(x), attn_mask=bias.expand(3, 2, 1, -1)
        )

    assert (in_step(compute, patched=lambda entry: False)[2].looks_elsewhere is not None) is elsewhere


@pytest.mark.parametrize(
    ("term", "met"),
    [
        (lambda x, errors, mask: errors.square().mean(), ["subtraction"]),
        (lambda x, errors, mask: torch.einsum("btf,btf->", errors, errors), ["subtraction"]),
        (lambda x, errors, mask: (errors.square() * mask).mean() + x.square().mean(), []),
        (lambda x, errors, mask: LINEAR(errors).mean(), []),
    ],
    ids="mean product masked in_the_model".split(),
)
def test_outputs_that_meet_the_batch_and_are_trained_there(term, met):
    target = rows(2)

    def compute(x):
        given = target[:, : x.shape[1]] if x.shape[1] < TOTAL else target
        mask = torch.arange(x.shape[1])[None, :, None] < REAL
        return term(x, x - given, mask)

    mode = in_step(compute, patched=lambda entry: False, item=target)[2]
    assert [meeting.op for meeting in mode.meetings] == met


def test_a_tape_holds_the_shape_of_what_has_a_gradient_and_no_more_than_its_bound(monkeypatch):
    tape = Tape()
    under(tape, lambda x: x.mean(1) * 2 + x.sum(), rows())
    assert all(call.args[0].is_meta for call in tape.calls.values())
    monkeypatch.setattr(lockstep, "MOST_BYTES", 0)
    bounded = Tape()
    under(bounded, lambda x: x.mean(1) * 2 + x.sum(), rows())
    assert len(bounded.calls) == 1


@pytest.mark.parametrize("time_first", [False, True])
def test_the_rest_of_a_flattened_axis_is_known_in_either_order(time_first):
    cells = torch.ones(TOTAL, 3) * (torch.arange(TOTAL) < REAL)[:, None] if time_first else None
    cells = torch.ones(3, TOTAL) * (torch.arange(TOTAL) < REAL) if cells is None else cells
    cut = Cut(TOTAL, RIGHT)
    assert cut.has_rest(cells.flatten(), (3 * REAL,)) is False
    assert cut.has_rest(cells.flatten() + 1, (3 * REAL,)) is True
    assert cut.has_rest(cells.flatten(), (3 * REAL - 1,)) is None
