"""Filters by name or by type that find nothing in the model that they are used for."""

from __future__ import annotations

import fnmatch
import re

import torch
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.checks.learning.weight_decay_groups.language_model import LayerNorm, RMSNorm, lm_loss, loop, train
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
    mentions=("'LayerNorm.weight'", "0.1"),
    quick=True,
    faulty=loop(by_list(["bias", "LayerNorm.weight", "LayerNorm.bias"])),
    fixed=loop(by_list(["bias", "ln_1.weight", "ln_f.weight"])),
)

# Case: the modules are named as in Llama, and the filter as in BERT.

pair(
    "layernorm_in_another_case",
    "weight_decay_groups",
    "filter_matches_nothing",
    culprits=("input_layernorm.weight",),
    where="any(part in n for part in no_decay)",
    faulty=loop(by_list(["bias", "LayerNorm.weight"]), norm=RMSNorm, names=("input_layernorm", "final_layernorm")),
    fixed=loop(by_list(["bias", "layernorm.weight"]), norm=RMSNorm, names=("input_layernorm", "final_layernorm")),
)

# Tables: the optimizer of another project, whose table is called embedding; here it is wte.


def by_suffix(*suffixes):
    def configure(model):
        groups = {True: [], False: []}
        for name, p in model.named_parameters():
            groups[name.lower().endswith(suffixes)].append(p)
        return two_groups(groups[False], groups[True])

    return configure


pair(
    "table_is_not_called_embedding",
    "weight_decay_groups",
    "filter_matches_nothing",
    culprits=("wte.weight",),
    where="endswith(suffixes)",
    faulty=loop(by_suffix("bias", "ln_1.weight", "ln_f.weight", "embedding.weight")),
    fixed=loop(by_suffix("bias", "ln_1.weight", "ln_f.weight", "wte.weight")),
)

# Patterns that no one can look into: compiled ones, and those of fnmatch.


def by_pattern(pattern):
    matches = re.compile(pattern).search

    def configure(model):
        named = dict(model.named_parameters())
        kept = {n for n in named if matches(n)}
        return two_groups([p for n, p in named.items() if n not in kept], [named[n] for n in sorted(kept)])

    return configure


pair(
    "pattern_compiled_for_other_names",
    "weight_decay_groups",
    "filter_matches_nothing",
    culprits=("ln_1.weight", "ln_f.weight"),
    mentions=("layer_norm",),
    faulty=loop(by_pattern(r"bias$|layer_norm\.")),
    fixed=loop(by_pattern(r"bias$|ln_\w+\.")),
)


def by_glob(*patterns):
    def configure(model):
        groups = {True: [], False: []}
        for name, p in model.named_parameters():
            groups[any(fnmatch.fnmatch(f"model.{name}", pattern) for pattern in patterns)].append(p)
        return two_groups(groups[False], groups[True])

    return configure


pair(
    "glob_for_batch_norms_that_are_called_norm",
    "weight_decay_groups",
    "filter_matches_nothing",
    culprits=("ln_1.weight",),
    faulty=loop(by_glob("*.bias", "*.LayerNorm.*")),
    fixed=loop(by_glob("*.bias", "*.ln_*.*")),
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


pair(
    "layer_norm_of_the_projects_own",
    "weight_decay_groups",
    "filter_matches_nothing",
    culprits=("ln_1.weight", "ln_f.weight"),
    where="isinstance(module, kinds)",
    mentions=("nn.LayerNorm",),
    faulty=loop(by_type(nn.LayerNorm), norm=LayerNorm),
    fixed=loop(by_type(nn.LayerNorm, LayerNorm), norm=LayerNorm),
)

# A list that several models share, in one whose norms are RMSNorm: it may be meant.

pair(
    "list_for_layer_norms_beside_rms_norms",
    "weight_decay_groups",
    "filter_matches_nothing",
    level="advice",
    culprits=("norm1.weight", "norm2.weight"),
    faulty=loop(by_list(["bias", "LayerNorm.weight"]), norm=RMSNorm, names=("norm1", "norm2")),
    fixed=loop(by_list(["bias", "norm1", "norm2"]), norm=RMSNorm, names=("norm1", "norm2")),
)


# The optimizer is made inside fit, by the trainer of the project.


class Trainer:
    NO_DECAY = ("bias", "layer_norm")

    def __init__(self, model, no_decay=NO_DECAY):
        self.model, self.no_decay = model, no_decay

    def configure_optimizers(self):
        kept, decayed = [], []
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                (kept if any(name.find(part) >= 0 for part in self.no_decay) else decayed).append(p)
        return two_groups(decayed, kept)

    def fit(self, batches):
        train(self.model, self.configure_optimizers(), batches)


def trained(norms):
    def make():
        from tests.checks.learning.weight_decay_groups.language_model import Model

        model = Model(names=norms)
        return TrainLoop(model=model, batch=data.tokens(), loss=lm_loss, fit=Trainer(model).fit)

    return make


pair(
    "trainer_that_makes_its_optimizer_in_fit",
    "weight_decay_groups",
    "filter_matches_nothing",
    culprits=("ln_1.weight",),
    where="name.find(part)",
    faulty=trained(("ln_1", "ln_f")),
    fixed=trained(("layer_norm_1", "layer_norm_f")),
)

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
    mentions=("'pos_embed'", "gets 'backbone.pos_embed'"),
    faulty=vision(""),
    fixed=vision("backbone."),
)

# One of two norms has another name.

pair(
    "last_norm_by_another_name",
    "weight_decay_groups",
    "filter_misses_some",
    culprits=("final.weight",),
    mentions=("'norm1'",),
    quick=True,
    faulty=loop(by_list(["bias", "norm"]), names=("norm1", "final")),
    fixed=loop(by_list(["bias", "norm"]), names=("norm1", "final_norm")),
)

# re.match looks at the start of a name only.


def by_match(*patterns):
    def configure(model):
        decayed, kept = [], []
        for name, p in model.named_parameters():
            (kept if any(re.match(pattern, name) for pattern in patterns) else decayed).append(p)
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": kept, "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=RATE)

    return configure


pair(
    "patterns_matched_at_the_start",
    "weight_decay_groups",
    "filter_matches_nothing",
    culprits=("up.bias", "head.bias"),
    mentions=("'bias'", "re.search"),
    faulty=loop(by_match(r"bias$")),
    fixed=loop(by_match(r".*bias$", r"ln_")),
)

# The list of a module that is wrapped: whoever asks the wrapper gets none.


def vision_by_own_list(wrapped):
    class Outer(Vision):
        def no_weight_decay(self):
            return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def make():
        model = Vision() if wrapped else Outer()
        skipped = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
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
    "list_of_a_module_below",
    "weight_decay_groups",
    "filter_matches_nothing",
    culprits=("backbone.pos_embed",),
    mentions=("Backbone.no_weight_decay()",),
    faulty=vision_by_own_list(wrapped=True),
    fixed=vision_by_own_list(wrapped=False),
)
