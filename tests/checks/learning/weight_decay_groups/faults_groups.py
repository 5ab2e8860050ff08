"""Groups that decay what they are not for, and decay that is not what it looks like."""

from __future__ import annotations

import torch

from pytest_trainloop import TrainLoop
from tests.checks.learning.weight_decay_groups.language_model import Model, loop, train
from tests.loops import data
from tests.loops.pairs import pair


def split(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return matrices, [p for p in model.parameters() if p.dim() < 2]


# The two lists come back in another order than they are taken.


def swapped(order):
    def configure(model):
        lists = dict(zip(order, split(model), strict=True))
        groups = [{"params": lists["decay"], "weight_decay": 0.05}, {"params": lists["keep"], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)

    return configure


pair(
    "lists_taken_in_another_order",
    "weight_decay_groups",
    "groups_swapped",
    culprits=("ln_1.weight", "up.bias"),
    change="groups = [",
    mentions=("0.05",),
    quick=True,
    faulty=loop(swapped(("keep", "decay"))),
    fixed=loop(swapped(("decay", "keep"))),
)

# The group without decay does not say so, and AdamW has a decay of its own.


def unsaid(**said):
    def configure(model):
        matrices, vectors = split(model)
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, **said}], lr=1e-2)

    return configure


pair(
    "group_that_takes_the_default_of_adamw",
    "weight_decay_groups",
    "decays_by_default",
    culprits=("ln_1.weight", "head.bias"),
    change="torch.optim.AdamW(",
    mentions=("0.01",),
    quick=True,
    faulty=loop(unsaid()),
    fixed=loop(unsaid(weight_decay=0.0)),
)

# Without a key of its own the group takes the decay that the optimizer is given for the other one.


def of_the_optimizer(**said):
    def configure(model):
        matrices, vectors = split(model)
        return torch.optim.AdamW([{"params": matrices}, {"params": vectors, **said}], lr=1e-2, weight_decay=0.1)

    return configure


pair(
    "group_that_takes_the_decay_of_its_optimizer",
    "weight_decay_groups",
    "decays_by_default",
    culprits=("ln_1.weight",),
    mentions=("that of AdamW(...): 0.1",),
    faulty=loop(of_the_optimizer()),
    fixed=loop(of_the_optimizer(weight_decay=0.0)),
)

# Two groups, and one decay for both, as the configuration has it.


def configured(decay, decay_of_norms):
    def configure(model):
        matrices, vectors = split(model)
        groups = [
            {"params": matrices, "weight_decay": decay},
            {"params": vectors, "weight_decay": decay_of_norms},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    return configure


pair(
    "groups_without_a_difference",
    "weight_decay_groups",
    "split_without_effect",
    level="advice",
    culprits=("ln_1.weight",),
    quick=True,
    faulty=loop(configured(0.1, 0.1)),
    fixed=loop(configured(0.1, 0.0)),
)

pair(
    "decay_lost_on_its_way_to_the_groups",
    "weight_decay_groups",
    "split_without_effect",
    level="advice",
    culprits=("ln_1.weight",),
    faulty=loop(configured(0.0, 0.0)),
    fixed=loop(configured(0.1, 0.0)),
)

# Everything decays, and over the whole run by much.

pair(
    "everything_decays",
    "weight_decay_groups",
    "norms_and_biases_decay",
    level="advice",
    culprits=("ln_1.weight", "head.bias", "wte.weight"),
    mentions=("63 %",),
    quick=True,
    faulty=loop(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), steps=1000),
    fixed=loop(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), steps=40),
)

# Adam's decay is L2 regularisation.

pair(
    "weight_decay_given_to_adam",
    "weight_decay_groups",
    "decay_inside_adam",
    level="advice",
    culprits=("weight_decay",),
    quick=True,
    faulty=loop(lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.01), steps=100),
    fixed=loop(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01), steps=100),
)

# The loss has an L2 term, and the optimizer decays.


def penalised(decay):
    def make():
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)

        def penalty():
            return 1e-4 * sum(p.pow(2).sum() for p in model.parameters())

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train(model, optimizer, batches, penalty),
        )

    return make


pair(
    "penalty_beside_weight_decay",
    "weight_decay_groups",
    "decayed_twice",
    level="advice",
    culprits=("wte.weight", "up.weight"),
    where="p.pow(2).sum()",
    mentions=("0.0002",),
    quick=True,
    faulty=penalised(1e-4),
    fixed=penalised(0.0),
)

# Positional arguments: SGD(params, lr, momentum, dampening, weight_decay).


def sgd(momentum, decay, rate=0.05):
    return lambda model: torch.optim.SGD(model.parameters(), rate, momentum, 0, decay)


pair(
    "momentum_in_the_place_of_decay",
    "weight_decay_groups",
    "momentum_and_decay_swapped",
    culprits=("weight_decay", "momentum"),
    change="torch.optim.SGD(",
    mentions=("weight_decay=0.9", "momentum=0.0005"),
    quick=True,
    faulty=loop(sgd(5e-4, 0.9)),
    fixed=loop(sgd(0.9, 5e-4)),
)

pair(
    "decay_of_a_step_given_as_a_rate",
    "weight_decay_groups",
    "decay_turns_weights_over",
    culprits=("weight_decay",),
    change="torch.optim.SGD(",
    mentions=("-0.5",),
    quick=True,
    faulty=loop(sgd(0.0, 30.0)),
    fixed=loop(sgd(0.0, 30.0 * 1e-5)),
)


# Groups that are made and not given.


def by_name(given):
    def configure(model):
        params = []
        for key, value in model.named_parameters():
            if "bias" in key or "ln_" in key:
                params += [{"params": [value], "weight_decay": 0.0}]
            else:
                params += [{"params": [value], "weight_decay": 0.05}]
        if given:
            return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.05)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)

    return configure


def unread(model):
    params = []
    for key, value in model.named_parameters():
        decay = 0.0 if "bias" in key or "ln_" in key else 0.05
        params.append({"params": [value], "weight_decay": decay})
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)


def layerwise(model):
    return [{"params": list(m.parameters()), "lr": 1e-2 * 0.5**i} for i, (_, m) in enumerate(model.named_children())]


def fine_tuned(model):
    groups = []
    groups.extend(layerwise(model))
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)


def fine_tuned_by_layer(model):
    groups = layerwise(model)
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.01)


pair(
    "decay_groups_made_and_not_given",
    "weight_decay_groups",
    "groups_not_given",
    culprits=("ln_1.weight",),
    change="torch.optim.SGD(model.parameters()",
    quick=True,
    faulty=loop(unread),
    fixed=loop(by_name(given=True)),
)
pair(
    "learning_rates_by_layer_made_and_not_given",
    "weight_decay_groups",
    "groups_not_given",
    culprits=("head.weight",),
    change="torch.optim.AdamW(model.parameters()",
    faulty=loop(fine_tuned),
    fixed=loop(fine_tuned_by_layer),
)
