"""Loops that name a lower precision all over run wholly in float64 when they are asked to."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.runs.float64 import double_precision, widen_batch
from pytest_trainloop.runs.run import RunPlan, run


class Head(nn.Module):
    """Four numbers in, one out, with something between."""

    def __init__(self, between=None, width=4):
        super().__init__()
        self.body, self.head = nn.Linear(4, width), nn.Linear(width, 1)
        self._between = between or torch.tanh

    def forward(self, x):
        return self.head(self._between(self.body(x)))


class Normed(Head):
    def __init__(self):
        super().__init__(lambda h: self.norm(h) * self.scale)
        self.register_buffer("scale", torch.full((4,), 0.5, dtype=torch.float32))
        self.norm = nn.BatchNorm1d(4)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x):
        state = (torch.zeros(1, len(x), 5, dtype=torch.float32), torch.zeros(1, len(x), 5))
        return self.head(self.rnn(x.unsqueeze(-1), state)[0][:, -1])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 1)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        h = self.embed(x.unsqueeze(-1).float())
        mask = torch.triu(torch.full((4, 4), float("-inf"), dtype=torch.float32), 1)
        return self.head(self.attend(h, h, h, attn_mask=mask)[0].mean(1))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight).sum(1, keepdim=True)


class FromNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(np.random.randn(4, 1).astype(np.float32)))
        self.register_buffer("mean", torch.as_tensor(np.ones(4, dtype=np.float32)))

    def forward(self, x):
        return (x - self.mean) @ self.weight


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x.float() * x).to(torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        return (2 * ctx.saved_tensors[0] * gradient).float()


def buffers_in_the_middle(h):
    out = torch.zeros(h.shape, dtype=torch.float32)
    out[:] = h
    return out + torch.empty(4, dtype=torch.float32).fill_(0.1) + h.new_zeros(4)


def types_by_name(h):
    return h.type(torch.float32).to("cpu", torch.float32).half().bfloat16() + torch.ones_like(h, dtype=torch.float16)


def positions(h):
    steps = torch.arange(4, dtype=torch.float32) / 4 + torch.linspace(0, 1, 4, dtype=torch.float32)
    return h * torch.sin(steps) + F.one_hot(torch.arange(4) % 2, 4).float().sum(0) + torch.tensor([1.5] * 4)


def checkpointed(h):
    return checkpoint(lambda x: torch.tanh(x.float()), h, use_reentrant=False)


def loop(model, optimizer=None, **how):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp, scaled, clip = how.get("amp"), how.get("scaled", False), how.get("clip", False)

    def fit(batches):
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", amp or torch.bfloat16, enabled=amp is not None):
                loss = F.mse_loss(model(x), y.float())
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

    x = torch.randn(6, 4)
    return TrainLoop(model=model, optimizer=optimizer, batch=(x, x.sum(1, keepdim=True)), fit=fit)


MADE = {
    "plain": lambda: loop(Head()),
    "float-on-hidden": lambda: loop(Head(lambda h: torch.tanh(h.float()))),
    "explicit-dtypes": lambda: loop(Head(buffers_in_the_middle)),
    "types-by-name": lambda: loop(Head(types_by_name)),
    "positions": lambda: loop(Head(positions)),
    "autocast-bf16": lambda: loop(Head(), amp=torch.bfloat16),
    "autocast-fp16-scaler": lambda: loop(Head(), amp=torch.float16, scaled=True),
    "scaler-and-clip": lambda: loop(Head(), scaled=True, clip=True),
    "batch-norm-and-buffers": lambda: loop(Normed()),
    "lstm": lambda: loop(Recurrent()),
    "attention": lambda: loop(Attending()),
    "complex": lambda: loop(Spectral()),
    "numpy": lambda: loop(FromNumpy()),
    "own-function": lambda: loop(Head(lambda h: Squared.apply(h))),
    "checkpoint": lambda: loop(Head(checkpointed)),
    "half-model": lambda: loop(Head(lambda h: torch.tanh(h)).to(torch.bfloat16).float()),
    "bf16-model": lambda: loop(Head().to(torch.bfloat16)),
    "conv": lambda: loop(nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 1))),
    "adafactor-state": lambda: loop(m := Head(), torch.optim.Adafactor(m.parameters(), lr=1e-2)),
    "sgd-foreach": lambda: loop(m := Head(), torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, foreach=True)),
    "fused": lambda: loop(m := Head(), torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)),
}


@pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))
def test_a_loop_runs_wholly_in_float64(make):
    record = run(make, RunPlan(double=True))
    if record.raised is not None and "MKL FFT" in record.raised.summary:
        pytest.skip("this torch was built without these transforms")
    assert record.raised is None
    assert record.steps == 12
    assert record.double
    assert {p.dtype for p in record.parameters} <= {"float64", "complex128"}
    assert all(np.isfinite(root.value) for b in record.of(Backward) for root in b.roots)


def test_a_default_of_the_users_own_comes_back():
    torch.set_default_dtype(torch.float64)
    try:
        run(MADE["plain"], RunPlan(double=True))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_stays_in_single_precision_is_told():
    kept = torch.ones(1)  # made before the run

    def make():
        return loop(Head(lambda h: h + kept.mul_(1.0)))

    record = run(make, RunPlan(double=True))
    assert not record.double
    assert record.lower == ("aten.mul_.Tensor gave float32",)


def test_what_was_made_before_the_run_is_widened_where_it_is_used():
    kept = torch.ones(1)

    def make():
        return loop(Head(lambda h: h + (kept * 2) * 1.0))

    assert run(make, RunPlan(double=True)).double


def test_integers_and_booleans_stay():
    with double_precision():
        assert torch.arange(3).dtype == torch.int64
        assert (torch.ones(2) > 0).dtype == torch.bool
        assert torch.ones(2, dtype=torch.int32).dtype == torch.int32
        assert torch.ones(2).to(torch.uint8).dtype == torch.uint8
    torch.set_default_dtype(torch.float32)


def test_a_batch_is_widened_where_it_stands():
    batch = {"x": torch.ones(2), "ids": torch.arange(2), "z": torch.ones(2, dtype=torch.complex64), "name": "a"}
    wide = widen_batch(batch)
    assert wide is batch
    assert [wide[k].dtype for k in ("x", "ids", "z")] == [torch.float64, torch.int64, torch.complex128]
    assert widen_batch(torch.ones(1, dtype=torch.float16)).dtype == torch.float64


TABLE = torch.linspace(-1.0, 1.0, 4, dtype=torch.float32)


def test_what_is_read_from_a_file_is_as_it_was_written(tmp_path):
    torch.save({"table": TABLE, "module": nn.Linear(2, 2).state_dict()}, tmp_path / "kept.pt")
    with double_precision():
        read = torch.load(tmp_path / "kept.pt")
        model = nn.Linear(2, 2)
        model.load_state_dict(read["module"])
    assert torch.equal(read["table"], TABLE)
    assert torch.equal(model.weight, read["module"]["weight"].double())


def test_copies_of_what_was_made_before_are_copies():
    kept = {"table": TABLE, "module": nn.Linear(2, 2)}
    with double_precision():
        made = copy.deepcopy(kept)
        again = copy.deepcopy(TABLE.clone())
    assert torch.equal(made["table"].to(torch.float32), TABLE)
    assert torch.equal(made["module"].weight.float(), kept["module"].weight)
    assert again.shape == TABLE.shape
    assert TABLE.dtype is torch.float32
