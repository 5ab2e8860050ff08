"""Filters by name or by type that find nothing in the model that they are used for."""

from __future__ import annotations

import torch
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.learning.weight_decay_groups.language_model import loop
from tests.loops import data
from tests.loops.pairs import pair

RATE, DECAY = 1e-2, 0.1


def two_groups(decayed, kept):
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": kept, "weight_decay": 0.0}],
        lr=RATE,
    )


# The list from fine-tuning scripts of BERT, in a model that calls its norms ln_1 and ln_f.


def by_list(no_decay):
    def configure(model):
        named = list(model.named_parameters())
        kept = [p for n, p in named if any(part in n for part in no_decay)]
        decayed = [p for n, p in named if not any(part in n for part in no_decay)]
        return two_groups(decayed, kept)

    return configure


pair(
    "list_of_another_model",
    "weight_decay_groups",
    "filter_matches_nothing",
    culprits=("ln_1.weight", "ln_f.weight"),
    where="any(part in n for part in no_decay)",
    mentions=("0.1",),
    quick=True,
    faulty=loop(by_list(["bias", "LayerNorm.weight", "LayerNorm.bias"])),
    fixed=loop(by_list(["bias", "ln_1.weight", "ln_f.weight"])),
)


# By type: nn.LayerNorm, and the model has a class of its own without a bias.


def by_type(*kinds):
    def configure(model):
        kept, decayed = [], []
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                (kept if name == "bias" or isinstance(module, kinds) else decayed).append(p)
        return two_groups(decayed, kept)

    return configure


# A skip list of whole names, as vision transformers give it, and a classifier around the backbone.


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 6, 16))
        self.patch = nn.Linear(1, 16)
        self.norm = nn.LayerNorm(16)

    def no_weight_decay(self):
        return {"pos_embed"}

    def forward(self, x):
        return self.norm(torch.tanh(self.patch(x.unsqueeze(-1)) + self.pos_embed)).mean(1)


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


def vision(prefix):
    def make():
        model = Vision()
        skipped = {prefix + name for name in model.backbone.no_weight_decay()}
        kept, decayed = [], []
        for name, p in model.named_parameters():
            (kept if p.dim() < 2 or name in skipped else decayed).append(p)
        optimizer = two_groups(decayed, kept)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "skip_list_without_the_prefix",
    "weight_decay_groups",
    "filter_matches_nothing",
    culprits=("backbone.pos_embed",),
    faulty=vision(""),
    fixed=vision("backbone."),
)

# One of two norms has another name.

pair(
    "last_norm_by_another_name",
    "weight_decay_groups",
    "filter_misses_some",
    culprits=("final.weight",),
    quick=True,
    faulty=loop(by_list(["bias", "norm"]), names=("norm1", "final")),
    fixed=loop(by_list(["bias", "norm"]), names=("norm1", "final_norm")),
)
