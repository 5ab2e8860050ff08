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
