"""Parameters that are views, copies or replacements of others: flat buffers, growing models, edited optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


class FlatBuffers:
    """All parameters and gradients of a model as views of two vectors; the optimizer sees the vectors only."""

    def __init__(self, model):
        parameters = list(model.parameters())
        self.flat = torch.cat([p.detach().flatten() for p in parameters])
        self.flat.grad = torch.zeros_like(self.flat)
        start = 0
        for p in parameters:
            here = slice(start, start + p.numel())
            p.data, p.grad = self.flat[here].view_as(p), self.flat.grad[here].view_as(p)
            start = here.stop

    def zero_grad(self):
        self.flat.grad.zero_()


def train_flat(model, buffers, optimizer, batches):
    for x, y in batches:
        buffers.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@odd(
    notes="the optimizer holds one long vector and no parameter of the model; parameters and gradients are views of it"
)
def optimizer_over_one_flat_buffer() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    buffers = FlatBuffers(model)
    optimizer = torch.optim.Adam([buffers.flat], lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_flat(model, buffers, optimizer, batches),
    )


class FlatParameter(nn.Module):
    """One parameter from which the wrapped module's weights are cut in every forward pass."""

    def __init__(self, module):
        super().__init__()
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in module.parameters()]))
        self.hidden = [module.requires_grad_(False)]

    def forward(self, x):
        pieces = self.flat.split([shape.numel() for shape in self.shapes.values()])
        weights = {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}
        return functional_call(self.hidden[0], weights, (x,))


@odd(
    notes="the model has a single parameter; the layers it runs are hidden in a list and given their weights "
    "at call time"
)
def single_flat_parameter() -> TrainLoop:
    model = FlatParameter(relu_mlp(8, 16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train(model, optimizer, batches),
    )


class GrowingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(8, 12), nn.ModuleList(), nn.Linear(12, 4)

    def grow(self):
        self.blocks.append(relu_mlp(12, 12, 12))
        return self.blocks[-1]

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train_growing(model, optimizer, batches, every=4, depth=2):
    for step, (x, y) in enumerate(batches, 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % every == 0 and len(model.blocks) < depth:
            optimizer.add_param_group({"params": model.grow().parameters()})


@odd(notes="parameters appear in mid-run and join the optimizer there (progressive growing)")
def model_grows_during_training() -> TrainLoop:
    model = GrowingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_growing(model, optimizer, batches),
    )


class Mixture(nn.Module):
    """A sum of bumps, as Gaussian splatting has it: bumps are added and removed during training."""

    def __init__(self, bumps=4):
        super().__init__()
        self.center, self.height = nn.Parameter(torch.randn(bumps, 2)), nn.Parameter(0.1 * torch.randn(bumps))

    def forward(self, x):
        distance = (x[:, None] - self.center[None]).square().sum(2)
        return torch.exp(-distance) @ self.height


def replace(model, optimizer, name, build):
    """Put a new parameter in the place of an old one, with the optimizer's moments extended or cut in the same way."""
    old = getattr(model, name)
    new = nn.Parameter(build(old.detach(), False))
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    state = optimizer.state.pop(old, None)
    if state:
        optimizer.state[new] = {k: build(v, True) if v.ndim else v for k, v in state.items()}
    setattr(model, name, new)


def densify(model, optimizer, most=2):
    chosen = model.height.detach().abs().topk(min(most, len(model.height))).indices

    def build(tensor, is_state):
        added = (
            torch.zeros_like(tensor[chosen]) if is_state else tensor[chosen] + 0.05 * torch.randn_like(tensor[chosen])
        )
        return torch.cat([tensor, added])

    for name in ("center", "height"):
        replace(model, optimizer, name, build)


def train_splatting(model, optimizer, batches, every=5):
    for step, (x, y) in enumerate(batches, 1):
        loss = F.l1_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % every == 0 and len(model.height) < 10:
            densify(model, optimizer)


@odd(
    notes="parameters are replaced by longer ones every few steps, in the model and in the optimizer's groups "
    "and state (splatting)"
)
def parameters_replaced_by_densification() -> TrainLoop:
    model = Mixture()
    groups = [{"params": [model.center], "lr": 2e-2}, {"params": [model.height], "lr": 5e-2}]
    optimizer = torch.optim.Adam(groups, lr=0.0, eps=1e-15)
    x = torch.randn(12, 2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(x, torch.sin(x[:, 0]) * torch.exp(-x[:, 1].square())),
        fit=lambda batches: train_splatting(model, optimizer, batches),
    )


def swap_head(model, batches, at=4):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches):
        if step == at:
            model[-1] = nn.Linear(16, 6)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@odd(
    notes="the head is swapped for a wider one in mid-run and the optimizer is built again: the old head's "
    "tensors are gone from both"
)
def head_swapped_and_optimizer_rebuilt() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    return TrainLoop(model=model, batch=points(), batches=fresh(points), fit=lambda batches: swap_head(model, batches))


class Preconditioner:
    """Kronecker factors from the user's own module hooks; gradients are preconditioned in place (K-FAC)."""

    def __init__(self, model, decay=0.9, damping=0.1):
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        self.decay, self.damping, self.inputs, self.outputs = decay, damping, {}, {}
        for layer in self.layers:
            layer.register_forward_pre_hook(self.save_input)
            layer.register_full_backward_hook(self.save_output)

    def follow(self, factors, layer, rows):
        now = rows.detach().T @ rows.detach() / len(rows)
        factors[layer] = now if layer not in factors else self.decay * factors[layer] + (1 - self.decay) * now

    def save_input(self, layer, inputs):
        self.follow(self.inputs, layer, inputs[0])

    def save_output(self, layer, _, outputs):
        self.follow(self.outputs, layer, outputs[0] * len(outputs[0]))

    def precondition(self):
        for layer in self.layers:
            a, g = self.inputs[layer], self.outputs[layer]
            right = a + self.damping * torch.eye(len(a), dtype=a.dtype)
            left = g + self.damping * torch.eye(len(g), dtype=g.dtype)
            layer.weight.grad = torch.linalg.solve(left, torch.linalg.solve(right, layer.weight.grad.T).T)


def train_kfac(model, preconditioner, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        preconditioner.precondition()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@odd(
    notes="the project has hooks of its own on every layer, forward and backward, and replaces p.grad by "
    "something quite different"
)
def kfac_with_module_hooks() -> TrainLoop:
    model = mlp(8, 12, 1, activation=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = Preconditioner(model)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        batches=fresh(curves),
        fit=lambda batches: train_kfac(model, preconditioner, optimizer, batches),
    )
