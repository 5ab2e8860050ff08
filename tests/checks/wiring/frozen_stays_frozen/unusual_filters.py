"""Filters by name that match nothing in this model, and are right."""

from __future__ import annotations

import torch
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.wiring.frozen_stays_frozen.faults_filters import freeze_below, freeze_listed, tagged
from tests.loops.odd import odd


@odd(notes="the parts of several encoders are listed, and this model has one of them")
def parts_of_several_models_are_listed() -> TrainLoop:
    return tagged(freeze_below("roberta.embeddings.", "bert.embeddings.", "embeddings.", "electra.embeddings."))()


@odd(notes="a function that freezes what it is given, and is given nothing")
def nothing_is_listed() -> TrainLoop:
    return tagged(freeze_below())()


@odd(notes="layers up to the twelfth are frozen, and the model has two")
def more_layers_listed_than_there_are() -> TrainLoop:
    return tagged(freeze_listed([f"bert.encoder.layer.{number}." for number in range(12)]))()


def adapters_only(model):
    for name, parameter in model.named_parameters():
        if "lora_" in name or name.startswith("classifier"):
            parameter.requires_grad = True
        elif "position" in name:
            parameter.requires_grad = False


@odd(notes="adapters train where there are some, and this model has none")
def adapters_are_optional() -> TrainLoop:
    return tagged(adapters_only)()


def by_part(model):
    for name, parameter in model.named_parameters():
        if name.startswith("vision.") or name.startswith("bert.embeddings."):
            parameter.requires_grad = False


@odd(notes="an if for each part of the model, one of which this model does not have")
def a_part_that_only_other_models_have() -> TrainLoop:
    return tagged(by_part)()


@odd(notes="a filter of what is logged matches nothing; nothing is frozen by it")
def a_filter_of_what_is_logged() -> TrainLoop:
    def log(model):
        norms = {name: p.norm().item() for name, p in model.named_parameters() if name.startswith("embeddings.")}
        return sum(norms.values())

    return tagged(log)()


@odd(notes="spellings of norms in a list for the decay; the embeddings are frozen by another filter that matches")
def spellings_of_norms_beside_a_freeze() -> TrainLoop:
    loop = tagged(freeze_below("bert.embeddings."))()
    spared = ("bias", "LayerNorm.weight", "layer_norm.weight", "final.weight")
    named = [(name, p) for name, p in loop.model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if not name.endswith(spared)], "weight_decay": 0.01},
        {"params": [p for name, p in named if name.endswith(spared)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)

    def fit(batches):
        for ids, tags in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(loop.model(ids).flatten(0, 1), tags.flatten()).backward()
            optimizer.step()

    return TrainLoop(model=loop.model, optimizer=optimizer, batch=loop.batch, fit=fit)


@odd(notes="what is frozen already is passed over before its name is asked")
def frozen_names_are_passed_over() -> TrainLoop:
    def twice(model):
        freeze_below("bert.embeddings.")(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name.startswith("bert.embeddings."):
                parameter.requires_grad = False

    return tagged(twice)()


@odd(notes="linear layers are replaced by adapters under the names that named_modules() gives; query is not among them")
def layers_replaced_by_their_names() -> TrainLoop:
    def adapted(model):
        freeze_below("bert.")(model)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and ("query" in name or name.endswith("layer.1.2")):
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, nn.Sequential(module, nn.Linear(24, 24)))

    return tagged(adapted)()
