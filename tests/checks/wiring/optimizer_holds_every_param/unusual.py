"""Who holds what: parameters that are updated elsewhere, kept for other uses, or known to the optimizer only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


class PlainListNet(nn.Module):
    """Layers in a plain list; the project knows, and asks all_parameters() for them."""

    def __init__(self, depth=2, width=12):
        super().__init__()
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 4)
        self.hidden = [nn.Linear(width, width) for _ in range(depth)]

    def all_parameters(self):
        return [*self.parameters(), *(p for layer in self.hidden for p in layer.parameters())]

    def forward(self, x):
        x = self.stem(x)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.head(x)


@odd(notes="layers in a plain list that parameters() does not see, and that the optimizer was given all the same")
def unregistered_layers_given_to_the_optimizer() -> TrainLoop:
    model = PlainListNet()
    optimizer = torch.optim.Adam(model.all_parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, batches),
    )


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.prototypes = relu_mlp(8, 16, 6), nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return -torch.cdist(self.net(x), self.prototypes)


def train_prototypes(model, optimizer, batches, rate=0.5):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            model.prototypes -= rate * model.prototypes.grad
        model.prototypes.grad = None


@odd(notes="one parameter is in no optimizer: the loop itself takes a plain gradient step on it")
def one_parameter_updated_by_hand() -> TrainLoop:
    model = Prototypes()
    optimizer = torch.optim.Adam(model.net.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_prototypes(model, optimizer, batches),
    )


class Refitted(nn.Module):
    """The pretraining head stays in the module so that old checkpoints load."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.old_head, self.head = nn.Linear(16, 10), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.trunk(x))


@odd(notes="a head that requires grad, never runs and is in no optimizer: it is kept for the sake of old checkpoints")
def old_head_kept_for_checkpoints() -> TrainLoop:
    model = Refitted()
    optimizer = torch.optim.SGD([*model.trunk.parameters(), *model.head.parameters()], lr=0.2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train(model, optimizer, batches),
    )


def train_with_loss_network(model, judge, optimizer, batches):
    for x in batches:
        out = model(x + 0.2 * torch.randn_like(x))
        loss = F.mse_loss(out, x) + F.mse_loss(judge(out), judge(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@odd(notes="a fixed loss network outside the declared model: its gradients pile up for ever and nobody reads them")
def loss_network_outside_the_model() -> TrainLoop:
    model, judge = relu_mlp(8, 16, 8), relu_mlp(8, 12, 6).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points()[0],
        fit=lambda batches: train_with_loss_network(model, judge, optimizer, batches),
    )


class SharedBlocks(nn.Module):
    """ALBERT: one block under several names, called several times."""

    def __init__(self, depth=3, width=12):
        super().__init__()
        block = mlp(width, 16, width, activation=nn.GELU)
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList([block] * depth)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@odd(notes="one block stands under three names; each parameter has several paths to the loss (ALBERT)")
def one_block_under_several_names() -> TrainLoop:
    model = SharedBlocks()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, batches),
    )


def train_through_copies(models, optimizers, batches):
    """Population-based training: the worse member takes over the better one's weights and another rate."""
    scores = [0.0 for _ in models]
    for step, (x, y) in enumerate(batches, 1):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scores[i] = 0.7 * scores[i] + 0.3 * loss.item()
        if step % 5 == 0:
            best, worst = (
                min(range(len(models)), key=scores.__getitem__),
                max(range(len(models)), key=scores.__getitem__),
            )
            models[worst].load_state_dict(models[best].state_dict())
            optimizers[worst].load_state_dict(optimizers[best].state_dict())
            optimizers[worst].param_groups[0]["lr"] *= 1.2 if step % 2 else 0.8
            scores[worst] = scores[best]


@odd(notes="weights and optimizer state of one network are loaded into another in mid-run (population-based training)")
def population_based_training() -> TrainLoop:
    models = [relu_mlp(8, 12, 4) for _ in range(3)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=rate) for m, rate in zip(models, (1e-3, 5e-3, 2e-2), strict=True)]
    return TrainLoop(
        model=models,
        optimizer=optimizers,
        batch=points(),
        fit=lambda batches: train_through_copies(models, optimizers, batches),
    )


class Ensemble(nn.Module):
    """Members that lend their parameters to one module for a call."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(relu_mlp(8, 12, 4) for _ in range(2))
        self.frame = [relu_mlp(8, 12, 4).requires_grad_(False)]

    def forward(self, x):
        lent = [dict(member.named_parameters()) for member in self.members]
        return sum(torch.func.functional_call(self.frame[0], params, (x,)) for params in lent)


@odd(notes="one frame of layers is given the parameters of each member in turn, for a call")
def members_that_lend_their_parameters() -> TrainLoop:
    model = Ensemble()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train(model, optimizer, batches),
    )


class RenewedHead(nn.Module):
    """A head whose class vectors are made anew every few passes; the trainer gives the optimizer the new ones."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head, self.passes = relu_mlp(8, 16, 8), nn.Linear(8, 4), 0

    def forward(self, x):
        self.passes += 1
        if self.passes % 4 == 0:
            self.head.weight = nn.Parameter(F.normalize(self.head.weight.detach()))
        return self.head(self.trunk(x))


@odd(notes="a parameter is replaced inside of forward, and the trainer gives the optimizer the new one in time")
def replaced_and_given_to_the_optimizer() -> TrainLoop:
    model = RenewedHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)
