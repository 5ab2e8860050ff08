"""Checkpoints whose weights do not come back, or not into what trains."""

from __future__ import annotations

import io

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.lora import inject
from tests.loops.nets import lm_loss, mlp
from tests.loops.pairs import pair


class Wrapped(nn.Module):
    """As DistributedDataParallel holds a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


# A checkpoint of the wrapped model, loaded into the bare one: every key is unexpected, and strict=False says nothing.


class Trainer:
    def __init__(self, model, wrap, renamed):
        self.bare, self.model, self.renamed = model, wrap(model), renamed
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def fit(self, batches):
        self.model.train()
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def save_checkpoint(self, path):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load_checkpoint(self, path):
        checkpoint = torch.load(path, map_location="cpu")
        state = {self.renamed(key): value for key, value in checkpoint["model"].items()}
        self.bare.load_state_dict(state, strict=False)
        self.optimizer.load_state_dict(checkpoint["optimizer"])


def wrapped(wrap, renamed):
    def make():
        trainer = Trainer(mlp(6, 16, 3), wrap, renamed)
        return TrainLoop(
            model=trainer.bare,
            optimizer=trainer.optimizer,
            batch=data.labelled(),
            fit=trainer.fit,
            save=trainer.save_checkpoint,
            load=trainer.load_checkpoint,
        )

    return make


pair(
    "prefix_of_the_wrapper_kept",
    "resume_equivalence",
    "weights_not_loaded",
    culprits=("0.weight", "2.weight"),
    where="strict=False",
    quick=True,
    faulty=wrapped(Wrapped, lambda key: key),
    fixed=wrapped(Wrapped, lambda key: key.removeprefix("module.")),
)


# Only the adapters are saved: the base is frozen and loaded from elsewhere, but the fresh head trains as well.


def adapted(saved):
    def make():
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        torch.manual_seed(11)  # the pretrained base is the same for everyone
        for p in model.parameters():
            nn.init.normal_(p, std=0.4)
        inject(model, ("0", "2"))
        model.add_module("head", nn.Linear(16, 3))
        for name, p in model.named_parameters():
            p.requires_grad_(saved(name) or name.startswith("head"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        def save():
            weights = {n: v.detach().clone() for n, v in model.state_dict().items() if saved(n)}
            return {"adapter": weights, "optimizer": optimizer.state_dict()}

        def load(state):
            model.load_state_dict(state["adapter"], strict=False)
            optimizer.load_state_dict(state["optimizer"])

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, save=save, load=load)

    return make


def is_adapter(name):
    return "lora" in name


pair(
    "head_beside_the_adapters_not_saved",
    "resume_equivalence",
    "weights_not_loaded",
    culprits=("head.weight", "head.bias"),
    faulty=adapted(is_adapter),
    fixed=adapted(lambda name: is_adapter(name) or name.startswith("head")),
)


# The weights are initialised after they were loaded.


class Regressor:
    def __init__(self, late):
        self.late = late
        self.net = mlp(6, 16, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=3e-3)
        self.init_weights()

    def init_weights(self):
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def fit(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad()
            F.mse_loss(self.net(x), y).backward()
            self.optimizer.step()

    def state_dict(self):
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        if not self.late:
            self.init_weights()
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.late:
            self.init_weights()


def initialised(late):
    def make():
        trainer = Regressor(late)
        return TrainLoop(
            model=trainer.net,
            optimizer=trainer.optimizer,
            batch=data.table(),
            fit=trainer.fit,
            save=trainer.state_dict,
            load=trainer.load_state_dict,
        )

    return make


pair(
    "weights_initialised_after_loading",
    "resume_equivalence",
    "weights_overwritten",
    culprits=("0.weight",),
    where="self.net.load_state_dict",
    quick=True,
    faulty=initialised(late=True),
    fixed=initialised(late=False),
)


# assign=True puts new parameters into the model; the optimizer holds the old ones, and tied weights come apart.


class Tied(nn.Module):
    def __init__(self, vocab=16, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embedding(ids))))


def assigned(after):
    def make():
        run = {}
        model = Tied()

        def build():
            run["optimizer"] = torch.optim.AdamW(model.parameters(), lr=3e-3)

        build()

        def fit(batches):
            for batch in batches:
                run["optimizer"].zero_grad()
                lm_loss(model, batch).backward()
                run["optimizer"].step()

        def save():
            buffer = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": run["optimizer"].state_dict()}, buffer)
            return buffer

        def load(buffer):
            buffer.seek(0)
            state = torch.load(buffer)
            weights = {name: value.clone() for name, value in state["model"].items()}
            model.load_state_dict(weights, assign=True)
            if "tie" in after:
                model.tie()
            if "build" in after:
                build()
            run["optimizer"].load_state_dict(state["optimizer"])

        return TrainLoop(model=model, optimizer=run["optimizer"], batch=data.tokens(), fit=fit, save=save, load=load)

    return make


pair(
    "assigned_under_the_optimizer",
    "resume_equivalence",
    "optimizer_detached",
    culprits=("mix.weight",),
    quick=True,
    faulty=assigned(("tie",)),
    fixed=assigned(("tie", "build")),
)

pair(
    "assigned_to_tied_weights",
    "resume_equivalence",
    "untied",
    culprits=("head.weight", "embedding.weight"),
    quick=True,
    faulty=assigned(("build",)),
    fixed=assigned(("tie", "build")),
)


# A key that save calls otherwise than load; a state that cannot be written.


def named(save_as, load_as, state_of=lambda schedule: schedule.state_dict()):
    def make():
        model = mlp(6, 12, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                schedule.step()

        def save(path):
            torch.save(
                {save_as: model.state_dict(), "optim": optimizer.state_dict(), "sched": state_of(schedule)}, path
            )

        def load(path):
            state = torch.load(path, weights_only=False)
            model.load_state_dict(state[load_as])
            optimizer.load_state_dict(state["optim"])
            schedule.load_state_dict(state["sched"])

        return TrainLoop(
            model=model, optimizer=optimizer, scheduler=schedule, batch=data.table(), fit=fit, save=save, load=load
        )

    return make


pair(
    "key_under_another_name",
    "resume_equivalence",
    "load_raises",
    where="state[load_as]",
    quick=True,
    faulty=named("state_dict", "model"),
    fixed=named("model", "model"),
)

pair(
    "state_that_cannot_be_pickled",
    "resume_equivalence",
    "save_raises",
    quick=True,
    faulty=named("model", "model", lambda schedule: {"lr_lambdas": schedule.lr_lambdas}),
    fixed=named("model", "model"),
)
