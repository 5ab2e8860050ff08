"""Optimizers with unusual numbers, flags and parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import plain
from tests.loops.low_precision import classifier
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import points

# Unusual numbers and flags.


@odd(notes="eps of 1e-3: the step is nearer to plain momentum where gradients are small")
def adam_with_large_eps() -> TrainLoop:
    return classifier(lambda params: torch.optim.Adam(params, lr=2e-2, eps=1e-3))


@odd(notes="an eps of 1e-4 in float16, where 1e-8 would be 0, under a fused step that computes in float32")
def fused_adam_in_float16() -> TrainLoop:
    return classifier(lambda params: torch.optim.Adam(params, lr=5e-3, eps=1e-4, fused=True), torch.float16)


@odd(notes="no eps at all: every entry has a gradient, so that nothing is divided by zero (RMSprop)")
def rmsprop_without_eps() -> TrainLoop:
    return classifier(
        lambda params: torch.optim.RMSprop(params, lr=3e-3, eps=0.0), model=nn.Sequential(nn.Linear(8, 4))
    )


@odd(notes="betas (0.95, 0.9): the first above the second, yet steps do not grow within hundreds of steps")
def first_beta_a_little_above_the_second() -> TrainLoop:
    return classifier(lambda params: torch.optim.AdamW(params, lr=5e-3, betas=(0.95, 0.9)))


@odd(notes="the betas of an Adam the wrong way round under amsgrad, whose second moment never falls")
def amsgrad_with_a_long_first_moment() -> TrainLoop:
    return classifier(lambda params: torch.optim.Adam(params, lr=5e-3, betas=(0.95, 0.9), amsgrad=True))


@odd(notes="maximize=True on a loss with the sign turned, fused")
def maximised_by_a_fused_step() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, maximize=True, fused=True)
    return plain.loop(model, points(), lambda model, batch: -F.cross_entropy(model(batch[0]), batch[1]), optimizer)


@odd(notes="foreach=True with a rate in a tensor would raise; the for-loop takes it")
def rate_in_a_tensor() -> TrainLoop:
    return classifier(lambda params: torch.optim.Adam(params, lr=torch.tensor(5e-3), foreach=False))


@odd(notes="one parameter has sparse gradients and an optimizer of its own")
def sparse_rows_in_sparse_adam() -> TrainLoop:
    table, head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 4)
    optimizers = [
        torch.optim.SparseAdam(table.parameters(), lr=2e-2),
        torch.optim.Adagrad(head.parameters(), lr=5e-2, fused=True),
    ]

    def fit(batches):
        for ids, y in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(head(table(ids)), y).backward()
            for optimizer in optimizers:
                optimizer.step()

    ids = torch.arange(8)
    return TrainLoop(model={"table": table, "head": head}, optimizer=optimizers, batch=(ids, ids % 4), fit=fit)


class Spectral(nn.Module):
    """A filter in the frequency domain: its weights are complex."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.view_as_complex(torch.randn(5, 2)))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8))


@odd(notes="complex weights beside real ones, in one Adam")
def complex_weights_in_adam() -> TrainLoop:
    return classifier(lambda params: torch.optim.Adam(params, lr=1e-2), model=Spectral())


class ScheduleFree(torch.optim.Optimizer):
    """The weights that are stepped, the average, and where the gradient is taken are three (schedule-free SGD)."""

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                z, x = state.setdefault("z", p.detach().clone()), state.setdefault("x", p.detach().clone())
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["count"])
                p.copy_(z.lerp(x, group["momentum"]))


@odd(notes="what the optimizer steps is not the parameter, which is a blend of two kept copies (schedule-free)")
def schedule_free_sgd() -> TrainLoop:
    return classifier(lambda params: ScheduleFree(params, lr=0.5))


class KeepsItsDecay(ScheduleFree):
    """Reads the decay from itself, and not from its groups."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, lr)
        self.defaults["weight_decay"] = self.wd = weight_decay
        for group in self.param_groups:
            group["weight_decay"] = weight_decay

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.add_(p, alpha=self.wd)
        super().step(closure)


@odd(notes="the decay of the groups is read by nothing: the optimizer has kept the number for itself")
def decay_kept_by_the_optimizer() -> TrainLoop:
    return classifier(lambda params: KeepsItsDecay(params, lr=0.5, weight_decay=0.01))


class NamedAdam(torch.optim.AdamW):
    """Torch's own step; only the way it is built is the project's."""

    def __init__(self, params, config):
        super().__init__(params, lr=config["lr"], betas=config["betas"], foreach=True)


@odd(notes="a class of the project's own with torch's own step, a constructor that takes a config, and foreach")
def subclass_with_a_constructor_of_its_own() -> TrainLoop:
    return classifier(lambda params: NamedAdam(params, {"lr": 5e-3, "betas": (0.9, 0.95)}))


@odd(notes="a hook of the optimizer changes gradients within step(), after anybody else has looked")
def centred_gradients_in_a_step_hook() -> TrainLoop:
    loop = classifier(lambda params: torch.optim.Adam(params, lr=5e-3))

    def centre(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))

    loop.optimizer.register_step_pre_hook(centre)
    return loop


class Ruled(torch.optim.Optimizer):
    """Two averages, or sums, and a rule that makes a step of them."""

    def __init__(self, params, rule, betas=(0.9, 0.95), lr=5e-3):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), v=torch.zeros_like(p), step=0)
                state["step"] += 1
                p.sub_(self.rule(p.grad, state["m"], state["v"], state["step"], *group["betas"]), alpha=group["lr"])


def corrected(m, v, t, b1, b2):
    return m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8)


@odd(notes="an Adam of sums, not averages, without a correction: at step 1 its move is Adam's")
def sums_without_a_correction() -> TrainLoop:
    def rule(g, m, v, t, b1, b2):
        return m.mul_(b1).add_(g) / (v.mul_(b2).addcmul_(g, g).sqrt() + 1e-8)

    return classifier(lambda params: Ruled(params, rule))


@odd(notes="an Adam without bias correction, as for BERT")
def averages_without_a_correction() -> TrainLoop:
    def rule(g, m, v, t, b1, b2):
        return m.lerp_(g, 1 - b1) / (v.lerp_(g * g, 1 - b2).sqrt() + 1e-6)

    return classifier(lambda params: Ruled(params, rule, lr=2e-3))


@odd(notes="the second average is that of the distance from the first (AdaBelief)")
def distance_from_the_first_average() -> TrainLoop:
    def rule(g, m, v, t, b1, b2):
        m.lerp_(g, 1 - b1)
        return corrected(m, v.lerp_((g - m).square(), 1 - b2).add_(1e-16), t, b1, b2)

    return classifier(lambda params: Ruled(params, rule, lr=1e-3))


@odd(notes="an Adam of the project's own that warms up its rate inside of step()")
def warm_up_inside_of_the_step() -> TrainLoop:
    def rule(g, m, v, t, b1, b2):
        m.lerp_(g, 1 - b1)
        return min(1.0, t / 4) * corrected(m, v.lerp_(g * g, 1 - b2), t, b1, b2)

    return classifier(lambda params: Ruled(params, rule))


class KahanSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                lost = self.state[p].setdefault("lost", torch.zeros_like(p, dtype=torch.float32))
                decay = group["lr"] * group["weight_decay"] * p.float()
                wanted = p.float() - group["lr"] * p.grad.float() - decay + lost
                p.copy_(wanted)
                lost.copy_(wanted - p.float())


@odd(notes="no step moves a weight in bfloat16: what rounding takes, of the decay too, is kept for later ones")
def decay_kept_until_it_is_enough() -> TrainLoop:
    model = relu_mlp(8, 24, 4).bfloat16()
    optimizer = KahanSGD(model.parameters(), lr=1e-4, weight_decay=1.0)
    return plain.loop(
        model, points(8), lambda model, batch: F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1]), optimizer
    )
