"""Optimizers of a project's own whose decay is behind the loop that it belongs into."""

from __future__ import annotations

import torch

from tests.checks.learning.weight_decay_groups.language_model import loop
from tests.loops.pairs import pair


class Normed(torch.optim.Optimizer):
    """SGD by the norm over all gradients: a first loop measures, a second one moves."""

    def __init__(self, params, lr=1e-2, weight_decay=0.05):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def decayed(self, p, group):
        if p.ndim > 1:
            p.mul_(1 - group["lr"] * group["weight_decay"])

    @torch.no_grad()
    def step(self):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.decayed(p, group)
                p.add_(p.grad / (norm + 1), alpha=-group["lr"])


class DecaysBehind(Normed):
    @torch.no_grad()
    def step(self):
        total = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                total += p.grad.square().sum()
        for group in self.param_groups:
            p.mul_(1 - group["lr"] * group["weight_decay"])  # of the loop above
            for p in group["params"]:
                p.add_(p.grad / (total.sqrt() + 1), alpha=-group["lr"])


class DecaysAtTheEnd(Normed):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
            if group["weight_decay"] > 0:
                p.mul_(1 - group["lr"] * group["weight_decay"])


class DecaysTheHead(Normed):
    def decayed(self, p, group):
        if p is group["params"][-1]:
            super().decayed(p, group)


class DecaysTheHeadAndCounts(DecaysTheHead):
    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
        self.clock = torch.zeros((), device=p.device)


def two_groups(kind):
    def configure(model):
        vectors = [p for p in model.parameters() if p.ndim < 2]
        return kind([{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": vectors, "weight_decay": 0}])

    return loop(configure)


def last_matrix(kind):
    return loop(lambda model: kind(sorted(model.parameters(), key=lambda p: p.ndim)))


pair(
    "decay_of_the_variable_of_the_loop_before",
    "weight_decay_groups",
    "decay_on_last_only",
    culprits=("head.bias",),
    change="# of the loop above",
    quick=True,
    faulty=two_groups(DecaysBehind),
    fixed=two_groups(Normed),
)
pair(
    "decay_behind_the_loop_over_the_group",
    "weight_decay_groups",
    "decay_on_last_only",
    culprits=("head.weight",),
    change="p.mul_(1 -",
    faulty=last_matrix(DecaysAtTheEnd),
    fixed=last_matrix(Normed),
)
