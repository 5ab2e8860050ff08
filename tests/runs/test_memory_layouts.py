"""In every run of ours, weights, state and batches lie in memory as the project laid them out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop

WIDE = {"float32": "float64", "bfloat16": "float64", "complex64": "complex128"}


def from_numpy(tensor):
    """In float32 in a run in float64, too: it is cast afterwards."""
    return torch.from_numpy(tensor.float().numpy().astype(np.float32))


class LaidOut(nn.Module):
    """Weights and buffers in every layout, made by torch and made from numpy."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.turned = nn.Parameter((0.3 * torch.randn(64, 8)).t())
        self.cut = nn.Parameter(from_numpy(0.3 * torch.randn(8, 20))[:, 2:10])
        flat = from_numpy(0.3 * torch.randn(200))
        self.first, self.second = nn.Parameter(flat[10:74].view(8, 8)), nn.Parameter(flat[80:144].view(8, 8))
        self.out, self.tied = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.tied.weight = self.out.weight
        self.low = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.head = nn.Linear(8, 3)
        self.register_buffer("spread", torch.linspace(0.5, 1.5, 8).expand(3, 8), persistent=False)
        self.register_buffer("wide", from_numpy(torch.linspace(0.5, 1.5, 8)).expand(3, 8), persistent=False)
        self.register_buffer("standing", from_numpy(torch.randn(8, 3)).t())

    def forward(self, x):
        h = F.adaptive_avg_pool2d(F.relu(self.norm(self.conv(x))), 4).flatten(1)
        h = torch.tanh(h @ self.turned.t())
        h = h + torch.tanh(h @ self.cut)
        h = h + torch.tanh(h @ self.first @ self.second)
        h = self.tied(torch.tanh(self.out(h))) * self.low.to(h.dtype) * self.spread[0] * self.wide[0]
        return self.head((h * self.phase).real + h + self.standing[0])


def layout(named):
    """Dtype, shape, strides, offset, and the first tensor that shares the storage."""
    first, found = {}, {}
    for name, tensor in named:
        shared = first.setdefault(tensor.untyped_storage().data_ptr(), name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[name] = dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), shared
    return found


def batch_of(rows=16):
    drawn = torch.Generator().manual_seed(0)
    table = torch.randn(rows, 7, generator=drawn)
    return {
        "x": torch.randn(rows, 2, 8, 8, generator=drawn).to(memory_format=torch.channels_last),
        "y": torch.arange(rows) % 3,
        "left": table[:, :3],
        "right": table[:, 3:5],
        "turned": torch.randn(5, rows, generator=drawn).t(),
        "spread": torch.randn(1, 4, generator=drawn).expand(rows, 4),
    }


class Seen:
    """The layouts of a first loop, and what differs from them in any run."""

    def __init__(self):
        self.first, self.different, self.runs = {}, {}, 0

    def compare(self, what, named, *, shared=True):
        now = layout(named)
        for name, (dtype, *rest) in now.items():
            first, *others = self.first.setdefault((what, name), (dtype, *rest))
            rest, others = (rest, others) if shared else (rest[:2], others[:2])
            if rest != others or dtype not in (first, WIDE.get(first)):
                self.different[what, name] = f"{(dtype, *rest)}, not {(first, *others)}"

    def batch(self, batch):
        """Rows that we take are a copy: their axes keep their order, and no more."""
        x, turned = batch["x"], batch["turned"]
        if len(x) == 16 and batch["left"].stride(0) == 7:
            self.compare("batch", batch.items())
        elif len(x) > 1 and not (x.is_contiguous(memory_format=torch.channels_last) and turned.t().is_contiguous()):
            self.different["rows", len(x)] = f"{x.stride()}, {turned.stride()}"


def weights_of(model):
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]


def state_of(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = [(names[p], key, value) for p, state in optimizer.state.items() for key, value in state.items()]
    return [(f"{name}.{key}", value) for name, key, value in held if isinstance(value, torch.Tensor)]


def loop_that_looks(seen):
    def make(accumulate=1, precision="fp32"):
        model = LaidOut()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

        def fit(batches):
            seen.runs += 1
            model.train()
            for number, batch in enumerate(batches, start=1):
                seen.compare("weights", weights_of(model))
                seen.batch(batch)
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = F.cross_entropy(model(batch["x"]).float(), batch["y"]) / accumulate
                loss.backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.compare("state", state_of(model, optimizer), shared=False)

        def evaluate():
            model.eval()
            with torch.no_grad():
                loss = F.cross_entropy(model(batch_of()["x"]), batch_of()["y"])
            model.train()
            return loss

        def save(folder):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")

        def load(folder):
            state = torch.load(folder / "last.pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        seen.compare("built", weights_of(model))
        return TrainLoop(
            model=model, optimizer=optimizer, batch=batch_of(), fit=fit, evaluate=evaluate, save=save, load=load
        )

    return make


IN_FLOAT64 = ("every_param_moves", "accumulation_equivalence", "precision_parity", "resume_equivalence")


@pytest.mark.parametrize(
    "only", [pytest.param(IN_FLOAT64, id="some"), pytest.param(None, id="all", marks=pytest.mark.corpus)]
)
def test_runs_keep_the_layout(only):
    seen = Seen()
    seen.compare("weights", weights_of(LaidOut()))
    seen.compare("batch", batch_of().items())
    report = check_loop(loop_that_looks(seen), only=only, raises=False)
    assert seen.different == {}
    assert seen.runs >= 8
    assert {r.check: r.reason for r in report.results if r.outcome in ("failed", "error")} == {}
    looked = {r.check for r in report.results if r.outcome == "passed"}
    assert looked >= {"accumulation_equivalence", "resume_equivalence"}
