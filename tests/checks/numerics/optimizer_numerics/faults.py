"""The numbers of torch's own optimizers: eps that is 0 where it is added, betas the wrong way round, variants."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, AutoEncoder, lm_loss, mlp
from tests.loops.pairs import pair

# Float16 weights under Adam with its default eps: small gradients have no second moment.


def trained(model, optimizer):
    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


def regression(dtype):
    def make():
        model = mlp(6, 32, 32, 1).to(dtype)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            for x, y in batches:
                loss = F.mse_loss(model(x.to(dtype)).float(), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "default_eps_in_float16",
    "optimizer_numerics",
    "eps_underflows",
    mentions=("1e-08",),
    where="optimizer.step()",
    faulty=regression(torch.float16),
    fixed=regression(torch.float32),
)


# The second moment of Adam is kept in float16 to save memory, by hand; the weights stay in float32.


def shrink(optimizer, dtype):
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].to(dtype)


def shrunken(dtype):
    def make():
        model = AutoEncoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)

        def fit(batches):
            for x, _ in batches:
                optimizer.zero_grad(set_to_none=True)
                F.mse_loss(model(x), x).backward()
                optimizer.step()
                shrink(optimizer, dtype)

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "state_kept_in_float16",
    "optimizer_numerics",
    "eps_underflows",
    change='state["exp_avg_sq"].to(dtype)',
    faulty=shrunken(torch.float16),
    fixed=shrunken(torch.bfloat16),
)


# eps=0, and rows of the token table that do not occur in the batch.


def language(eps):
    def make():
        model = GPT(vocab=24)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=eps)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                lm_loss(model, batch).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.tokens(), fit=fit)

    return make


pair(
    "eps_of_zero_and_rows_without_gradient",
    "optimizer_numerics",
    "eps_missing",
    culprits=("token.weight",),
    faulty=language(0.0),
    fixed=language(1e-8),
)


# Betas the wrong way round.


class Config:
    def __init__(self, first, second):
        self.learning_rate, self.beta1, self.beta2 = 3e-3, first, second


def configured(config):
    def make():
        model = mlp(6, 24, 3)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, betas=(config.beta1, config.beta2), weight_decay=0.01
        )
        return trained(model, optimizer)

    return make


pair(
    "betas_the_wrong_way_round",
    "optimizer_numerics",
    "betas_swapped",
    mentions=("(0.999, 0.9)", "1.053"),
    where="optimizer.step()",
    faulty=configured(Config(0.999, 0.9)),
    fixed=configured(Config(0.9, 0.999)),
)


# A larger eps in float16: nothing is infinite, but the second moment of small gradients is still 0.


def scaled(dtype):
    def make():
        model = mlp(6, 24, 3).to(dtype)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(dtype)).float(), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "second_moment_lost_in_float16",
    "optimizer_numerics",
    "variants_differ",
    level="advice",
    faulty=scaled(torch.float16),
    fixed=scaled(torch.float32),
)


# A training that goes on with the state of a checkpoint, whose counts of steps were written in bfloat16.


def resumed(small):
    def make():
        model = mlp(6, 24, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for p in model.parameters():
            counted = torch.tensor(200.0, dtype=torch.bfloat16 if small else torch.float32)
            moments = {"exp_avg": torch.full_like(p, 1e-3), "exp_avg_sq": torch.full_like(p, 1e-5)}
            optimizer.state[p] = {"step": counted, **moments}
        return trained(model, optimizer)

    return make


pair(
    "steps_counted_in_bfloat16",
    "optimizer_numerics",
    "step_count_saturates",
    culprits=("0.weight",),
    where="optimizer.step()",
    faulty=resumed(small=True),
    fixed=resumed(small=False),
)


# Adams of a project's own: one reads its count of steps and never writes it, one adds 1 to it at every tensor.


class OwnAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=3e-3, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.steps = 0

    def counted(self, state, first):
        state["t"] += 1
        return state["t"]

    def decayed(self, p, decay):
        return p.grad.add(p, alpha=decay)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for i, p in enumerate(group["params"]):
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), v=torch.zeros_like(p), t=0)
                g = self.decayed(p, group["weight_decay"])
                t = self.counted(state, i == 0 and group is self.param_groups[0])
                m, v = state["m"].lerp_(g, 1 - b1), state["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
                size = group["lr"] * (1 - b2**t) ** 0.5 / (1 - b1**t)
                p.addcdiv_(m, v.sqrt() + group["eps"], value=-size)  # eps beside the average as it is


class ReadsCount(OwnAdam):
    def counted(self, state, first):
        return state["t"] + 1


class CountsSteps(OwnAdam):
    def counted(self, state, first):
        self.steps += first
        return self.steps


class CountsTensors(OwnAdam):
    def counted(self, state, first):
        self.steps += 1
        return self.steps


class LosesTheSum(OwnAdam):
    def decayed(self, p, decay):
        g = p.grad.clone()
        g.add(p, alpha=decay)
        return g


def stepped_by(kind):
    def make():
        model = mlp(6, 24, 3)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        optimizer = kind([{"params": matrices, "weight_decay": 1e-2}, {"params": vectors}])
        return trained(model, optimizer)

    return make


pair(
    "count_of_steps_read_and_not_written",
    "optimizer_numerics",
    "steps_miscounted",
    culprits=("0.weight",),
    change="p.addcdiv_(",
    faulty=stepped_by(ReadsCount),
    fixed=stepped_by(OwnAdam),
)

pair(
    "count_of_steps_raised_at_every_tensor",
    "optimizer_numerics",
    "steps_miscounted",
    faulty=stepped_by(CountsTensors),
    fixed=stepped_by(CountsSteps),
)

# The sum of gradient and decay is computed and not kept: add() for add_().

pair(
    "sum_with_the_decay_is_not_kept",
    "optimizer_numerics",
    "option_without_effect",
    culprits=("weight_decay",),
    mentions=("weight_decay=0.01 of LosesTheSum",),
    change="p.addcdiv_(",
    faulty=stepped_by(LosesTheSum),
    fixed=stepped_by(OwnAdam),
)


# The decay is written to the weights in bfloat16, where 1 - lr * weight_decay is 1.


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=2e-3, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def decayed(self, p, left):
        return p.mul_(left).float()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                new = self.decayed(p, 1 - group["lr"] * group["weight_decay"]) - group["lr"] * p.grad.float().sign()
                bits = new.view(torch.int32) + torch.randint_like(new, 0, 1 << 16, dtype=torch.int32)
                p.copy_(bits.bitwise_and_(-(1 << 16)).view(torch.float32))


class DecaysInFloat32(SignSGD):
    def decayed(self, p, left):
        return p.float() * left


def in_bfloat16(kind):
    def make():
        model = mlp(6, 24, 3).bfloat16()
        optimizer = kind(model.parameters(), weight_decay=0.2)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x.bfloat16()).float(), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "decay_rounded_away_in_bfloat16",
    "optimizer_numerics",
    "option_without_effect",
    culprits=("weight_decay",),
    mentions=("rounding removes it",),
    change="return p.mul_(left).float()",
    faulty=in_bfloat16(SignSGD),
    fixed=in_bfloat16(DecaysInFloat32),
)
