"""Checkpoints that look wrong to a textbook and resume as they should."""

from __future__ import annotations

import collections
import copy
import itertools
import json

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh


class Trainer:
    """What the loops of this file have in common; each overrides what is its own."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.step, self.history = 0, []

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def after_step(self, loss):
        self.step += 1
        self.history.append(loss.item())

    def fit(self, batches):
        self.model.train()
        for batch in batches:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            self.after_step(loss)

    def save(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def declared(self, batch=None, **more):
        batch = data.labelled() if batch is None else batch
        given = {"fit": self.fit, "save": self.save, "load": self.load, **more}
        return TrainLoop(model=self.model, optimizer=self.optimizer, batch=batch, **given)


def adam(model, **more):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, **more)


@odd(notes="histories, clocks and the best score are not in the checkpoint")
def resumed_without_its_history():
    model = mlp(6, 16, 3)
    return Trainer(model, adam(model)).declared()


class FromStep(Trainer):
    """Sets the rate from the number of the step, as nanoGPT does."""

    def loss(self, batch):
        for group in self.optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (self.step + 1) / 10)
        return super().loss(batch)


@odd(notes="there is no scheduler to save: the rate follows from the number of the step")
def resumed_with_the_rate_of_its_step():
    model = mlp(6, 16, 3)
    return FromStep(model, adam(model)).declared()


class FromAttribute(Trainer):
    """Writes its own rate into the groups whenever fit begins, and reads it from the checkpoint."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.lr = 3e-3

    def fit(self, batches):
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        super().fit(batches)

    def loss(self, batch):
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.99
        return super().loss(batch)

    def load(self, state):
        super().load(state)
        self.lr = self.optimizer.param_groups[0]["lr"]


@odd(notes="load reads the rate to go on with, which each call of fit begins with")
def resumed_with_the_rate_that_fit_begins_with():
    model = mlp(6, 16, 3)
    return FromAttribute(model, adam(model)).declared()


class Rebuilt(Trainer):
    """Makes a new optimizer and a new schedule in load, and steps the schedule to where it was."""

    def __init__(self, model):
        self.make(model)
        super().__init__(model, self.optimizer)

    def make(self, model):
        self.optimizer = adam(model)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=200)

    def after_step(self, loss):
        super().after_step(loss)
        self.schedule.step()

    def load(self, state):
        self.make(self.model)
        for _ in range(state["step"]):
            self.optimizer.step()
            self.schedule.step()
        super().load(state)


@odd(notes="load makes another optimizer and another schedule; the declared ones lie idle from then on")
def resumed_with_a_new_optimizer():
    model = mlp(6, 16, 3)
    trainer = Rebuilt(model)
    return trainer.declared(scheduler=trainer.schedule)


class NewModel(Trainer):
    """Reads the whole model from the checkpoint, as torch.save(model) leaves it."""

    def save(self, path):
        torch.save({"model": self.model, "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path):
        state = torch.load(path, weights_only=False)
        self.model = state["model"]
        self.optimizer = adam(self.model)
        self.optimizer.load_state_dict(state["optimizer"])


@odd(notes="load puts another model in the place of the declared one")
def resumed_with_a_pickled_model():
    model = mlp(6, 16, 3)
    return NewModel(model, adam(model)).declared()


@odd(notes="only the weights are saved, for fine-tuning, and that is declared")
def resumed_with_weights_only():
    model = mlp(6, 16, 3)
    trainer = Trainer(model, adam(model))
    return trainer.declared(
        save=lambda: copy.deepcopy(model.state_dict()), load=model.load_state_dict, renews=("optimizer",)
    )


class Cached(nn.Module):
    """Fills a table that any batch fills again."""

    def __init__(self):
        super().__init__()
        self.net = mlp(6, 16, 3)
        self.register_buffer("table", None, persistent=False)
        self.seen = collections.Counter()

    def forward(self, x):
        self.seen[len(x)] += 1
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return self.net(x + self.table)


@odd(notes="a buffer outside of the state dict is made at the first call")
def resumed_with_a_cache():
    model = Cached()
    return Trainer(model, adam(model)).declared()


@odd(notes="the fresh loop has a frozen teacher that no checkpoint holds: it is the same for every run")
def resumed_with_a_teacher_from_elsewhere():
    teacher = mlp(6, 16, 3)
    for p, seed in zip(teacher.parameters(), range(9), strict=False):
        p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        p.requires_grad_(False)
    model = mlp(6, 16, 3)
    trainer = Trainer(model, adam(model))
    trainer.loss = lambda batch: F.mse_loss(model(batch[0]), teacher(batch[0]))
    return trainer.declared(evaluate=lambda: teacher.eval())


class Ema(Trainer):
    def __init__(self, model):
        super().__init__(model, adam(model))
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def after_step(self, loss):
        super().after_step(loss)
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def evaluate(self):
        x, y = data.labelled(seed=7)
        with torch.no_grad():
            return F.cross_entropy(torch.func.functional_call(self.model, self.shadow, (x,)), y).item()

    def save(self):
        return {**super().save(), "ema": {name: value.clone() for name, value in self.shadow.items()}}

    def load(self, state):
        super().load(state)
        self.shadow = state["ema"]


@odd(notes="the average lies in a dict, which load replaces by that of the checkpoint")
def resumed_with_an_average_in_a_dict():
    return Ema(mlp(6, 16, 3)).declared()


class KeepsBest(Trainer):
    """Keeps copies of the best weights, which no step reads."""

    def __init__(self, model):
        super().__init__(model, adam(model))
        self.best, self.best_weights, self.patience = float("inf"), None, 0

    def after_step(self, loss):
        super().after_step(loss)
        self.patience += 1
        if loss.item() < self.best:
            self.best, self.patience = loss.item(), 0
            self.best_weights = {name: value.clone() for name, value in self.model.state_dict().items()}


@odd(notes="the best weights and the patience of early stopping begin anew, and no step reads them")
def resumed_without_its_best_weights():
    return KeepsBest(mlp(6, 16, 3)).declared(evaluate=lambda: None)


@odd(notes="a wrapped model, whose prefix is stripped on the way in, with a key that is left out on purpose")
def resumed_through_a_prefix():
    model = mlp(6, 16, 3)
    model.register_buffer("mask", torch.ones(3))
    wrapped = nn.ModuleDict({"module": model})
    trainer = Trainer(model, adam(model))

    def save():
        weights = {name: value.clone() for name, value in wrapped.state_dict().items() if not name.endswith("mask")}
        return {**trainer.save(), "model": weights}

    def load(state):
        stripped = {name.removeprefix("module."): value for name, value in state["model"].items()}
        keys = model.load_state_dict(stripped, strict=False)
        assert keys.missing_keys == ["mask"]
        trainer.optimizer.load_state_dict(state["optimizer"])

    return trainer.declared(save=save, load=load)


@odd(notes="flat arrays by name in one file, moments in another, numbers in a third, in a folder of several steps")
def resumed_from_a_folder():
    model = mlp(6, 16, 3)
    trainer = Trainer(model, adam(model))

    def save(output_dir):
        folder = output_dir / f"step-{trainer.step}"
        folder.mkdir(parents=True)
        np.savez(folder / "weights.npz", **{n: v.numpy() for n, v in model.state_dict().items()})
        torch.save(trainer.optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "state.json").write_text(json.dumps({"step": trainer.step}))
        (output_dir / "latest").write_text(folder.name)

    def load(output_dir):
        folder = output_dir / (output_dir / "latest").read_text()
        with np.load(folder / "weights.npz") as arrays:
            model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files})
        trainer.optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
        trainer.step = json.loads((folder / "state.json").read_text())["step"]

    return trainer.declared(save=save, load=load)


class Seeded(Trainer):
    """Restores its random state when it trains on, not when it loads."""

    def __init__(self, model):
        super().__init__(model, adam(model))
        self.rng = None

    def fit(self, batches):
        if self.rng is not None:
            torch.set_rng_state(self.rng)
            self.rng = None
        super().fit(batches)

    def save(self):
        return {**super().save(), "rng": torch.get_rng_state()}

    def load(self, state):
        super().load(state)
        self.rng = state["rng"]


@odd(notes="the random state of the checkpoint is restored at the next call of fit")
def resumed_with_its_random_state_later():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    return Seeded(model).declared()


@odd(notes="each start draws other noise on purpose, and that is declared")
def resumed_with_other_noise():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    return Trainer(model, adam(model)).declared(renews=("rng",))


@odd(notes="what a batch of a data stream of its own holds is not the same after a restart")
def resumed_with_a_stream_of_its_own():
    model = mlp(6, 16, 3)
    trainer = Trainer(model, adam(model))
    rows = iter(data.labelled(rows=4, seed=seed) for seed in range(10_000))
    inner = trainer.loss

    def loss(_batch):
        x, y = next(rows)
        return inner((x.to(next(model.parameters()).dtype), y))

    trainer.loss = loss
    return trainer.declared(batches=fresh(data.labelled))


class Epochs(Trainer):
    """Counts epochs, and load says in which one to begin."""

    def __init__(self, model):
        super().__init__(model, adam(model))
        self.start_epoch, self.epochs = 0, 50

    def fit(self, batches):
        for epoch in range(self.start_epoch, self.epochs):
            self.epoch = epoch
            for group in self.optimizer.param_groups:
                group["lr"] = 3e-3 * 0.9**epoch
            super().fit(batches)

    def save(self):
        return {**super().save(), "epoch": self.epoch}

    def load(self, state):
        super().load(state)
        self.start_epoch = state["epoch"] + 1


@odd(notes="load sets the epoch to begin in, which no training moves")
def resumed_at_its_next_epoch():
    return Epochs(mlp(6, 16, 3)).declared()


class Ordered(Trainer):
    """Reads features in an order that no state dict holds."""

    def __init__(self, order):
        model = mlp(6, 16, 3)
        super().__init__(model, adam(model))
        model.order = order

    def loss(self, batch):
        return super().loss((batch[0][:, self.model.order], batch[1]))


ORDERS = torch.Generator().manual_seed(0)


@odd(notes="the order that the model draws is the same in every process: the module's generator has a seed of its own")
def resumed_with_an_order_of_a_fixed_seed():
    return Ordered(torch.randperm(6, generator=ORDERS)).declared()


@odd(notes="a run that resumes begins its epoch again: which one it is is all that the checkpoint holds of the data")
def resumed_at_the_start_of_an_epoch():
    trainer, (x, y), epoch = Trainer(model := mlp(6, 16, 3), adam(model)), data.labelled(rows=32), [0]

    def stream():
        while True:
            order = torch.randperm(32, generator=torch.Generator().manual_seed(5 + epoch[0]))
            yield from ((x[rows], y[rows]) for rows in order.split(8))
            epoch[0] += 1

    def load(state):
        trainer.load(state)
        epoch[0] = state["epoch"]

    coming = stream()
    save = lambda: {**trainer.save(), "epoch": epoch[0]}  # noqa: E731
    return trainer.declared(batches=lambda n: itertools.islice(coming, n), save=save, load=load)


@odd(notes="the order follows from the data, which is the same whenever it is read")
def resumed_with_an_order_by_size():
    return Ordered(data.labelled()[0].var(0).argsort()).declared()


@odd(notes="the order that the model draws is for a second head, which no step trains")
def resumed_with_an_order_that_training_does_not_read():
    trainer = Ordered(torch.randperm(6))
    trainer.loss = lambda batch: Trainer.loss(trainer, batch)
    return trainer.declared()
