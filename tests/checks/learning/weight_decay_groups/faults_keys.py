"""Decays in groups, under a key that nothing reads."""

from __future__ import annotations

import torch

from tests.checks.learning.weight_decay_groups.faults_groups import split
from tests.checks.learning.weight_decay_groups.language_model import loop
from tests.loops.pairs import pair


def keyed(**vectors):
    def configure(model):
        matrices, others = split(model)
        return torch.optim.AdamW([{"params": matrices}, {"params": others, **vectors}], lr=1e-2, weight_decay=0.1)

    return configure


for slug, key in (("misspelled", "weight_deacy"), ("with_the_key_of_jax", "weight_decay_rate"), ("as_wd", "wd")):
    pair(
        f"weight_decay_{slug}",
        "weight_decay_groups",
        "option_nobody_reads",
        culprits=(f'param_groups[1]["{key}"]',),
        where="torch.optim.AdamW([",
        change="torch.optim.AdamW([",
        mentions=("weight_decay=0.1 is in effect",),
        faulty=loop(keyed(**{key: 0.0})),
        fixed=loop(keyed(weight_decay=0.0)),
        quick=slug == "misspelled",
    )


# Caffe's multiples, beside a schedule that knows only one of them.


def caffe(*, reads):
    def configure(model):
        matrices, vectors = split(model)
        groups = [
            {"params": matrices, "lr_mult": 1.0, "decay_mult": 1.0},
            {"params": vectors, "lr_mult": 2.0, "decay_mult": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-3)

        def adjust(*_call):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * group["lr_mult"]
                if reads:
                    group["weight_decay"] = 1e-3 * group["decay_mult"]

        optimizer.register_step_pre_hook(adjust)
        return optimizer

    return configure


pair(
    "multiple_of_the_decay_that_is_not_read",
    "weight_decay_groups",
    "option_nobody_reads",
    culprits=('param_groups[1]["decay_mult"]',),
    mentions=("1.0 and 0.0", "0.001"),
    faulty=loop(caffe(reads=False)),
    fixed=loop(caffe(reads=True)),
)
