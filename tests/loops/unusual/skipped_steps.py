"""Steps that are sometimes left out, and optimizers that are stepped without having anything to do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def train_balanced_gan(generator, discriminator, opt_g, opt_d, batches, threshold=0.7):
    for real in batches:
        opt_d.zero_grad()
        fake = generator(torch.randn(len(real), 4))
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        (F.softplus(-on_real).mean() + F.softplus(on_fake).mean()).backward()
        accuracy = torch.cat([on_real > 0, on_fake < 0]).float().mean()
        if accuracy < threshold:
            opt_d.step()
        opt_g.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        opt_g.step()


@odd(
    notes="the discriminator's step is left out where it is too good already, after its backward: "
    "some gradients of one call are used and others wiped (3D-GAN)"
)
def gan_discriminator_step_left_out_when_too_good() -> TrainLoop:
    generator, discriminator = relu_mlp(4, 16, 8), relu_mlp(8, 16, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3)
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
    return TrainLoop(
        model=[generator, discriminator],
        optimizer=[opt_g, opt_d],
        batch=points()[0],
        batches=fresh(lambda: points()[0]),
        fit=lambda batches: train_balanced_gan(generator, discriminator, opt_g, opt_d, batches),
    )


class Heads(nn.Module):
    def __init__(self, tasks=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(16, 4) for _ in range(tasks)])

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def train_all_stepped(model, optimizers, batches):
    for x, y, task in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(x, int(task)), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def task_batches(n):
    return [(*points(), torch.tensor(i % 4)) for i in range(n)]


@odd(notes="one optimizer per head, all stepped on every batch: three of four steps of each find no gradient at all")
def head_optimizers_stepped_without_gradients() -> TrainLoop:
    model = Heads()
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (model.trunk, *model.heads)]
    return TrainLoop(
        model=model,
        optimizer=optimizers,
        batch=task_batches(1)[0],
        batches=task_batches,
        fit=lambda batches: train_all_stepped(model, optimizers, batches),
    )


def train_two_stage(model, batches, warmup=4):
    optimizers = [torch.optim.Adam(model["head"].parameters(), lr=2e-2)]
    for step, (x, y) in enumerate(batches):
        if step == warmup:
            optimizers.append(torch.optim.Adam(model["trunk"].parameters(), lr=5e-3))
        model.zero_grad()
        F.cross_entropy(model["head"](model["trunk"](x).relu()), y).backward()
        for optimizer in optimizers:
            optimizer.step()


@odd(notes="the trunk has gradients from the first batch on, and an optimizer only from the fifth (head warm-up)")
def trunk_optimizer_made_after_head_warmup() -> TrainLoop:
    model = nn.ModuleDict({"trunk": nn.Linear(8, 16), "head": nn.Linear(16, 4)})
    return TrainLoop(
        model=model,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_two_stage(model, batches),
    )


class ProximalL1(torch.optim.Optimizer):
    """Soft threshold after a gradient step (ISTA). Reads no gradient."""

    def __init__(self, params, lr, strength):
        super().__init__(params, {"lr": lr, "strength": strength})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(F.softshrink(p, group["lr"] * group["strength"]))


def train_sparse(model, optimizer, shrink, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        shrink.step()


@odd(
    notes="two optimizers hold the same weights and step one after the other; "
    "the second reads no gradient (proximal gradient)"
)
def proximal_step_as_a_second_optimizer() -> TrainLoop:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shrink = ProximalL1([model.weight], lr=0.1, strength=0.02)
    return TrainLoop(
        model=model,
        optimizer=[optimizer, shrink],
        batch=curves(),
        batches=fresh(curves),
        fit=lambda batches: train_sparse(model, optimizer, shrink, batches),
    )


class ExtraSGD(torch.optim.SGD):
    """Extragradient: look ahead along the gradient, then step from the old point with the new gradient."""

    @torch.no_grad()
    def extrapolation(self):
        self.kept = [[p.clone() for p in group["params"]] for group in self.param_groups]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])

    @torch.no_grad()
    def step(self, closure=None):
        for group, kept in zip(self.param_groups, self.kept, strict=True):
            for p, old in zip(group["params"], kept, strict=True):
                p.copy_(old)
        return super().step(closure)


def train_saddle(players, optimizers, batches):
    low, high = players
    for x in batches:
        for move in ("extrapolation", "step"):
            value = (low(x) * high(x)).sum(1).mean() + 0.05 * (low(x).square().mean() - high(x).square().mean())
            for player, optimizer, sign in zip(players, optimizers, (1, -1), strict=True):
                optimizer.zero_grad()
                (sign * value).backward(inputs=list(player.parameters()), retain_graph=True)
            for optimizer in optimizers:
                getattr(optimizer, move)()


@odd(
    notes="two players with opposed losses on one graph, backward(inputs=...), and every first gradient only "
    "looks ahead (extragradient)"
)
def extragradient_saddle_point() -> TrainLoop:
    players = [nn.Linear(8, 3), nn.Linear(8, 3)]
    optimizers = [ExtraSGD(player.parameters(), lr=0.1) for player in players]
    return TrainLoop(
        model={"low": players[0], "high": players[1]},
        optimizer=optimizers,
        batch=torch.randn(8, 8),
        fit=lambda batches: train_saddle(players, optimizers, batches),
    )


def train_throwaway(model, batches, lr=0.2):
    for step, (x, y) in enumerate(batches):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=lr / (1 + 0.05 * step)).step()


@odd(notes="a new optimizer object for every batch, used once")
def throwaway_optimizer_for_every_batch() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    return TrainLoop(
        model=model, batch=points(), batches=fresh(points), fit=lambda batches: train_throwaway(model, batches)
    )
