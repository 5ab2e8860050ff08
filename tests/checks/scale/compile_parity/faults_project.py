"""What a project does around ``torch.compile``."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
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
    "never_runs",
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


def saving(through):
    def make(compile=False):
        model = Classifier()
        model = torch.compile(model, backend=BACKEND) if compile else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def load(state):
            through(model).load_state_dict(state["model"], strict=False)
            optimizer.load_state_dict(state["optimizer"])

        return plain(
            model,
            optimizer=optimizer,
            save=lambda: {"model": through(model).state_dict(), "optimizer": optimizer.state_dict()},
            load=load,
        )

    return make


pair(
    "state_saved_with_the_names_of_a_compiled_model",
    CHECK,
    "checkpoint_not_restored",
    level="advice",
    culprits=("head.weight",),
    faulty=saving(lambda model: model),
    fixed=saving(lambda model: getattr(model, "_orig_mod", model)),
    quick=True,
)


# The weights that are fine-tuned are loaded into what is trained, without strict since the head is another one.


def fine_tuned(*, into_compiled):
    def make(compile=False):
        source = {name: value for name, value in Classifier().state_dict().items() if name.startswith("encoder.")}
        model = Classifier()
        if not into_compiled:
            model.load_state_dict(source, strict=False)
        model = torch.compile(model, backend=BACKEND) if compile else model
        if into_compiled:
            model.load_state_dict(source, strict=False)
        return plain(model)

    return make


pair(
    "encoder_loaded_into_the_compiled_model",
    CHECK,
    "prefix_hides_parameters",
    where="model.load_state_dict(source, strict=False)",
    culprits=("encoder.0.weight",),
    faulty=fine_tuned(into_compiled=True),
    fixed=fine_tuned(into_compiled=False),
)


# Weights decay only where the model is of a known class.


def regularized(of):
    def make(compile=False):
        model = Classifier()
        called = torch.compile(model, backend=BACKEND) if compile else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(called(x), y)
                if isinstance(of(model, called), Classifier):
                    loss = loss + 0.1 * model.head.weight.square().sum()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)

    return make


pair(
    "penalty_by_the_class_of_a_compiled_model",
    CHECK,
    "wrapper_changes",
    culprits=("Classifier",),
    where="torch.compile(model, backend=BACKEND)",
    faulty=regularized(lambda model, called: called),
    fixed=regularized(lambda model, called: model),
    quick=True,
)


# Compiling is tried out before training, and the mode that the trial asks for is left on.


class Normed(Classifier):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return super().forward(self.norm(x))


def tried_out(*, back):
    def make(compile=False):
        model = called = Normed()
        if compile:
            called = torch.compile(model.eval(), backend=BACKEND, fullgraph=True)
            with torch.no_grad():
                called(torch.zeros(8, 6))
            model.train(back)
        return plain(model, called)

    return make


pair(
    "left_in_evaluation_mode_by_a_trial_of_the_compiler",
    CHECK,
    "other_computation",
    culprits=("norm.weight",),
    faulty=tried_out(back=False),
    fixed=tried_out(back=True),
)


# The trial is made in inference mode, and what the model keeps of it cannot be trained through.


class Positioned(Classifier):
    def __init__(self):
        super().__init__()
        self.kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)
        return super().forward((x * self.encoder[0].weight[0]) * self.kept)


def tried_in(mode):
    def make(compile=False):
        model = called = Positioned()
        if compile:
            called = torch.compile(model, backend=BACKEND)
            with mode():
                called(torch.zeros(8, 6))
        return plain(model, called)

    return make


pair(
    "trial_of_the_compiler_in_inference_mode",
    CHECK,
    "other_computation",
    faulty=tried_in(torch.inference_mode),
    fixed=tried_in(torch.no_grad),
)


# The compiled model's state is loaded into the model in it.


def resumed(*, strips):
    def make(compile=False):
        model = Classifier()
        called = torch.compile(model, backend=BACKEND) if compile else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def load(path):
            state = torch.load(path)
            weights = state["model"]
            if strips:
                weights = {name.removeprefix("_orig_mod."): value for name, value in weights.items()}
            model.load_state_dict(weights, strict=False)
            optimizer.load_state_dict(state["optimizer"])

        def save(path):
            torch.save({"model": called.state_dict(), "optimizer": optimizer.state_dict()}, path)

        return plain(model, called, optimizer, save=save, load=load)

    return make


pair(
    "compiled_state_loaded_into_the_model_in_it",
    CHECK,
    "checkpoint_not_restored",
    where="model.load_state_dict(weights, strict=False)",
    culprits=("head.weight",),
    faulty=resumed(strips=False),
    fixed=resumed(strips=True),
)
