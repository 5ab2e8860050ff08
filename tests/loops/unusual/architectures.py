"""Layers that are used by some batches only, used twice, computed, rounded, complex, or never called."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, images, points


def train(model, optimizer, batches, criterion=F.cross_entropy):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()


def classifier_loop(model, lr=1e-2, batches=None, draw=points):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=draw(),
        batches=batches,
        fit=lambda given: train(model, optimizer, given),
    )


class TopOneMoE(nn.Module):
    """Switch layer: every row goes to one expert; ``skip_empty`` leaves experts without rows uncalled."""

    def __init__(self, width=12, experts=4, skip_empty=True):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList([relu_mlp(width, 12, width) for _ in range(experts)])
        self.skip_empty = skip_empty

    def forward(self, x):
        probability, chosen = self.router(x).softmax(1).max(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if self.skip_empty and rows.numel() == 0:
                continue
            out = out.index_add(0, rows, probability[rows, None] * expert(x[rows]))
        return x + out


@odd(notes="experts without rows are not called at all, in some batches or in every batch (mixture of experts)")
def moe_uncalled_experts() -> TrainLoop:
    return classifier_loop(nn.Sequential(nn.Linear(8, 12), TopOneMoE(), nn.Linear(12, 4)), batches=fresh(points))


@odd(notes="experts without rows are called with zero rows: their gradients are exactly 0; only one batch was declared")
def moe_experts_called_with_no_rows() -> TrainLoop:
    return classifier_loop(nn.Sequential(nn.Linear(8, 12), TopOneMoE(experts=6, skip_empty=False), nn.Linear(12, 4)))


class DenseMoE(nn.Module):
    """Top-two gates over experts that are kept as stacked tensors."""

    def __init__(self, width=12, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(0.2 * torch.randn(experts, width, 16))
        self.down = nn.Parameter(0.2 * torch.randn(experts, 16, width))

    def forward(self, x):
        top = self.gate(x).topk(2, dim=1)
        gates = torch.zeros(len(x), len(self.up)).scatter(1, top.indices, top.values.softmax(1))
        each = torch.einsum("neh,ehw->new", torch.relu(torch.einsum("nw,ewh->neh", x, self.up)), self.down)
        return x + torch.einsum("ne,new->nw", gates, each)


@odd(notes="all experts run on all rows and most results are multiplied by 0 (top-2 gates, stacked experts)")
def moe_stacked_experts() -> TrainLoop:
    return classifier_loop(nn.Sequential(nn.Linear(8, 12), DenseMoE(), nn.Linear(12, 4)), batches=fresh(points))


class StochasticDepthNet(nn.Module):
    def __init__(self, depth=4, width=12, survival=0.6):
        super().__init__()
        self.stem, self.head, self.survival = nn.Linear(8, width), nn.Linear(width, 4), survival
        self.blocks = nn.ModuleList([relu_mlp(width, width, width) for _ in range(depth)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.training and torch.rand(()).item() > self.survival:
                continue
            x = x + block(x) * (1.0 if self.training else self.survival)
        return self.head(x)


@odd(notes="whole blocks are skipped at random, so their parameters have no gradient in that step (stochastic depth)")
def stochastic_depth() -> TrainLoop:
    return classifier_loop(StochasticDepthNet())


class MultiTask(nn.Module):
    def __init__(self, tasks=("color", "shape", "size")):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.heads = nn.ModuleDict({task: nn.Linear(16, 4) for task in tasks})
        self.tasks = tasks

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def task_batch(task):
    x, y = points()
    return {"x": x, "y": (y + task) % 4, "task": torch.tensor(task)}


def train_multitask(model, optimizer, batches):
    for batch in batches:
        task = model.tasks[int(batch["task"])]
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"], task), batch["y"]).backward()
        optimizer.step()


@odd(notes="each batch belongs to one task: the other heads have no gradient in that step (batches alternate)")
def one_task_per_batch() -> TrainLoop:
    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=task_batch(0),
        batches=lambda n: [task_batch(i % 3) for i in range(n)],
        fit=lambda batches: train_multitask(model, optimizer, batches),
    )


@odd(notes="the only batch declared belongs to one task of three: two heads never run")
def one_task_per_batch_only_one_declared() -> TrainLoop:
    model = MultiTask()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=task_batch(1),
        fit=lambda batches: train_multitask(model, optimizer, batches),
    )


class WithAuxiliary(nn.Module):
    """An Inception-like auxiliary classifier that this configuration does not use."""

    def __init__(self, use_auxiliary=False):
        super().__init__()
        self.body, self.head = relu_mlp(8, 16, 16), nn.Linear(16, 4)
        self.auxiliary = nn.Linear(16, 4)
        self.use_auxiliary = use_auxiliary

    def forward(self, x):
        h = torch.relu(self.body(x))
        if self.use_auxiliary:
            return self.head(h), self.auxiliary(h)
        return self.head(h)


@odd(notes="a branch is registered and optimised but switched off by the configuration: it is never called")
def auxiliary_branch_switched_off() -> TrainLoop:
    return classifier_loop(WithAuxiliary())


class DeeplySupervised(nn.Module):
    def __init__(self, depth=3, width=12):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8 if i == 0 else width, width) for i in range(depth)])
        self.heads = nn.ModuleList([nn.Linear(width, 4) for _ in range(depth)])

    def forward(self, x):
        outputs = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = torch.relu(block(x))
            outputs.append(head(x))
        return outputs


def train_deeply(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        *early, last = model(x)
        for output in early:
            (0.3 * F.cross_entropy(output, y)).backward(retain_graph=True)
        F.cross_entropy(last, y).backward()
        optimizer.step()


@odd(notes="several backwards through one graph, kept alive in between, before one step (deep supervision)")
def deep_supervision_separate_backwards() -> TrainLoop:
    model = DeeplySupervised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_deeply(model, optimizer, batches),
    )


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = relu_mlp(8, 16, 6)

    def forward(self, a, b):
        return F.pairwise_distance(self.tower(a), self.tower(b))


def contrastive(distance, same, margin=1.5):
    return (same * distance.square() + (1 - same) * F.relu(margin - distance).square()).mean()


def train_siamese(model, optimizer, batches):
    for a, b, same in batches:
        optimizer.zero_grad()
        contrastive(model(a, b), same).backward()
        optimizer.step()


@odd(
    notes="one tower runs twice per step and only distances count, so its last bias cancels; "
    "pairs beyond the margin give 0"
)
def siamese_contrastive() -> TrainLoop:
    model = Siamese()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    (a, i), (b, j) = points(), points()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(a, b, (i == j).to(a.dtype)),
        fit=lambda batches: train_siamese(model, optimizer, batches),
    )


class HyperNetwork(nn.Module):
    """Weights of the main layer are computed from an embedding of the task."""

    def __init__(self):
        super().__init__()
        self.task = nn.Parameter(torch.randn(6))
        self.make_weight, self.make_bias = nn.Linear(6, 4 * 8), nn.Linear(6, 4)

    def forward(self, x):
        return F.linear(x, self.make_weight(self.task).view(4, 8), self.make_bias(self.task))


@odd(notes="no layer that sees the data has parameters; weights are outputs of another layer (hypernetwork)")
def hypernetwork() -> TrainLoop:
    return classifier_loop(HyperNetwork(), batches=fresh(points))


class SpectralFilter(nn.Module):
    """Fourier layer with complex weights."""

    def __init__(self, length=8, channels=4):
        super().__init__()
        self.lift = nn.Conv1d(1, channels, 1)
        self.weight = nn.Parameter(0.3 * torch.randn(channels, length // 2 + 1, dtype=torch.cfloat))
        self.out = nn.Linear(channels * length, 1)

    def forward(self, x):
        h = self.lift(x[:, None])
        h = torch.fft.irfft(torch.fft.rfft(h) * self.weight, n=x.size(1))
        return self.out(F.gelu(h).flatten(1))


@odd(notes="complex parameters with complex gradients (Fourier neural operator)")
def complex_parameters() -> TrainLoop:
    model = SpectralFilter()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        fit=lambda batches: train(model, optimizer, batches, F.mse_loss),
    )


class AutoCorrelation(nn.Module):
    """Delays at which a series resembles itself, as Autoformer finds them: a spectrum times a conjugated one."""

    def __init__(self, channels=4, kept=3):
        super().__init__()
        self.query, self.key, self.value = (nn.Conv1d(1, channels, 1) for _ in range(3))
        self.out, self.kept = nn.Linear(channels, 1), kept

    def forward(self, x):
        query, key, value = (layer(x[:, None]) for layer in (self.query, self.key, self.value))
        spectrum = torch.fft.rfft(query) * torch.conj(torch.fft.rfft(key))
        alike = torch.fft.irfft(spectrum, n=x.size(1)).mean(1)
        weights, delays = alike.topk(self.kept)
        weights = weights.softmax(-1)
        places = (torch.arange(x.size(1)) + delays[..., None]) % x.size(1)
        moved = (
            value[:, :, None].expand(-1, -1, self.kept, -1).gather(3, places[:, None].expand(-1, value.size(1), -1, -1))
        )
        return self.out((moved * weights[:, None, :, None]).sum(2).mean(-1))


@odd(notes="a tensor that is only marked as conjugated goes into an inverse Fourier transform (Autoformer)")
def conjugated_spectrum() -> TrainLoop:
    model = AutoCorrelation()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        fit=lambda batches: train(model, optimizer, batches, F.mse_loss),
    )


class NamedLayers(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleDict({f"{kind}_{i}": self.build(kind, *args) for i, (kind, *args) in enumerate(plan)})

    @staticmethod
    def build(kind, *args):
        kinds = {"linear": nn.Linear, "weightnorm": lambda a, b: weight_norm(nn.Linear(a, b)), "act": nn.Hardswish}
        return kinds[kind](*args)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


@odd(notes="layers come from a plan into a ModuleDict; weights are recomputed from direction and length (weight norm)")
def layers_from_a_plan_with_weight_norm() -> TrainLoop:
    plan = [("weightnorm", 8, 16), ("act",), ("linear", 16, 16), ("act",), ("weightnorm", 16, 4)]
    return classifier_loop(NamedLayers(plan), batches=fresh(points))


class LazyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.LazyConv2d(4, 3, stride=2), nn.LazyBatchNorm2d()
        self.head = nn.LazyLinear(4)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


@odd(notes="parameters have no shape until a dry run before the optimizer is built (lazy modules)")
def lazy_modules_after_a_dry_run() -> TrainLoop:
    model = LazyNet()
    with torch.no_grad():
        model(images(rows=2)[0])
    return classifier_loop(model, draw=images)


class NeuralODE(nn.Module):
    def __init__(self, width=8, steps=4):
        super().__init__()
        self.field, self.head, self.steps = mlp(width + 1, 16, width, activation=nn.Tanh), nn.Linear(width, 4), steps

    def forward(self, x):
        for i in range(self.steps):
            t = torch.full((len(x), 1), i / self.steps)
            x = x + self.field(torch.cat([x, t], 1)) / self.steps
        return self.head(x)


@odd(notes="one small net is applied four times in a row within one forward pass (Euler steps of a neural ODE)")
def neural_ode_euler() -> TrainLoop:
    return classifier_loop(NeuralODE(), lr=5e-3)
