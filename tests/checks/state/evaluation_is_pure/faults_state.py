"""Evaluations that leave buffers, attributes, switches of the process, data or seeds changed."""

from __future__ import annotations

import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp, relu_mlp
from tests.loops.pairs import pair

CHECK = "evaluation_is_pure"


def looped(model, optimizer, loss_of, evaluate, batch, **fields):
    def fit(batches):
        for given in batches:
            optimizer.zero_grad()
            loss_of(given).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, evaluate=evaluate, **fields)


# Experts whose bias follows the sign of their load, which evaluation counts too: it turns after many steps only.


class Balanced(nn.Module):
    def __init__(self, asking):
        super().__init__()
        self.route, self.head, self.asking = nn.Linear(6, 5), mlp(6, 16, 3), asking
        self.experts = nn.Parameter(0.4 * torch.randn(5, 6, 6))
        self.register_buffer("bias", torch.zeros(5))
        self.register_buffer("usage", torch.zeros(5))

    def forward(self, x):
        score = self.route(x).sigmoid()
        best = (score + self.bias).argmax(1)
        if self.training or not self.asking:
            self.usage += F.one_hot(best, 5).sum(0)
        return self.head(x + torch.einsum("bd,bde->be", x, self.experts[best]) * score.gather(1, best[:, None]))

    @torch.no_grad()
    def balance(self):
        self.bias += 0.01 * torch.sign(self.usage.mean() - self.usage)
        self.usage.zero_()


def classified(model, optimizer, rows):
    """A classifier that is evaluated on these rows."""
    x, y = rows

    @torch.no_grad()
    def evaluate():
        model.eval()
        score = F.cross_entropy(model(x), y).item()
        model.train()
        return score

    return looped(model, optimizer, lambda b: F.cross_entropy(model(b[0]), b[1]), evaluate, data.labelled())


def balanced(asking):
    def make():
        model = Balanced(asking)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(lambda *_: model.balance())
        return classified(model, optimizer, data.labelled(rows=48, seed=5))

    return make


pair(
    "load_of_evaluation_balanced",
    CHECK,
    "buffers_moved_by_evaluation",
    culprits=("model.usage",),
    where="self.usage += ",
    faulty=balanced(asking=False),
    fixed=balanced(asking=True),
    quick=True,
)


# `set_grad_enabled(False)` called as a function.


def switched(in_a_block):
    def make():
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = data.table(seed=5)

        def evaluate():
            if in_a_block:
                with torch.set_grad_enabled(False):
                    return F.mse_loss(model(x), y).item()
            torch.set_grad_enabled(False)
            return F.mse_loss(model(x), y).item()

        return looped(model, optimizer, lambda b: F.mse_loss(model(b[0]), b[1]), evaluate, data.table())

    return make


pair(
    "gradients_left_switched_off",
    CHECK,
    "switch_left",
    culprits=("torch.is_grad_enabled()",),
    where="torch.set_grad_enabled(False)",
    faulty=switched(in_a_block=False),
    fixed=switched(in_a_block=True),
    quick=True,
)


# Standardised in place: the first evaluation changes the data that training draws its batches from.


def standardised(in_place):
    def make():
        model = mlp(6, 16, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        inputs, targets = data.table(rows=32)
        inputs = 3.0 * inputs + 1.0

        def draw(n):
            for i in range(n):
                rows = torch.arange(8) + 8 * (i % 4)
                yield inputs[rows], targets[rows]

        @torch.no_grad()
        def evaluate():
            x = inputs if in_place else inputs.clone()
            x -= x.mean(0)
            x /= x.std(0)
            return F.mse_loss(model(x), targets).item()

        return looped(model, optimizer, lambda b: F.mse_loss(model(b[0]), b[1]), evaluate, None, batches=draw)

    return make


pair(
    "data_standardised_in_place",
    CHECK,
    "data_changed",
    where="x -= x.mean(0)",
    faulty=standardised(in_place=True),
    fixed=standardised(in_place=False),
    quick=True,
)


# A table of rotations is made at the first call and kept; a validation before training makes it in inference mode.


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.table = None

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.outer(torch.arange(len(x)) / 10, torch.ones(8)).cos()
        return self.head(self.project(x) * self.table[: len(x)])


class Prototypes(nn.Module):
    """Compares rows with a table that is computed from weights, and kept where no gradients are needed."""

    def __init__(self, asking):
        super().__init__()
        self.classes, self.project, self.encoder = nn.Embedding(3, 8), nn.Linear(8, 8), nn.Linear(6, 8)
        self.asking, self.table = asking, None

    def forward(self, x):
        table = self.project(self.classes.weight) if self.table is None else self.table
        if self.training and self.asking:
            table, self.table = self.project(self.classes.weight), None
        elif not torch.is_grad_enabled():
            self.table = table
        return self.encoder(x) @ table.T


def prototypes(asking):
    def make():
        model = Prototypes(asking)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        return classified(model, optimizer, data.labelled(rows=24, seed=5))

    return make


pair(
    "table_of_prototypes_kept_from_evaluation",
    CHECK,
    "state_left",
    culprits=("model.table",),
    where="self.table = table",
    faulty=prototypes(asking=False),
    fixed=prototypes(asking=True),
)


def cached(no_grad):
    def make():
        model = Rotated()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = data.labelled(rows=24, seed=5)

        def evaluate():
            with torch.no_grad() if no_grad else torch.inference_mode():
                return F.cross_entropy(model(x), y).item()

        return looped(model, optimizer, lambda b: F.cross_entropy(model(b[0]), b[1]), evaluate, data.labelled())

    return make


pair(
    "table_cached_in_inference_mode",
    CHECK,
    "inference_tensor_kept",
    culprits=("model.table",),
    faulty=cached(no_grad=False),
    fixed=cached(no_grad=True),
    quick=True,
)


# Samples are shown after each epoch, always from the same noise.


def sampled(own_generator):
    def make():
        generator = mlp(4, 16, 2)
        optimizer = torch.optim.Adam(generator.parameters(), lr=5e-3)

        def loss_of(real):
            fake = generator(torch.randn(len(real), 4))
            return (torch.cdist(fake, real).mean() - 0.5 * torch.cdist(fake, fake).mean()).abs()

        @torch.no_grad()
        def show_samples():
            if own_generator:
                noise = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
            else:
                torch.manual_seed(0)
                noise = torch.randn(4, 4)
            return generator(noise).tolist()

        return looped(generator, optimizer, loss_of, show_samples, data.ring())

    return make


pair(
    "samples_seed_training",
    CHECK,
    "reseeds",
    where="torch.manual_seed(0)",
    culprits=("torch.manual_seed()",),
    faulty=sampled(own_generator=False),
    fixed=sampled(own_generator=True),
    quick=True,
)


# Functional dropout without its switch.


class Dropping(nn.Module):
    def __init__(self, switched_off):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)
        self.switched_off = switched_off

    def forward(self, x):
        h = F.relu(self.first(x))
        h = F.dropout(h, 0.4, self.training) if self.switched_off else F.dropout(h, 0.4)
        return self.second(h)


def dropping(switched_off):
    def make():
        model = Dropping(switched_off)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x, y = data.labelled(seed=5)

        def evaluate():
            model.eval()
            with torch.no_grad():
                score = (model(x).argmax(1) == y).float().mean().item()
            model.train()
            return score

        return looped(model, optimizer, lambda b: F.cross_entropy(model(b[0]), b[1]), evaluate, data.labelled())

    return make


pair(
    "dropout_in_evaluate",
    CHECK,
    "dropout_stays_on",
    where="F.dropout(h, 0.4)",
    faulty=dropping(switched_off=False),
    fixed=dropping(switched_off=True),
    quick=True,
)


# The first evaluation comes late, and its path through the loss was never taken: no step is passed there.


def passes_step(step_given):
    def make():
        model = relu_mlp(6, 16, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = data.table(seed=5)
        steps = [0]

        def loss_of(batch, step=None):
            out = model(batch[0])
            if step % 500 == 0:
                out.mean().item()
            return F.mse_loss(out, batch[1])

        def counted(batch):
            steps[0] += 1
            return loss_of(batch, steps[0])

        def evaluate():
            with torch.no_grad():
                return loss_of((x, y), steps[0] if step_given else None).item()

        return looped(model, optimizer, counted, evaluate, data.table())

    return make


pair(
    "step_is_none_in_evaluation",
    CHECK,
    "evaluation_raised",
    where="if step % 500 == 0",
    faulty=passes_step(step_given=False),
    fixed=passes_step(step_given=True),
    quick=True,
)


# The moments are lost: the optimizer is loaded with the state of the best epoch.


def reloaded(kept):
    def make():
        model = relu_mlp(6, 16, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        fresh = copy.deepcopy(optimizer.state_dict())
        x, y = data.labelled(seed=5)

        def evaluate():
            with torch.no_grad():
                score = F.cross_entropy(model(x), y).item()
            if not kept:
                optimizer.load_state_dict(fresh)
            return score

        return looped(model, optimizer, lambda b: F.cross_entropy(model(b[0]), b[1]), evaluate, data.labelled())

    return make


pair(
    "moments_reset_by_evaluation",
    CHECK,
    "state_left",
    where="optimizer.load_state_dict(fresh)",
    faulty=reloaded(kept=False),
    fixed=reloaded(kept=True),
)


# A metric that is never reset, and a loader's iterator that is kept: the second evaluation is not that of its model.
# https://github.com/JetBrains-Research/code2seq/pull/112, https://github.com/hushell/pmf_cvpr22/issues/41


class Mean:
    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.rows = 0.0, 0

    def update(self, values):
        self.total, self.rows = self.total + values.sum().item(), self.rows + len(values)


def evaluated_in_batches(*, reset=True, loader=True, most=3):
    def make():
        model, metric = mlp(6, 16, 3), Mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rows = torch.utils.data.TensorDataset(*data.labelled(rows=24, seed=5))
        held_out = torch.utils.data.DataLoader(rows, batch_size=8)
        held_out = held_out if loader else iter(held_out)

        @torch.no_grad()
        def evaluate():
            if reset:
                metric.reset()
            for x, y in itertools.islice(held_out, most):
                metric.update(F.cross_entropy(model(x), y, reduction="none"))
            return metric.total / metric.rows

        return looped(model, optimizer, lambda b: F.cross_entropy(model(b[0]), b[1]), evaluate, data.labelled())

    return make


pair(
    "metric_gathers_over_evaluations",
    CHECK,
    "state_left",
    culprits=("metric",),
    where="self.total + values.sum()",
    faulty=evaluated_in_batches(reset=False),
    fixed=evaluated_in_batches(),
)

for name, most in (("held_out_batches_come_once", 3), ("held_out_batches_run_out", 2)):
    pair(
        name,
        CHECK,
        "state_left",
        culprits=("held_out",),
        faulty=evaluated_in_batches(loader=False, most=most),
        fixed=evaluated_in_batches(most=most),
    )
