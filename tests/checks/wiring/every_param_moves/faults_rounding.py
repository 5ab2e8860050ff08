"""Parameters that get gradients and never move: rounded away in bfloat16, or left out by an optimizer of one's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, lm_loss, mlp
from tests.loops.pairs import pair

# A language model in bfloat16 under AdamW: the norms' gains stay at 1.0.


def train_lm(model, optimizer, batches, dtype):
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.float32):
            loss = lm_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def language(dtype):
    def make():
        model = GPT().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train_lm(model, optimizer, batches, dtype),
        )

    return make


pair(
    "norm_gains_in_bfloat16",
    "every_param_moves",
    "lost_to_rounding",
    culprits=("blocks.0.norm1.weight", "blocks.0.norm2.weight", "norm.weight"),
    mentions=("7.8e-03",),
    faulty=language(torch.bfloat16),
    fixed=language(torch.float32),
)


# Float16 weights, batches as dicts, a warm-up that ends at a rate which float16 cannot hold.


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.GELU())
        self.scale = nn.Parameter(torch.full((24,), 4.0))
        self.head = nn.Linear(24, 1)

    def forward(self, features):
        return self.head(self.body(features.to(self.head.weight.dtype)) * self.scale)


def scorer(half):
    def make():
        model = Scorer()
        if half:
            model = model.half()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, eps=1e-4)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
        x, y = data.table()

        def fit(batches):
            for batch in batches:
                loss = F.mse_loss(model(batch["features"]).float(), batch["score"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                warmup.step()

        return TrainLoop(model=model, optimizer=optimizer, batch={"features": x, "score": y}, fit=fit)

    return make


pair(
    "scale_in_float16",
    "every_param_moves",
    "lost_to_rounding",
    culprits=("scale",),
    faulty=scorer(half=True),
    fixed=scorer(half=False),
)


# No norms: most weights lose their updates, and those near zero move.


def regression(dtype):
    def make():
        model = mlp(6, 48, 48, 1).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)

        def fit(batches):
            for x, y in batches:
                loss = F.smooth_l1_loss(model(x.to(dtype)).float(), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "most_weights_in_bfloat16",
    "every_param_moves",
    "lost_to_rounding",
    culprits=("2.weight",),
    mentions=("%",),
    faulty=regression(torch.bfloat16),
    fixed=regression(torch.float32),
)


# An optimizer of one's own that goes through its first group only.


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def groups(self):
        return self.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.groups():
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(mean.lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - second)
        return loss


class LionOfOneGroup(Lion):
    def groups(self):
        return self.param_groups[:1]


def grouped(optimizer_class):
    def make():
        model = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 3))
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = optimizer_class(groups, lr=1e-3)

        def fit(batches):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "own_optimizer_steps_its_first_group",
    "every_param_moves",
    "not_updated",
    culprits=("0.bias", "1.weight", "1.bias", "3.bias"),
    change="def step(self, closure=None):",
    faulty=grouped(LionOfOneGroup),
    fixed=grouped(Lion),
)


# Signs of gradients by hand: what `reshape` gives of a transposed matrix is a copy, and the update stays in it.


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    def update(self, p, lr):
        p.data.add_(p.grad.sign(), alpha=-lr)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"])


class SignSGDIntoACopy(SignSGD):
    def update(self, p, lr):
        flat = p.data.t().reshape(-1) if p.dim() > 1 else p.data
        flat.add_(p.grad.t().reshape(-1).sign() if p.dim() > 1 else p.grad.sign(), alpha=-lr)


def signs(optimizer_class):
    def make():
        model = mlp(6, 24, 3)
        optimizer = optimizer_class(model.parameters(), lr=1e-3)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "own_optimizer_updates_a_copy",
    "every_param_moves",
    "written_to_a_copy",
    culprits=("0.weight", "2.weight"),
    faulty=signs(SignSGDIntoACopy),
    fixed=signs(SignSGD),
)
