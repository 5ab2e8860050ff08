"""Gradients that do not come from one backward through one graph: estimated, derived by hand, or local to a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jvp

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.plain import cross_entropy, loop
from tests.loops.random_data import curves, fresh, points


@torch.no_grad()
def train_evolution(model, optimizer, batches, pairs=4, sigma=0.05):
    weights = list(model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        for p in weights:
            p.grad = torch.zeros_like(p)
        for _ in range(pairs):
            noise = [torch.randn_like(p) for p in weights]
            scores = []
            for sign in (1, -2):
                torch._foreach_add_(weights, noise, alpha=sign * sigma)
                scores.append(F.cross_entropy(model(x), y))
            torch._foreach_add_(weights, noise, alpha=sigma)
            for p, n in zip(weights, noise, strict=True):
                p.grad.add_(n, alpha=float(scores[0] - scores[1]) / (2 * sigma * pairs))
        optimizer.step()


@odd(
    notes="everything runs under no_grad: the gradient is estimated from the losses of perturbed weights "
    "(evolution strategies)"
)
def evolution_strategies() -> TrainLoop:
    model = relu_mlp(8, 8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_evolution(model, optimizer, batches),
    )


class MeZO:
    """Memory-efficient zeroth-order fine-tuning: the noise is drawn again from its seed and never stored."""

    def __init__(self, model, lr=2e-2, eps=1e-3):
        self.model, self.lr, self.eps = model, lr, eps

    def shift(self, seed, scale):
        generator = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            p.data.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=scale)

    @torch.no_grad()
    def step(self, x, y):
        seed = int(torch.randint(2**31, ()))
        self.shift(seed, self.eps)
        above = F.cross_entropy(self.model(x), y).item()
        self.shift(seed, -2 * self.eps)
        below = F.cross_entropy(self.model(x), y).item()
        self.shift(seed, self.eps - self.lr * (above - below) / (2 * self.eps))


@odd(notes="neither gradients nor an optimizer: two forwards per step and an update through .data (MeZO)")
def mezo_zeroth_order() -> TrainLoop:
    model = nn.Linear(8, 4)
    method = MeZO(model)

    def fit(batches):
        for x, y in batches:
            method.step(x, y)

    return TrainLoop(model=model, batch=points(), fit=fit)


def train_forward_gradient(model, optimizer, batches):
    for x, y in batches:
        weights = {n: p.detach() for n, p in model.named_parameters()}
        direction = {n: torch.randn_like(w) for n, w in weights.items()}

        def loss_at(w, x=x, y=y):
            return F.cross_entropy(functional_call(model, w, (x,)), y)

        _, slope = jvp(loss_at, (weights,), (direction,))
        for n, p in model.named_parameters():
            p.grad = slope * direction[n]
        optimizer.step()
        optimizer.zero_grad()


@odd(notes="forward-mode differentiation along one random direction; there is no backward (forward gradients)")
def forward_gradient_jvp() -> TrainLoop:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_forward_gradient(model, optimizer, batches),
    )


class ManualNet(nn.Module):
    """Two layers whose backward pass is written out, as in a lecture on backpropagation."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(0.3 * torch.randn(8, 16)), nn.Parameter(torch.zeros(16))
        self.w2, self.b2 = nn.Parameter(0.3 * torch.randn(16, 1)), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        self.x, self.h = x, torch.tanh(x @ self.w1 + self.b1)
        return self.h @ self.w2 + self.b2

    def manual_backward(self, d_out):
        self.w2.grad, self.b2.grad = self.h.T @ d_out, d_out.sum(0)
        d_pre = (d_out @ self.w2.T) * (1 - self.h.square())
        self.w1.grad, self.b1.grad = self.x.T @ d_pre, d_pre.sum(0)


@torch.no_grad()
def train_manual(model, optimizer, batches):
    for x, y in batches:
        error = model(x) - y
        model.manual_backward(2 * error / error.numel())
        optimizer.step()


@odd(notes="forward and backward written by hand under no_grad; autograd takes no part")
def backward_written_by_hand() -> TrainLoop:
    model = ManualNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        batches=fresh(curves),
        fit=lambda batches: train_manual(model, optimizer, batches),
    )


class FeedbackLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, feedback):
        ctx.save_for_backward(x, feedback)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, gradient):
        x, feedback = ctx.saved_tensors
        return gradient @ feedback, gradient.T @ x, gradient.sum(0), None


class FeedbackLinear(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("feedback", torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x):
        return FeedbackLinearFunction.apply(x, self.weight, self.bias, self.feedback)


@odd(
    notes="errors travel back through fixed random matrices: gradients are wrong by design and still train "
    "(feedback alignment)"
)
def feedback_alignment() -> TrainLoop:
    model = nn.Sequential(FeedbackLinear(8, 16), nn.Tanh(), FeedbackLinear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return loop(model, points(), cross_entropy, optimizer)


class ForwardForwardLayer(nn.Module):
    def __init__(self, inputs, outputs, threshold=1.0):
        super().__init__()
        self.linear, self.threshold = nn.Linear(inputs, outputs), threshold
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)

    def forward(self, x):
        return torch.relu(self.linear(x / (x.norm(dim=1, keepdim=True) + 1e-4)))

    def train_on(self, good, bad):
        goodness = [self(x).square().mean(1) for x in (good, bad)]
        loss = F.softplus(torch.cat([self.threshold - goodness[0], goodness[1] - self.threshold])).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return self(good).detach(), self(bad).detach()


class ForwardForwardNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.layers = nn.ModuleList([ForwardForwardLayer(8 + classes, 16), ForwardForwardLayer(16, 16)])
        self.classes = classes

    def fit(self, batches):
        for x, y in batches:
            wrong = (y + torch.randint(1, self.classes, y.shape)) % self.classes
            good, bad = (torch.cat([x, F.one_hot(t, self.classes).to(x.dtype)], 1) for t in (y, wrong))
            for layer in self.layers:
                good, bad = layer.train_on(good, bad)


@odd(
    notes="every layer has its own loss and optimizer and hands on a detached output: no path from end to "
    "start (forward-forward)"
)
def forward_forward_local_losses() -> TrainLoop:
    net = ForwardForwardNet()
    return TrainLoop(
        model=net,
        optimizer=[layer.optimizer for layer in net.layers],
        batch=points(),
        batches=fresh(points),
        fit=net.fit,
    )


class GreedyNet(nn.Module):
    """Deep net trained layer by layer through auxiliary heads; activations are detached between blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])

    def losses(self, x, y):
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = torch.relu(block(x.detach()))
            yield F.cross_entropy(head(x), y)


@odd(notes="detach between all blocks, one backward per block, one step for all (decoupled greedy learning)")
def greedy_layerwise_detached_blocks() -> TrainLoop:
    model = GreedyNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            for loss in model.losses(x, y):
                loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@torch.no_grad()
def oja(weight, x, lr=0.02):
    y = x @ weight.T
    weight.add_(lr * (y.T @ x - torch.tril(y.T @ y) @ weight) / len(x))


@odd(
    notes="a Hebbian front, moved by its own rule outside autograd and held by no optimizer; "
    "only the head is trained by gradient"
)
def hebbian_front_with_trained_head() -> TrainLoop:
    model = nn.ModuleDict({"front": nn.Linear(8, 6, bias=False), "head": nn.Linear(6, 4)})
    model["front"].requires_grad_(False)
    optimizer = torch.optim.Adam(model["head"].parameters(), lr=2e-2)

    def fit(batches):
        for x, y in batches:
            oja(model["front"].weight, x)
            optimizer.zero_grad()
            F.cross_entropy(model["head"](model["front"](x)), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)
