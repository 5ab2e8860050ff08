"""Parameters whose gradient is exactly zero in a short run, rightly: the loss is flat there, or they are held."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, points


def loop(model, batch, loss_of, optimizer=None, **fields):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        for item in batches:
            optimizer.zero_grad()
            loss_of(model, item).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **fields)


class Hypotheses(nn.Module):
    """Several answers, of which the best one is paid for (winner takes all)."""

    def __init__(self):
        super().__init__()
        self.stem = relu_mlp(8, 16, 8)
        self.answers = nn.ModuleList([nn.Linear(8, 1) for _ in range(3)])
        with torch.no_grad():
            self.answers[2].bias.fill_(40.0)

    def forward(self, x):
        return torch.stack([answer(self.stem(x)) for answer in self.answers], 1)


@odd(notes="of several hypotheses only the winner has a gradient; one starts far from every target and never wins")
def hypothesis_that_never_wins() -> TrainLoop:
    def loss_of(model, batch):
        return (model(batch[0]) - batch[1][:, None]).square().sum(-1).amin(1).mean()

    return loop(Hypotheses(), curves(), loss_of)


class GatedExperts(nn.Module):
    """The gate of the second expert opens when it is told so, after a warm-up of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, x):
        return self.head(torch.relu(self.first(x) + self.gate * self.second(x)))


@odd(notes="a branch is faded in by a schedule that begins after the first epoch: its gate is 0 until then")
def branch_faded_in_later() -> TrainLoop:
    return loop(GatedExperts(), points(), lambda m, b: F.cross_entropy(m(b[0]), b[1]))


@odd(notes="a prior is held by a hook that zeroes its gradient, in an optimizer without decay")
def prior_held_by_a_hook() -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].weight.register_hook(torch.zeros_like)
    return loop(model, points(), lambda m, b: F.cross_entropy(m(b[0]), b[1]))


@odd(notes="PPO: of the rows whose ratio is beyond the clip none has a gradient, and ten epochs use the same rows")
def clipped_ratios_in_several_epochs() -> TrainLoop:
    policy = mlp(8, 24, 4)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)

    def fit(batches):
        for x, actions in batches:
            with torch.no_grad():
                old = policy(x).log_softmax(-1).gather(1, actions[:, None])[:, 0]
            advantage = torch.linspace(-1, 1, len(x), dtype=x.dtype)
            for _ in range(4):
                ratio = (policy(x).log_softmax(-1).gather(1, actions[:, None])[:, 0] - old).exp()
                clipped = ratio.clamp(0.9, 1.1)
                optimizer.zero_grad()
                (-torch.minimum(ratio * advantage, clipped * advantage)).mean().backward()
                optimizer.step()

    return TrainLoop(model=policy, optimizer=optimizer, batch=points(), fit=fit)


class TrainedScale(nn.Module):
    """The scale of a contrastive model after its pretraining: at its bound, and held there by a clamp."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 3)
        self.log_scale = nn.Parameter(torch.tensor(4.606))

    def forward(self, x):
        left, right = (F.normalize(side(x), dim=1) for side in (self.left, self.right))
        return self.log_scale.clamp(max=4.6052).exp() * left @ right.T


@odd(notes="a pretrained CLIP's scale has reached its bound of 100 and stays there")
def scale_of_a_pretrained_model_at_its_bound() -> TrainLoop:
    def loss_of(model, batch):
        scores = model(batch[0])
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return loop(TrainedScale(), points(), loss_of, rows_interact=True)


class FewNeighbours(nn.Module):
    """Retrieval: the example batch has one neighbour a row, others have more."""

    def __init__(self):
        super().__init__()
        self.ask, self.key, self.head = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(16, 4)

    def forward(self, x, neighbours):
        scores = (self.ask(x)[:, None] * self.key(neighbours)).sum(-1)
        return self.head(torch.cat([x, (scores.softmax(-1)[..., None] * neighbours).sum(1)], 1))


@odd(notes="attention over the one neighbour that each row of the example batch has")
def one_neighbour_in_the_example_batch() -> TrainLoop:
    x, y = points()
    return loop(FewNeighbours(), (x, x[:, None].roll(1, 0), y), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))


class Maxout(nn.Module):
    """The largest of two pieces: one starts below the other everywhere."""

    def __init__(self):
        super().__init__()
        self.pieces, self.head = nn.ModuleList([nn.Linear(8, 12), nn.Linear(8, 12)]), nn.Linear(12, 4)
        with torch.no_grad():
            self.pieces[1].bias.fill_(-30.0)

    def forward(self, x):
        return self.head(torch.maximum(self.pieces[0](x), self.pieces[1](x)))


@odd(notes="maxout, whose second piece lies below the first for every row so far")
def piece_of_a_maxout_below_the_other() -> TrainLoop:
    return loop(Maxout(), points(), lambda m, b: F.cross_entropy(m(b[0]), b[1]))
