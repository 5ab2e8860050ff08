"""Decay that a textbook rule would object to, and that is meant."""

from __future__ import annotations

import json
import pickle
import re

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.learning.weight_decay_groups.faults_filters import Vision, by_list, by_type, two_groups
from tests.checks.learning.weight_decay_groups.faults_groups import by_name, layerwise
from tests.checks.learning.weight_decay_groups.faults_own_optimizers import (
    DecaysTheHeadAndCounts,
    last_matrix,
)
from tests.checks.learning.weight_decay_groups.language_model import Model, RMSNorm, loop, train
from tests.loops import data
from tests.loops.nets import ConvNet
from tests.loops.odd import odd


@odd(notes="a list of several spellings, of which one is this model's")
def no_decay_list_with_all_spellings():
    return loop(by_list(["bias", "LayerNorm.weight", "layer_norm.weight", "norm.weight", "ln_"]))()


@odd(notes="no_decay is empty: the model has neither biases nor norms")
def bias_free_net_with_an_empty_group():
    model = nn.Sequential(nn.Linear(6, 24, bias=False), nn.Tanh(), nn.Linear(24, 3, bias=False))
    kept = [p for n, p in model.named_parameters() if "bias" in n or "norm" in n]
    decayed = [p for n, p in model.named_parameters() if not ("bias" in n or "norm" in n)]
    optimizer = two_groups(decayed, kept)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="a name filter for learning rates finds no embedding by one spelling and the tables by another")
def rates_by_name_and_decay_by_dimension():
    def configure(model):
        groups = []
        for name, p in model.named_parameters():
            low = "embedding" in name or name.startswith("wte")
            groups.append({"params": [p], "lr": 1e-3 if low else 1e-2, "weight_decay": 0.1 if p.dim() > 1 else 0.0})
        return torch.optim.AdamW(groups)

    return loop(configure)()


@odd(notes="initial values are set by a name that this model's norms do not have; all gains decay on purpose")
def initial_values_by_another_name():
    def configure(model):
        for name, p in model.named_parameters():
            if "layernorm" in name and name.endswith("weight"):
                nn.init.ones_(p)
        heads = [p for n, p in model.named_parameters() if n.startswith("head")]
        others = [p for n, p in model.named_parameters() if not n.startswith("head")]
        return two_groups(others, heads)

    return loop(configure)()


@odd(notes="what decays is a list of whole names: any other name does not")
def decay_by_whole_names():
    def configure(model):
        listed = {n for n, p in model.named_parameters() if p.dim() > 1} | {"ln_1.weight", "ln_f.weight"}
        named = dict(model.named_parameters())
        return two_groups([named[n] for n in sorted(listed)], [p for n, p in named.items() if n not in listed])

    return loop(configure)()


@odd(notes="the ResNet recipe: SGD decays gains and biases too")
def everything_decays_as_for_resnets():
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.images(), fit=fit)


@odd(notes="matrices decay by hand, the others by AdamW: no matrix stands in a group with decay")
def matrices_decay_in_an_optimizer_of_their_own():
    model = Model()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1, weight_decay=1e-3)
    vectors = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2, weight_decay=0.01)

    class Both:
        def zero_grad(self):
            matrices.zero_grad()
            vectors.zero_grad()

        def step(self):
            matrices.step()
            vectors.step()

    return TrainLoop(
        model=model,
        optimizer=[matrices, vectors],
        batch=data.tokens(),
        fit=lambda batches: train(model, Both(), batches),
    )


@odd(notes="vectors take the default decay at a learning rate of their own, as after a search over both")
def groups_with_rates_of_their_own():
    def configure(model):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-2}], lr=1e-2)

    return loop(configure)()


@odd(notes="weights are pulled to where they started (L2-SP), and decay")
def pulled_to_the_start_beside_decay():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}

    def penalty():
        return 1e-3 * sum((p - start[n]).pow(2).sum() for n, p in model.named_parameters())

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=data.tokens(),
        fit=lambda batches: train(model, optimizer, batches, penalty),
    )


@odd(notes="names are sorted, pickled, written as JSON, compared, hashed and looked up on the way to the groups")
def names_that_go_through_everything():
    def configure(model):
        named = dict(model.named_parameters())
        names = sorted(named)
        if pickle.loads(pickle.dumps(names)) != json.loads(json.dumps(names)) or set(names) != {*model.state_dict()}:
            raise RuntimeError("names are no longer strings")
        for name in names:
            module, _, leaf = name.rpartition(".")
            if model.get_parameter(name) is not getattr(model.get_submodule(module), leaf):
                raise RuntimeError(name)
        kept = [n for n in names if re.search(r"ln_|bias$", n)]
        decayed = set(named) - set(kept)
        return two_groups([named[n] for n in sorted(decayed)], [named[n] for n in kept])

    return loop(configure)()


@odd(notes="a filter by type that knows the class of the norms; tables decay")
def filter_by_type_that_knows_its_norms():
    return loop(by_type(nn.LayerNorm, RMSNorm), norm=RMSNorm)()


@odd(notes="grokking: AdamW decays at 1, a thousand times as much as usual")
def decay_of_one():
    return loop(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=1.0))()


@odd(notes="a nearly frozen momentum of 0.001 beside no decay, from a search over both")
def momentum_of_a_thousandth():
    return loop(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=1e-3, weight_decay=1e-4))()


@odd(notes="adapters without decay, and biases of a frozen model that take AdamW's: no matrix of the model trains")
def adapters_beside_biases_that_decay():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Model()
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
            for p in self.model.parameters():
                p.requires_grad_(p.dim() < 2)

        def forward(self, ids):
            scores = self.model(ids)
            return scores + self.up(self.down(scores))

    model = Adapted()
    biases = [p for p in model.model.parameters() if p.requires_grad]
    adapters = [*model.down.parameters(), *model.up.parameters()]
    optimizer = torch.optim.AdamW([{"params": adapters, "weight_decay": 0.0}, {"params": biases}], lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=data.tokens(),
        fit=lambda batches: train(model, optimizer, batches),
    )


@odd(notes="the head decays as a whole, its norm too; of the trunk only matrices do")
def head_decays_with_its_norm():
    def configure(model):
        head = [*model.get_submodule("final").parameters(), *model.head.parameters()]
        trunk = [(n, p) for n, p in model.named_parameters() if not n.startswith(("final", "head"))]
        kept = [p for n, p in trunk if "norm" in n or n.endswith("bias")]
        decayed = [p for n, p in trunk if not ("norm" in n or n.endswith("bias"))]
        groups = [{"params": decayed}, {"params": kept, "weight_decay": 0.0}, {"params": head, "weight_decay": 0.05}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    return loop(configure, names=("norm1", "final"))()


@odd(notes="divided by dimension; a module below has no_weight_decay(), for the optimizer of another library")
def own_list_that_this_optimizer_does_not_use():
    model = Vision()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    optimizer = two_groups(decayed, [p for p in model.parameters() if p.dim() < 2])

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="one group for each weight, with options of its own: vectors and matrices decay alike on purpose")
def a_group_for_each_weight():
    def configure(model):
        return torch.optim.AdamW([{"params": [p], "lr": 1e-2, "weight_decay": 0.05} for p in model.parameters()])

    return loop(configure)()


class LARS(torch.optim.Optimizer):
    """As in barlowtwins and VICReg: a function says which weights the optimizer does not decay."""

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.9, weight_decay_filter=None):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "filter": weight_decay_filter}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if group["filter"] is None or not group["filter"](p):
                    update = update.add(p, alpha=group["weight_decay"])
                moved = self.state[p].setdefault("mu", torch.zeros_like(p)).mul_(group["momentum"]).add_(update)
                p.add_(moved, alpha=-group["lr"])


def by_lars(groups_of, warm_up=0):
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = LARS(groups_of(model), lr=0.02, weight_decay=1e-4, weight_decay_filter=lambda p: p.ndim == 1)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            for group in optimizer.param_groups if warm_up else ():
                group["lr"] = 0.02 * min(1.0, number / warm_up)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="one group at one weight_decay, of which the optimizer itself leaves out biases and gains (VICReg)")
def optimizer_that_spares_biases_and_gains_itself():
    return by_lars(lambda model: model.parameters())


@odd(notes="matrices and biases have a group each at one weight_decay; the optimizer spares the second (barlowtwins)")
def optimizer_that_spares_one_of_two_groups_itself():
    def groups_of(model):
        weights = [p for p in model.parameters() if p.ndim > 1]
        return [{"params": weights}, {"params": [p for p in model.parameters() if p.ndim == 1]}]

    return by_lars(groups_of)


@odd(notes="the head alone decays, and the last weight is read behind its loop, for its device")
def optimizer_that_reads_the_last_weight_behind_its_loop():
    return last_matrix(DecaysTheHeadAndCounts)()


@odd(notes="groups that another branch of the function gives to the optimizer")
def groups_of_another_branch():
    return loop(by_name(given=False))()


@odd(notes="groups that are only counted for a log")
def groups_that_are_counted():
    def configure(model):
        groups = layerwise(model)
        print(f"{len(groups)} layers")
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)

    return loop(configure)()


@odd(notes="groups with just the options that the optimizer has, and nobody reads them")
def groups_that_say_nothing_else():
    def configure(model):
        groups = []
        for p in model.parameters():
            groups += [{"params": [p], "weight_decay": 0.01}]
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)

    return loop(configure)()


@odd(notes="groups of the head alone, a part of what the optimizer has")
def groups_of_the_head_that_nobody_reads():
    def configure(model):
        groups = []
        groups.append({"params": list(model.head.parameters()), "weight_decay": 0.0})
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)

    return loop(configure)()
