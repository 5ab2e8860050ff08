"""Trainer classes, callbacks, evaluation in between, models that are called by other names than forward."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.plain import loop
from tests.loops.random_data import curves, fresh, points


class Trainer:
    """Callbacks do everything that is not forward."""

    def __init__(self, model, optimizer, callbacks):
        self.model, self.optimizer, self.callbacks = model, optimizer, callbacks
        self.loss, self.step = None, 0

    def emit(self, event):
        for callback in self.callbacks:
            getattr(callback, event, lambda trainer: None)(self)

    def fit(self, batches, epochs=2):
        self.emit("on_start")
        for _ in range(epochs):
            for x, y in batches:
                self.emit("before_batch")
                self.loss = F.cross_entropy(self.model(x), y)
                self.emit("after_loss")
                self.step += 1
                self.emit("after_batch")
            self.emit("after_epoch")


class Backpropagate:
    def after_loss(self, trainer):
        trainer.loss.backward()


class ClipGradients:
    def after_loss(self, trainer):
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)


class StepOptimizer:
    def after_loss(self, trainer):
        trainer.optimizer.step()

    def before_batch(self, trainer):
        trainer.optimizer.zero_grad()


class Validate:
    def __init__(self, heldout):
        self.heldout, self.history = heldout, []

    def after_epoch(self, trainer):
        trainer.model.eval()
        with torch.inference_mode():
            self.history.append(F.cross_entropy(trainer.model(self.heldout[0]), self.heldout[1]).item())
        trainer.model.train()


@odd(
    notes="backward, clip and step are callbacks in a list, called through getattr; "
    "validation runs under inference_mode"
)
def trainer_with_callbacks() -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    trainer = Trainer(model, optimizer, [Backpropagate(), ClipGradients(), StepOptimizer(), Validate(points())])
    return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=trainer.fit)


def train_in_phases(model, optimizer, loaders, epochs=2):
    best, kept = 0.0, copy.deepcopy(model.state_dict())
    for _ in range(epochs):
        for phase in ("train", "val"):
            model.train(phase == "train")
            right, seen = 0, 0
            for x, y in loaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    out = model(x)
                    loss = F.cross_entropy(out, y)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                right, seen = right + int((out.argmax(1) == y).sum()), seen + len(y)
            if phase == "val" and right / seen > best:
                best, kept = right / seen, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)


@odd(
    notes="one loop body for training and validation, set_grad_enabled by phase; "
    "the best weights are loaded back at the end"
)
def train_and_validation_phases() -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    heldout = [points() for _ in range(2)]
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_in_phases(model, optimizer, {"train": batches, "val": heldout}),
    )


class MethodModel(nn.Module):
    """Everything goes through named methods; forward() is for export only."""

    def __init__(self):
        super().__init__()
        self.body, self.head = relu_mlp(8, 16, 16), nn.Linear(16, 4)

    def encode(self, x):
        return torch.relu(self.body(x))

    def compute_loss(self, x, y):
        return F.cross_entropy(self.head(self.encode(x)), y)

    def forward(self, x):
        return self.head(self.encode(x)).argmax(1)


@odd(notes="the model is never called: the loop uses its methods, and forward() returns class indices without a graph")
def model_used_through_its_methods() -> TrainLoop:
    model = MethodModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return loop(model, points(), lambda model, batch: model.compute_loss(batch[0], batch[1]), optimizer)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class OutputModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = relu_mlp(8, 16, 4)

    def forward(self, inputs, labels=None):
        logits = self.net(inputs)
        loss = None if labels is None else F.cross_entropy(logits, labels, label_smoothing=0.05)
        return Output(logits, loss)


@odd(notes="the loss is a field of a dataclass that forward returns; the batch is unpacked into keywords")
def model_returns_loss_in_a_dataclass() -> TrainLoop:
    model = OutputModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def fit(batches):
        for batch in batches:
            output = model(**batch)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    x, y = points()
    return TrainLoop(model=model, optimizer=optimizer, batch={"inputs": x, "labels": y}, fit=fit)


def save_and_reload(model, optimizer):
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def train_with_restarts(model, optimizer, batches, every=7):
    for step, (x, y) in enumerate(batches, 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % every == 0:
            state = save_and_reload(model, optimizer)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])


@odd(notes="every few steps all is saved, and goes on with a new optimizer from the saved state (preemptible training)")
def resumes_itself_with_a_new_optimizer() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_with_restarts(model, optimizer, batches),
    )


class KerasLike:
    """compile() and fit(); metrics and logs are gathered as floats in a dict."""

    def __init__(self, model):
        self.model, self.logs = model, defaultdict(list)

    def compile(self, optimizer, loss, metrics):
        self.optimizer, self.loss, self.metrics = optimizer, loss, metrics
        return self

    def train_step(self, data):
        x, y = data
        predicted = self.model(x)
        loss = self.loss(predicted, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), **{n: m(predicted.detach(), y).item() for n, m in self.metrics.items()}}

    def fit(self, data, epochs=1):
        for _ in range(epochs):
            for logs in map(self.train_step, data):
                for name, value in logs.items():
                    self.logs[name].append(value)


@odd(
    notes="the loop is a map() over the data; predictions are detached for metrics, the loss is read as a "
    "float each step"
)
def compile_and_fit_with_metrics() -> TrainLoop:
    model = relu_mlp(8, 16, 1)
    runner = KerasLike(model).compile(
        torch.optim.RMSprop(model.parameters(), lr=5e-3),
        loss=nn.SmoothL1Loss(),
        metrics={"mae": F.l1_loss, "mse": F.mse_loss},
    )
    return TrainLoop(model=model, optimizer=runner.optimizer, batch=curves(), batches=fresh(curves), fit=runner.fit)


def stages(model, optimizer, batches):
    """A generator is the loop; its caller only drives it."""
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        yield "loss", loss.item()
        loss.backward()
        optimizer.step()
        yield "stepped", None


@odd(notes="the loop is a generator that hands control back between forward and backward")
def loop_written_as_a_generator() -> TrainLoop:
    model = relu_mlp(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        return [value for event, value in stages(model, optimizer, batches) if event == "loss"]

    return TrainLoop(model=model, optimizer=optimizer, batch=curves(), fit=fit)


class AlternatingTrainer:
    """ALS-like: two tables take turns, each with its own optimizer; the other's gradients are ignored."""

    def __init__(self, viewers=6, films=8, width=4):
        self.model = nn.ModuleDict({"viewers": nn.Embedding(viewers, width), "films": nn.Embedding(films, width)})
        self.optimizers = {k: torch.optim.SGD(m.parameters(), lr=0.3) for k, m in self.model.items()}

    def loss(self, viewer, film, rating):
        return F.mse_loss((self.model["viewers"](viewer) * self.model["films"](film)).sum(1), rating)

    def fit(self, batches):
        for i, batch in enumerate(batches):
            optimizer = self.optimizers["viewers" if i % 2 == 0 else "films"]
            self.model.zero_grad()
            self.loss(*batch).backward()
            optimizer.step()


@odd(notes="both tables get gradients in every step and only one of them moves, in turn (alternating minimisation)")
def alternating_minimisation() -> TrainLoop:
    trainer = AlternatingTrainer()
    batch = torch.randint(6, (16,)), torch.randint(8, (16,)), torch.randn(16)
    return TrainLoop(model=trainer.model, optimizer=list(trainer.optimizers.values()), batch=batch, fit=trainer.fit)


class Augmenter:
    """Augmentation draws from the operating system, as data loaders with their own generator do."""

    def __init__(self, strength=0.1):
        self.generator = torch.Generator()
        self.generator.seed()
        self.strength = strength

    def __call__(self, x):
        return x + self.strength * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


@odd(notes="noise comes from a generator that no seed reaches: two runs under one seed differ", fixed_seed_ok=False)
def augmentation_beyond_any_seed() -> TrainLoop:
    model, augment = relu_mlp(8, 16, 4), Augmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return loop(model, points(), lambda model, batch: F.cross_entropy(model(augment(batch[0])), batch[1]), optimizer)
