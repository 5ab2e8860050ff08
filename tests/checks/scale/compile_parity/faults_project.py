"""What a project does around ``torch.compile``."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.checks.scale.compile_parity.compiled_loops import (
    BACKEND,
    CHECK,
    Classifier,
    batches,
    compiling,
    plain,
    steps,
)
from tests.loops.pairs import pair

# torch.compile is called as if it changed the model in place.


def dropped(model, compile):
    if compile:
        torch.compile(model, backend=BACKEND)
    return model


def kept(model, compile):
    if compile:
        model = torch.compile(model, backend=BACKEND)
    return model


pair(
    "result_of_compile_not_kept",
    CHECK,
    "result_dropped",
    where="torch.compile(model, backend=BACKEND)",
    culprits=("torch.compile()",),
    faulty=compiling(dropped),
    fixed=compiling(kept),
    quick=True,
)


# A trainer compiles its step, and calls the one that it was given.


class Trainer:
    def __init__(self, model, *, compile, calls_compiled):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.compiled = torch.compile(model, backend=BACKEND) if compile else model
        self.called = self.compiled if calls_compiled else self.model

    def fit(self, batches):
        steps(self.called, self.optimizer, batches)


def trained(*, calls_compiled):
    def make(compile=False):
        trainer = Trainer(Classifier(), compile=compile, calls_compiled=calls_compiled)
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batches=batches(), fit=trainer.fit)

    return make


pair(
    "compiled_model_never_called",
    CHECK,
    "never_runs",
    level="advice",
    where="self.compiled = torch.compile(model",
    faulty=trained(calls_compiled=False),
    fixed=trained(calls_compiled=True),
    quick=True,
)


# The model is copied before it is compiled, "so that the original keeps its names for checkpoints".

pair(
    "copy_is_compiled_and_original_optimized",
    CHECK,
    "copy_compiled",
    where="torch.compile(copy.deepcopy(model)",
    culprits=("head.weight", "encoder.0.weight"),
    faulty=compiling(lambda model, compile: torch.compile(copy.deepcopy(model), backend=BACKEND) if compile else model),
    fixed=compiling(lambda model, compile: torch.compile(model, backend=BACKEND) if compile else model),
    quick=True,
)


# The encoder is frozen by name after the model was compiled.


def frozen(*, before):
    def make(compile=False):
        model = Classifier()
        if before:
            freeze(model)
        if compile:
            model = torch.compile(model, backend=BACKEND)
        if not before:
            freeze(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        return plain(model, optimizer=torch.optim.SGD(trained, lr=0.1))

    return make


def freeze(model):
    for name, parameter in model.named_parameters():
        if name.startswith("encoder."):
            parameter.requires_grad = False


pair(
    "frozen_by_the_names_of_a_compiled_model",
    CHECK,
    "prefix_hides_parameters",
    culprits=("encoder.0.weight",),
    mentions=("_orig_mod.",),
    faulty=frozen(before=False),
    fixed=frozen(before=True),
    quick=True,
)


# The head trains at ten times the rate, and is found by the first part of its name.


def grouped(first_part):
    def make(compile=False):
        model = Classifier()
        model = torch.compile(model, backend=BACKEND) if compile else model
        head = [p for name, p in model.named_parameters() if first_part(name) == "head"]
        body = [p for p in model.parameters() if all(p is not other for other in head)]
        groups = [{"params": body, "lr": 0.01}, {"params": head, "lr": 0.1}]
        return plain(model, optimizer=torch.optim.SGD([g for g in groups if g["params"]]))

    return make


pair(
    "rate_of_the_head_by_the_name_of_a_compiled_model",
    CHECK,
    "prefix_hides_parameters",
    culprits=("head.weight",),
    mentions=("lr",),
    faulty=grouped(lambda name: name.split(".")[0]),
    fixed=grouped(lambda name: name.removeprefix("_orig_mod.").split(".")[0]),
)


# With compiling the loss is summed, since "the mean broke the graph" once.


def reduced(reduction):
    def make(compile=False):
        model = Classifier()
        called = torch.compile(model, backend=BACKEND) if compile else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(called(x), y, reduction=reduction if compile else "mean").backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)

    return make


pair(
    "loss_summed_where_it_is_compiled",
    CHECK,
    "other_computation",
    faulty=reduced("sum"),
    fixed=reduced("mean"),
    quick=True,
)


# With compiling, attention is torch's own, and the factor of the scores is forgotten.


class Attending(nn.Module):
    def __init__(self, *, fused, scale):
        super().__init__()
        self.fused, self.scale = fused, scale
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 3)

    def forward(self, x):
        q, k, v = self.qkv(x)[None].chunk(3, dim=-1)
        if self.fused:
            return self.head(F.scaled_dot_product_attention(q, k, v, scale=self.scale)[0])
        return self.head(((q @ k.transpose(1, 2)).softmax(-1) @ v)[0])


def attending(scale):
    def make(compile=False):
        model = Attending(fused=compile, scale=scale)
        return plain(model, torch.compile(model, backend=BACKEND) if compile else model)

    return make


pair(
    "fused_attention_with_another_scale_where_it_is_compiled",
    CHECK,
    "other_computation",
    where="torch.compile(model, backend=BACKEND)",
    faulty=attending(None),
    fixed=attending(1.0),
)


# The whole graph is asked for, and a line in it needs the value of a tensor.


class Routed(nn.Module):
    def __init__(self, *, by_value):
        super().__init__()
        self.by_value = by_value
        self.inner = Classifier()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        out = self.inner(x)
        if self.by_value:
            return out + self.shift if out.mean() > 0 else out - self.shift
        return out + self.shift * torch.where(out.mean() > 0, 1.0, -1.0)


def whole_graph(*, by_value):
    def make(compile=False):
        model = Routed(by_value=by_value)
        return plain(model, torch.compile(model, backend=BACKEND, fullgraph=True) if compile else model)

    return make


pair(
    "whole_graph_with_a_branch_on_values",
    CHECK,
    "compiling_raises",
    where="return out + self.shift if out.mean() > 0",
    faulty=whole_graph(by_value=True),
    fixed=whole_graph(by_value=False),
    quick=True,
)


# What is saved of the compiled model is for compiled models only.


def saving(state_of):
    def make(compile=False):
        model = Classifier()
        model = torch.compile(model, backend=BACKEND) if compile else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def load(state):
            model.load_state_dict(state["model"], strict=False)
            optimizer.load_state_dict(state["optimizer"])

        return plain(
            model,
            optimizer=optimizer,
            save=lambda: {"model": state_of(model), "optimizer": optimizer.state_dict()},
            load=load,
        )

    return make


pair(
    "state_saved_with_the_names_of_a_compiled_model",
    CHECK,
    "checkpoint_needs_compile",
    level="advice",
    culprits=("head.weight",),
    faulty=saving(lambda model: model.state_dict()),
    fixed=saving(lambda model: getattr(model, "_orig_mod", model).state_dict()),
    quick=True,
)
