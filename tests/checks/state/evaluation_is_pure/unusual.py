"""Evaluations that change much, and nothing that training uses: caches, histories, best weights, draws."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points, series


def dropping(classes=4):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, classes))


def normed(classes=4):
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))


def classifier(model, evaluate, *, optimizer=None, after=lambda: None, first=lambda: None, batches=None, **fields):
    """A loop over labelled points, in training mode, with gradients cleared before each backward pass."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        first()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            after()

    return TrainLoop(
        model=model, optimizer=optimizer, batch=points(12), batches=batches, fit=fit, evaluate=evaluate, **fields
    )


@contextlib.contextmanager
def evaluating(model):
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def accuracy(model, held_out):
    x, y = held_out
    return (model(x).argmax(1) == y).float().mean().item()


@odd(notes="evaluation shuffles its loader with the global generator, and training drops out with it")
def evaluating_draws_a_base_seed():
    model, held_out = dropping(), points(16)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*held_out), batch_size=4, shuffle=True)

    def evaluate():
        with evaluating(model):
            return sum(F.cross_entropy(model(x), y).item() for x, y in loader)

    return classifier(model, evaluate)


@odd(notes="dropout stays on for samples of the prediction: the dropout layers alone are switched, and back")
def evaluating_by_dropout_samples():
    model, (x, _) = dropping(), points(16)

    def evaluate():
        with evaluating(model):
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.train()
            draws = torch.stack([model(x).softmax(1) for _ in range(5)])
        model.train()
        return draws.var(0).mean().item()

    return classifier(model, evaluate)


@odd(notes="the mode is left in evaluation, and every fit begins with train()")
def evaluating_leaves_the_mode_to_fit():
    model, held_out = dropping(), points(16)

    def evaluate():
        model.eval()
        with torch.no_grad():
            return accuracy(model, held_out)

    return classifier(model, evaluate, first=model.train)


class Average:
    """Swapped in for a block, from clones."""

    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self):
        for mine, p in zip(self.shadow, self.model.parameters(), strict=True):
            mine.mul_(self.decay).add_(p, alpha=1 - self.decay)

    @contextlib.contextmanager
    def average_parameters(self):
        kept = [p.detach().clone() for p in self.model.parameters()]
        with torch.no_grad():
            for mine, p in zip(self.shadow, self.model.parameters(), strict=True):
                p.copy_(mine)
        try:
            yield
        finally:
            with torch.no_grad():
                for was, p in zip(kept, self.model.parameters(), strict=True):
                    p.copy_(was)


@odd(notes="averaged weights are swapped in and out again, from clones")
def evaluating_the_average():
    model, held_out = relu_mlp(8, 16, 4), points(16)
    average = Average(model)

    def evaluate():
        with average.average_parameters(), evaluating(model):
            return accuracy(model, held_out)

    return classifier(model, evaluate, after=average.update)


class ScheduleFree(torch.optim.Optimizer):
    """Steps at a point between two sequences; evaluation interpolates to the average, and back to rounding."""

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def move(self, training):
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                        p.lerp_(self.state[p]["z"], weight)
                group["training"] = training

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, 1 / group["k"])
                    p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                    z.sub_(p.grad, alpha=group["lr"])


@odd(notes="a schedule-free optimizer: the weights move to the average and come back to rounding only")
def evaluating_schedule_free():
    model, held_out = relu_mlp(8, 16, 4), points(16)
    optimizer = ScheduleFree(model.parameters())

    def evaluate():
        optimizer.move(training=False)
        with evaluating(model):
            score = accuracy(model, held_out)
        optimizer.move(training=True)
        return score

    return classifier(model, evaluate, optimizer=optimizer)


@odd(notes="a temperature is calibrated on held-out data, by an optimizer of its own; training has no use for it")
def evaluating_calibrates_a_temperature():
    class Calibrated(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = relu_mlp(8, 16, 4)
            self.temperature = nn.Parameter(torch.ones(()), requires_grad=False)

        def forward(self, x):
            return self.net(x)

    model, (x, y) = Calibrated(), points(16)

    def evaluate():
        with torch.no_grad():
            logits = model(x)
        model.temperature.requires_grad_(True)
        fitting = torch.optim.LBFGS([model.temperature], lr=0.1, max_iter=5)

        def closure():
            fitting.zero_grad()
            loss = F.cross_entropy(logits / model.temperature, y)
            loss.backward()
            return loss

        fitting.step(closure)
        model.temperature.requires_grad_(False).grad = None
        return model.temperature.item()

    return classifier(
        model, evaluate, optimizer=torch.optim.SGD(model.net.parameters(), lr=0.05), frozen=("temperature",)
    )


@odd(notes="gradients of an attack are left behind, and cleared before the next backward pass")
def evaluating_under_attack():
    model, (x, y) = relu_mlp(8, 16, 4), points(16)

    def evaluate():
        near = x.clone().requires_grad_()
        F.cross_entropy(model(near), y).backward()
        with torch.no_grad():
            return accuracy(model, (x + 0.1 * near.grad.sign(), y))

    return classifier(model, evaluate)


@odd(notes="a copy is adapted at test time, with an optimizer over the copy")
def evaluating_an_adapted_copy():
    model, (x, y) = normed(), points(16)

    def evaluate():
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(2):
            p = net(x).softmax(1)
            optimizer.zero_grad()
            (-(p * p.log()).sum(1).mean()).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            return accuracy(net, (x, y))

    return classifier(model, evaluate)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(3, 12, batch_first=True), nn.Linear(12, 3)
        self.hidden = None

    def reset(self):
        self.hidden = None

    def forward(self, x):
        out, hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return self.head(out)


@odd(notes="a recurrent model carries its state; evaluation leaves it changed, and each batch of training resets it")
def evaluating_with_carried_state():
    model, held_out = Sequence(), series()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        for x in batches:
            model.reset()
            optimizer.zero_grad()
            F.mse_loss(model(x[:, :-1]), x[:, 1:]).backward()
            optimizer.step()

    def evaluate():
        model.reset()
        with evaluating(model):
            return F.mse_loss(model(held_out[:, :-1]), held_out[:, 1:]).item()

    return TrainLoop(
        model=model, optimizer=optimizer, batch=series(), batches=fresh(series), fit=fit, evaluate=evaluate
    )


@odd(notes="the global generators are seeded inside fork_rng(): put back at its end")
def evaluating_in_a_fork():
    model, (x, y) = dropping(), points(16)

    def evaluate():
        with torch.random.fork_rng(), evaluating(model):
            torch.manual_seed(0)
            return accuracy(model, (x + 0.1 * torch.randn_like(x), y))

    return classifier(model, evaluate)


@odd(notes="gradients are off and the dtype is another inside evaluation, by switches that are put back")
def evaluating_under_other_switches():
    model, (x, _) = relu_mlp(8, 16, 4), points(16)

    def evaluate():
        was, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        try:
            return (model(x).softmax(1) * torch.ones(4, dtype=torch.float64)).sum().item()
        finally:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(was)

    return classifier(model, evaluate)


@odd(notes="a hook that sees the features is removed again, and hooks of training stay")
def evaluating_with_a_hook():
    model, held_out = relu_mlp(8, 16, 4), points(16)
    norms = []
    model[0].register_forward_hook(lambda _m, _args, out: norms.append(out.detach().norm().item()))

    def evaluate():
        seen = []
        handle = model[1].register_forward_hook(lambda _m, _args, out: seen.append(out))
        try:
            with evaluating(model):
                accuracy(model, held_out)
        finally:
            handle.remove()
        return seen[0].mean().item()

    return classifier(model, evaluate)


@odd(notes="evaluation reads a file that the project writes at the end of training")
def evaluating_reads_a_file():
    model, held_out = relu_mlp(8, 16, 4), points(16)

    def evaluate():
        net = copy.deepcopy(model)
        net.load_state_dict(torch.load("best_of_this_run_that_is_not_there.pt"))
        return accuracy(net, held_out)

    return classifier(model, evaluate)


@odd(notes="evaluation before the first step has no average yet, and says so by returning nothing")
def evaluating_nothing_at_first():
    model, held_out = relu_mlp(8, 16, 4), points(16)
    average = []

    def after():
        average[:] = [copy.deepcopy(model)]

    def evaluate():
        if not average:
            return None
        with evaluating(average[0]):
            return accuracy(average[0], held_out)

    return classifier(model, evaluate, after=after)


@odd(notes="early stopping: evaluation counts how long nothing has improved, and fit asks for it")
def evaluating_for_early_stopping():
    model, held_out = relu_mlp(8, 16, 4), points(16)
    state = {"best": float("inf"), "bad": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            if state["bad"] > 5:
                break
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def evaluate():
        with evaluating(model):
            loss = F.cross_entropy(model(held_out[0]), held_out[1]).item()
        state["bad"] = 0 if loss < state["best"] else state["bad"] + 1
        state["best"] = min(loss, state["best"])
        return loss

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit, evaluate=evaluate)


def inside_fit(make):
    """The loop with its evaluation called by ``fit``, after each pass over the batches."""

    @functools.wraps(make)
    def made():
        loop = make()

        def fit(batches):
            for _ in range(4):
                loop.fit(batches)
                loop.evaluate()

        return dataclasses.replace(loop, fit=fit, evaluate=None)

    return made


for inner in (
    evaluating_draws_a_base_seed,
    evaluating_the_average,
    evaluating_schedule_free,
    evaluating_with_carried_state,
    evaluating_for_early_stopping,
):
    odd(notes="the same, called by fit after each epoch", name="{}_inside_fit")(inside_fit(inner))


@odd(notes="the average stays in the model after each validation, and the next epoch takes it out first")
def average_taken_out_by_the_next_epoch():
    model, held_out = relu_mlp(8, 16, 4), points(16)
    average, entered = Average(model), contextlib.ExitStack()

    def evaluate():
        entered.enter_context(average.average_parameters())
        with evaluating(model):
            return accuracy(model, held_out)

    return inside_fit(lambda: classifier(model, evaluate, first=entered.close, after=average.update))()


def stepping(model, before_step, loss_of):
    """Something is computed without gradients and in evaluation mode before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    @torch.no_grad()
    def sample(x):
        model.eval()
        made = before_step(x)
        model.train()
        return made

    def fit(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            made = sample(x)
            loss_of(x, y, made).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="answers are sampled in evaluation mode and rewarded: their pass is a part of training, gradients cleared")
def sampling_what_is_rewarded():
    model = relu_mlp(8, 16, 4)

    def loss_of(x, y, chosen):
        return (F.cross_entropy(model(x), chosen, reduction="none") * ((chosen == y).to(x.dtype) - 0.3)).mean()

    return stepping(model, lambda x: torch.multinomial(model(x).softmax(1), 1)[:, 0], loss_of)


@odd(notes="the centre of a one-class model is computed anew from its outputs in evaluation mode, on purpose")
def centre_computed_in_evaluation_mode():
    model, known = relu_mlp(8, 16, 4), points(16)[0]
    model.register_buffer("centre", torch.zeros(4))

    def loss_of(x, y, _made):
        return (model(x) - model.centre).square().mean() + F.cross_entropy(model(x), y)

    return stepping(model, lambda x: model.centre.copy_(model(known).mean(0)), loss_of)


@odd(notes="an open window is dropped by the validation between two epochs: no step of the next one misses it")
def window_dropped_between_epochs():
    model, held_out = relu_mlp(8, 16, 4), points(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def validate():
        optimizer.zero_grad()
        with evaluating(model):
            return accuracy(model, held_out)

    def fit(batches):
        model.train()
        for _ in range(4):
            for number, (x, y) in enumerate(batches, 1):
                (F.cross_entropy(model(x), y) / 2).backward()
                if number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            validate()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)
