"""Checkpoints that lose what lies beside weights and optimizer."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import AutoEncoder, mlp
from tests.loops.pairs import pair


def checkpoint(model, optimizer, **more):
    """Functions that save and load model, optimizer and whatever has a state of its own."""
    parts = {"model": model, "optimizer": optimizer, **more}

    def save():
        return {name: part.state_dict() for name, part in parts.items()}

    def load(state):
        for name, part in parts.items():
            part.load_state_dict(state[name])

    return {"save": save, "load": load}


# A code book's usage counts, in a buffer that no state dict has.


class Quantizer(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("mean", torch.zeros(4), persistent=persistent)

    def forward(self, x):
        code = self.encoder(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(code.mean(0), alpha=0.1)
        return self.decoder(torch.tanh(code - self.mean))


def quantizer(persistent):
    def make():
        model = Quantizer(persistent)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            model.train()
            for x in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), x).backward()
                optimizer.step()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table()[0],
            fit=fit,
            evaluate=lambda: model.eval(),
            **checkpoint(model, optimizer),
        )

    return make


pair(
    "running_mean_not_persistent",
    "resume_equivalence",
    "buffer_lost",
    culprits=("mean",),
    quick=True,
    faulty=quantizer(persistent=False),
    fixed=quantizer(persistent=True),
)


# The weight of the KL term grows with the step, which is not in the checkpoint.


class Annealed:
    def __init__(self, keeps_step):
        self.keeps_step = keeps_step
        self.model = AutoEncoder()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.global_step = 0

    def fit(self, batches):
        for x in batches:
            code = self.model.encoder(x)
            penalty = min(1.0, self.global_step / 20) * code.square().mean()
            loss = F.mse_loss(self.model.decoder(code), x) + penalty
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.global_step += 1

    def state_dict(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.keeps_step:
            state["global_step"] = self.global_step
        return state

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.global_step = state.get("global_step", 0)


def annealed(keeps_step):
    def make():
        trainer = Annealed(keeps_step)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=data.table()[0],
            fit=trainer.fit,
            save=trainer.state_dict,
            load=trainer.load_state_dict,
        )

    return make


pair(
    "annealing_begins_anew",
    "resume_equivalence",
    "counter_lost",
    quick=True,
    faulty=annealed(keeps_step=False),
    fixed=annealed(keeps_step=True),
)


# A queue of keys as a plain attribute.


class Contrastive(nn.Module):
    def __init__(self, registered):
        super().__init__()
        self.encoder = mlp(6, 12, 4)
        queue = F.normalize(torch.randn(16, 4), dim=1)
        if registered:
            self.register_buffer("queue", queue)
        else:
            self.queue = queue

    def loss(self, a, b):
        q, k = F.normalize(self.encoder(a), dim=1), F.normalize(self.encoder(b), dim=1)
        positive = (q * k.detach()).sum(1, keepdim=True)
        scores = torch.cat([positive, q @ self.queue.T], dim=1) / 0.3
        self.queue = torch.cat([self.queue[len(k) :], k.detach()])
        return F.cross_entropy(scores, torch.zeros(len(a), dtype=torch.long))


def contrastive(registered):
    def make():
        model = Contrastive(registered)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def fit(batches):
            for left, right in batches:
                optimizer.zero_grad()
                model.loss(left, right).backward()
                optimizer.step()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.views(rows=4, left=6, right=6),
            fit=fit,
            rows_interact=True,
            **checkpoint(model, optimizer),
        )

    return make


pair(
    "queue_as_an_attribute",
    "resume_equivalence",
    "state_lost",
    quick=True,
    faulty=contrastive(registered=False),
    fixed=contrastive(registered=True),
)


# A mean teacher whose weights lie in a dict beside the model.


def of(trainer, batch):
    return TrainLoop(
        model=trainer.model,
        optimizer=trainer.optimizer,
        batch=batch,
        fit=trainer.fit,
        evaluate=getattr(trainer, "evaluate", None),
        save=trainer.save,
        load=trainer.load,
    )


# An average of the weights that is evaluated, and begins anew.


class Averaged:
    def __init__(self, keeps_average):
        self.keeps_average = keeps_average
        self.model = mlp(6, 16, 3)
        self.average = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.held_out = data.labelled(seed=5)

    def fit(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            with torch.no_grad():
                for mine, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mine.lerp_(p, 0.05)

    def evaluate(self):
        x, y = self.held_out
        with torch.no_grad():
            return F.cross_entropy(self.average(x.to(next(self.average.parameters()).dtype)), y).item()

    def save(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**state, "average": self.average.state_dict()} if self.keeps_average else state

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if "average" in state:
            self.average.load_state_dict(state["average"])


pair(
    "average_not_saved",
    "resume_equivalence",
    "average_lost",
    quick=True,
    faulty=lambda: of(Averaged(keeps_average=False), data.labelled()),
    fixed=lambda: of(Averaged(keeps_average=True), data.labelled()),
)


# The best weights are kept as the live dict of the model, which goes on changing.


class KeepsBest:
    def __init__(self, keep):
        self.keep = keep
        self.model = mlp(6, 16, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.best, self.best_state = float("inf"), None

    def fit(self, batches):
        for x, y in batches:
            loss = F.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if loss.item() < self.best:
                self.best, self.best_state = loss.item(), self.keep(self.model.state_dict())

    def save(self):
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "best": self.best,
            "best_state": self.best_state,
        }

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best, self.best_state = state["best"], state["best_state"]


pair(
    "best_weights_kept_live",
    "resume_equivalence",
    "live_references",
    quick=True,
    faulty=lambda: of(KeepsBest(lambda state: state), data.table()),
    fixed=lambda: of(KeepsBest(copy.deepcopy), data.table()),
)


# Random states are saved, and not put back.


class Noisy:
    def __init__(self, restored):
        self.restored = restored
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def fit(self, batches):
        self.model.train()
        for x, y in batches:
            self.optimizer.zero_grad()
            scale = 1 + 0.1 * random.random() + 0.1 * np.random.rand()
            F.cross_entropy(self.model(x * scale), y).backward()
            self.optimizer.step()

    def save(self, path):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        rng = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
        torch.save({**state, "rng": rng}, path)

    def load(self, path):
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.restored:
            torch.set_rng_state(state["rng"]["torch"])
            np.random.set_state(state["rng"]["numpy"])
            random.setstate(state["rng"]["python"])


pair(
    "random_states_saved_only",
    "resume_equivalence",
    "rng_not_put_back",
    quick=True,
    faulty=lambda: of(Noisy(restored=False), data.labelled()),
    fixed=lambda: of(Noisy(restored=True), data.labelled()),
)


def dropping(with_rng):
    def make():
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        def save():
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return {**state, "rng": torch.get_rng_state()} if with_rng else state

        def load(state):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if "rng" in state:
                torch.set_rng_state(state["rng"])

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, save=save, load=load)

    return make


pair(
    "dropout_draws_anew",
    "resume_equivalence",
    "rng_not_saved",
    level="advice",
    quick=True,
    faulty=dropping(with_rng=False),
    fixed=dropping(with_rng=True),
)


# Augmentation by a generator of the project's own.


def jittered(kept):
    def make():
        model = mlp(6, 12, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(3)

        def fit(batches):
            for x, y in batches:
                x = x + 0.1 * torch.randn(x.shape, generator=generator)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        def save():
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return {**state, "generator": generator.get_state()} if kept else state

        def load(state):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if "generator" in state:
                generator.set_state(state["generator"])

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit, save=save, load=load)

    return make


pair(
    "generator_of_the_augmentation_begins_anew",
    "resume_equivalence",
    "own_generator",
    level="advice",
    quick=True,
    faulty=jittered(kept=False),
    fixed=jittered(kept=True),
)


# Random projections that every build draws anew and no checkpoint holds.


class Projected(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("projection", torch.randn(6, 24) / 6**0.5, persistent=persistent)
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(torch.relu(x @ self.projection))


def projected(persistent):
    model = Projected(persistent)
    return model, lambda x, y: F.cross_entropy(model(x), y)


def trained(build, hold, lr=0.1):
    def make():
        model, loss = build(hold)
        optimizer = torch.optim.SGD(model.parameters(), lr)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                loss(*batch).backward()
                optimizer.step()

        functions = checkpoint(model, optimizer)
        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, **functions)

    return make


pair(
    "projections_drawn_at_every_build",
    "resume_equivalence",
    "drawn_from_seed",
    level="advice",
    culprits=("projection",),
    quick=True,
    faulty=trained(projected, False),
    fixed=trained(projected, True),
)


# Orders of features that modules draw when they are built: a plain attribute is in no state dict.


class Coupling(nn.Module):
    def __init__(self, hold, draw):
        super().__init__()
        hold(self, draw(6))
        self.net = mlp(3, 16, 6)

    def forward(self, x):
        kept, moved = x[:, self.order].chunk(2, dim=1)
        scale, shift = self.net(kept).chunk(2, dim=1)
        return torch.cat([kept, moved * scale.tanh().exp() + shift], 1), scale.tanh().sum(1)


def flow(hold):
    model = nn.ModuleList(Coupling(hold, draw) for draw in (torch.randperm, np.random.permutation))

    def negative_log_likelihood(x, _labels):
        first, one = model[0](x)
        last, two = model[1](first)
        return (0.5 * last.square().sum(1) - one - two).mean()

    return model, negative_log_likelihood


pair(
    "permutations_of_a_flow_as_attributes",
    "resume_equivalence",
    "drawn_from_seed",
    culprits=("model.1.order",),
    mentions=("register_buffer", "reads features in another order"),
    faulty=trained(flow, lambda module, drawn: setattr(module, "order", drawn), 0.01),
    fixed=trained(flow, lambda module, drawn: module.register_buffer("order", torch.as_tensor(drawn)), 0.01),
)


# A loader that can be resumed in the middle of an epoch: what skips the batches already seen counts epochs from zero.
# https://github.com/huggingface/accelerate/pull/4071


class Resumable:
    def __init__(self, rows, skips_in_epoch):
        self.rows, self.skips_in_epoch, self.epoch, self.done, self.coming = rows, skips_in_epoch, 0, 0, []

    def order(self, epoch):
        return torch.randperm(32, generator=torch.Generator().manual_seed(5 + epoch)).split(8)

    def take(self, n):
        return [self.next() for _ in range(n)]

    def next(self):
        if not self.coming:
            self.coming = list(self.order(self.epoch))[self.done :]
        chosen = self.coming.pop(0)
        self.epoch, self.done = (self.epoch, self.done + 1) if self.coming else (self.epoch + 1, 0)
        return self.rows[0][chosen], self.rows[1][chosen]

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]
        self.coming = list(self.order(self.epoch if self.skips_in_epoch else 0))[self.done :]


def resumable(skips_in_epoch):
    def make():
        model, loader = mlp(6, 16, 3), Resumable(data.labelled(rows=32), skips_in_epoch)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        functions = checkpoint(model, optimizer, loader=loader)
        return TrainLoop(model=model, optimizer=optimizer, batches=loader.take, fit=fit, **functions)

    return make


pair(
    "batches_skipped_in_the_order_of_the_first_epoch",
    "resume_equivalence",
    "state_lost",
    where="def load(state)",
    faulty=resumable(skips_in_epoch=False),
    fixed=resumable(skips_in_epoch=True),
)


# Averaged weights are swapped in to be saved, and stay.


class Swapping(Averaged):
    def __init__(self, swaps_back):
        super().__init__(keeps_average=True)
        self.swaps_back = swaps_back

    def save(self):
        state = super().save()
        kept = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.average.state_dict())
        export = copy.deepcopy(self.model.state_dict())
        if self.swaps_back:
            self.model.load_state_dict(kept)
        return {**state, "model": kept, "export": export}


pair(
    "average_left_in_by_save",
    "resume_equivalence",
    "save_changes",
    culprits=("0.weight",),
    quick=True,
    faulty=lambda: of(Swapping(swaps_back=False), data.labelled()),
    fixed=lambda: of(Swapping(swaps_back=True), data.labelled()),
)


# The decay of an average grows with the number of its updates. It begins anew, and the average falls back to the
# weights.


class Ramped(Averaged):
    def __init__(self, keeps_updates):
        super().__init__(keeps_average=True)
        self.keeps_updates, self.updates = keeps_updates, 0

    def fit(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.updates += 1
            decay = 0.999 * (1 - 2.718 ** (-self.updates / 5))
            with torch.no_grad():
                for mine, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mine.lerp_(p, 1 - decay)

    def save(self):
        return {**super().save(), **({"updates": self.updates} if self.keeps_updates else {})}

    def load(self, state):
        super().load(state)
        self.updates = state.get("updates", 0)


pair(
    "updates_of_the_average_begin_anew",
    "resume_equivalence",
    "counter_lost",
    faulty=lambda: of(Ramped(keeps_updates=False), data.labelled()),
    fixed=lambda: of(Ramped(keeps_updates=True), data.labelled()),
)


# Master weights in float32, which the optimizer steps and the checkpoint does not hold.


class Masters:
    def __init__(self, keeps_masters):
        self.keeps_masters = keeps_masters
        self.model = mlp(6, 16, 1)
        self.masters = [p.detach().clone().requires_grad_() for p in self.model.parameters()]
        self.optimizer = torch.optim.Adam(self.masters, lr=3e-3)

    def fit(self, batches):
        for x, y in batches:
            self.model.zero_grad()
            F.mse_loss(self.model(x), y).backward()
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                master.grad = p.grad.clone()
            self.optimizer.step()
            with torch.no_grad():
                for master, p in zip(self.masters, self.model.parameters(), strict=True):
                    p.copy_(master)

    def save(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**state, "masters": [m.detach() for m in self.masters]} if self.keeps_masters else state

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for master, value in zip(self.masters, state.get("masters", []), strict=False):
                master.copy_(value)


pair(
    "master_weights_not_saved",
    "resume_equivalence",
    "state_lost",
    faulty=lambda: of(Masters(keeps_masters=False), data.table()),
    fixed=lambda: of(Masters(keeps_masters=True), data.table()),
)
