"""Low-precision weights that lose nothing that matters."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.low_precision import BF16, classifier
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.plain import cross_entropy, loop
from tests.loops.random_data import curves, points

# What rounding would take is kept elsewhere.


class KahanSGD(torch.optim.Optimizer):
    """What each step loses is added to the next."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                lost = self.state[p].setdefault("lost", torch.zeros_like(p))
                lost.sub_(p.grad, alpha=group["lr"])
                before = p.clone()
                p.add_(lost)
                lost.sub_(p - before)


@odd(notes="bf16 weights at a rate far below their spacing: a compensation buffer keeps what rounding takes (Kahan)")
def kahan_summation_in_bf16() -> TrainLoop:
    return classifier(lambda params: KahanSGD(params, lr=0.05), BF16)


def rounded_at_random(values, dtype):
    """Up or down to a neighbour in bf16, with probabilities that keep the mean."""
    noise = torch.randint_like(values, 0, 1 << 16, dtype=torch.int32)
    bits = values.contiguous().view(torch.int32) if values.dtype is torch.float32 else None
    return values.to(dtype) if bits is None else ((bits + noise) & -65536).view(torch.float32).to(dtype)


class StochasticAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                wide = p.to(torch.float32) if p.dtype is BF16 else p.clone()
                g = p.grad.to(wide.dtype)
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(g)).lerp_(g, 1 - first)
                v = state.setdefault("v", torch.zeros_like(g)).lerp_(g * g, 1 - second)
                state["t"] = t = state.get("t", 0) + 1
                step = (m / (1 - first**t)) / ((v / (1 - second**t)).sqrt() + 1e-8)
                p.copy_(rounded_at_random(wide - group["lr"] * step, p.dtype))


@odd(notes="bf16 weights whose updates are rounded up or down at random, right in the mean (stochastic rounding)")
def stochastic_rounding_in_bf16() -> TrainLoop:
    return classifier(lambda params: StochasticAdam(params, lr=3e-3), BF16)


class SwappedMasters:
    """The float32 master stands in the parameter while torch's own optimizer steps, its bf16 copy at all other
    times."""

    def __init__(self, model, lr):
        self.params = list(model.parameters())
        self.masters = [p.detach().to(torch.float32) for p in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=lr)

    def step(self):
        for p, master in zip(self.params, self.masters, strict=True):
            grad, p.grad = p.grad.to(torch.float32), None
            p.data = master
            p.grad = grad
        self.optimizer.step()
        for p in self.params:
            p.grad = None
            p.data = p.data.to(BF16)


@odd(notes="bf16 weights in AdamW at 3e-4: during the step they are float32 masters, put in by swapping .data")
def masters_swapped_in_for_the_step() -> TrainLoop:
    model = relu_mlp(8, 24, 4).to(BF16)
    swapped = SwappedMasters(model, lr=3e-3)

    def fit(batches):
        for x, y in batches:
            F.cross_entropy(model(x.to(BF16)).float(), y).backward()
            swapped.step()

    return TrainLoop(model=model, optimizer=swapped.optimizer, batch=points(), fit=fit)


class RoundedWeights:
    """Float32 weights are trained; the bf16 net that computes is copied from them after every step."""

    def __init__(self):
        self.weights = relu_mlp(8, 24, 1)
        self.served = copy.deepcopy(self.weights).to(BF16).requires_grad_(False)


@odd(notes="a bf16 copy of the average moves seldom: the average itself is kept in float32")
def bf16_copy_of_a_float32_average() -> TrainLoop:
    both = RoundedWeights()
    average = copy.deepcopy(both.weights).requires_grad_(False)
    optimizer = torch.optim.Adam(both.weights.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(both.weights(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for a, p, low in zip(
                    average.parameters(), both.weights.parameters(), both.served.parameters(), strict=True
                ):
                    a.lerp_(p, 0.001)
                    low.copy_(a)

    return TrainLoop(model={"model": both.weights, "served": both.served}, optimizer=optimizer, batch=curves(), fit=fit)


@odd(notes="a frozen bf16 reference as large as the trained net, never moved by anybody (preference tuning)")
def frozen_bf16_reference_of_the_same_shape() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    reference = copy.deepcopy(model).to(BF16).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def fit(batches):
        for x, y in batches:
            with torch.no_grad():
                old = reference(x.to(BF16)).float().log_softmax(-1)
            new = model(x).log_softmax(-1)
            loss = F.nll_loss(new, y) + 0.1 * F.kl_div(new, old, log_target=True, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model={"model": model, "reference": reference}, optimizer=optimizer, batch=points(), fit=fit)


class AveragedNet(nn.Module):
    def __init__(self, decay):
        super().__init__()
        self.net, self.decay = relu_mlp(8, 16, 4).to(BF16), decay
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        return self.net(x.to(BF16)).float()

    @torch.no_grad()
    def follow(self):
        for slow, p in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.lerp_(p, 1 - self.decay)


@odd(notes="an average in bf16 with decay 0.9: it moves by steps, coarser than it should, and follows")
def fast_average_in_bf16() -> TrainLoop:
    model = AveragedNet(0.9)
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.5)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.follow()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


# bf16 weights and updates that are large enough.


@odd(notes="pure bf16 under SGD at a rate of 0.5: steps are larger than the spacing of the weights")
def sgd_at_a_large_rate_in_bf16() -> TrainLoop:
    return classifier(lambda params: torch.optim.SGD(params, lr=0.5), BF16)


@odd(notes="pure bf16 under a warm-up from a hundredth of the rate: the first updates are lost, the later ones not")
def warm_up_in_bf16() -> TrainLoop:
    model = relu_mlp(8, 24, 4).to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=60)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(BF16)).float(), y).backward()
            optimizer.step()
            schedule.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = relu_mlp(8, 32, 32).to(BF16).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x):
        h = self.trunk(x.to(BF16)).to(self.down.weight.dtype)
        return self.up(self.down(h))


@odd(notes="most weights are bf16 and never move: the trunk is frozen, the adapters are float32")
def frozen_bf16_trunk_with_float32_adapters() -> TrainLoop:
    model = Adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    return loop(model, points(), cross_entropy, optimizer)


@odd(notes="bf16 weights under torch's Adafactor, whose steps are relative to the weights")
def adafactor_in_bf16() -> TrainLoop:
    return classifier(lambda params: torch.optim.Adafactor(params, lr=0.03), BF16)


@odd(notes="tables of positions and class centres stay as they are, in bfloat16")
def fixed_tables_in_bfloat16() -> TrainLoop:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tables = {"shift": torch.linspace(-1.0, 1.0, 6).bfloat16(), "seen": torch.zeros(3, dtype=torch.bfloat16)}

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x + tables["shift"].float()), y).backward()
            optimizer.step()
            tables["seen"] = y.bincount(minlength=3).bfloat16()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)
