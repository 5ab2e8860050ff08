"""Loops that a batch of one row would break, and that never meet it or know what to do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, images, points


def training(model, batch, loss_of, *, rate=1e-2, **fields) -> TrainLoop:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def fit(batches):
        for item in batches:
            loss = loss_of(model, item)
            if loss is None:
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **fields)


def binary(rows=8):
    x, y = points(rows, classes=2)
    return x, y.float()


def loader(data, rows, **settings):
    return DataLoader(TensorDataset(*data), batch_size=rows, **settings)


# squeeze() without a dim


@odd(notes="squeeze() would take the row axis of one row; the loader drops what is left over")
def squeeze_with_drop_last() -> TrainLoop:
    data = binary(401)
    return training(
        relu_mlp(8, 16, 1),
        tuple(t[:8] for t in data),
        lambda model, b: F.binary_cross_entropy_with_logits(model(b[0]).squeeze(), b[1]),
        batches=loader(data, 8, shuffle=True, drop_last=True),
    )


@odd(notes="squeeze() takes every axis of one row out, on both sides of the loss alike")
def squeeze_on_both_sides() -> TrainLoop:
    return training(
        relu_mlp(8, 16, 1), curves(), lambda model, b: F.mse_loss(model(b[0]).squeeze(), b[1].squeeze()), rate=2e-2
    )


@odd(notes="squeeze() makes a number of one row, and atleast_1d a row of it again")
def squeeze_then_atleast_1d() -> TrainLoop:
    return training(
        relu_mlp(8, 16, 1),
        binary(),
        lambda model, b: F.binary_cross_entropy_with_logits(torch.atleast_1d(model(b[0]).squeeze()), b[1]),
    )


@odd(notes="one row becomes a number and is compared with one: broadcast, and the same")
def squeeze_of_one_value_broadcast() -> TrainLoop:
    inputs, target = curves()
    return training(
        relu_mlp(8, 16, 1),
        (inputs, target[:, 0]),
        lambda model, b: (model(b[0]).squeeze() - b[1]).abs().mean(),
        rate=2e-2,
    )


@odd(notes="squeeze(0) takes out the axis of layers, which has size 1 whatever the rows")
def squeeze_of_layers() -> TrainLoop:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 12, batch_first=True), nn.Linear(12, 4)

        def forward(self, x):
            _, last = self.rnn(x.view(len(x), 4, 2))
            return self.head(last.squeeze(0))

    return training(Net(), points(), lambda model, b: F.cross_entropy(model(b[0]), b[1]))


@odd(notes="raises on one row by itself, as squeezed scores cannot be ranked")
def raises_below_two_rows() -> TrainLoop:
    def loss_of(model, batch):
        scores = model(batch[0]).squeeze()
        if scores.dim() < 1:
            raise ValueError("ranking takes at least two rows")
        return F.soft_margin_loss(scores, 2 * batch[1] - 1)

    return training(relu_mlp(8, 16, 1), binary(), loss_of)


class Towers(nn.Module):
    """Two views of a row, with an axis of pixels that is squeezed away."""

    def __init__(self):
        super().__init__()
        self.left, self.right = relu_mlp(8, 16, 6), relu_mlp(8, 16, 6)

    def forward(self, x):
        pair = self.left(x)[:, :, None], self.right(x.flip(1))[:, :, None]
        return [F.normalize(view.squeeze(), dim=-1) for view in pair]


@odd(notes="squeezed features of one row raise; rows are each other's negatives, so that one row would teach nothing")
def contrast_of_squeezed_features() -> TrainLoop:
    def loss_of(model, batch):
        left, right = model(batch[0])
        scores = left @ right.T / 0.2
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return training(Towers(), (points()[0],), loss_of, batches=fresh(lambda: (points()[0],)))


@odd(notes="standard deviations over squeezed rows: NaN for one row, which is never given (Barlow Twins)")
def barlow_twins_of_squeezed_features() -> TrainLoop:
    def loss_of(model, batch):
        left, right = ((view - view.mean(0)) / (view.std(0) + 1e-3) for view in model(batch[0]))
        cross = left.T @ right / len(left)
        return ((cross - torch.eye(6)) ** 2).mean()

    return training(Towers(), (points(12)[0],), loss_of)


@odd(notes="every pair of rows is compared, and one row has none: the mean over no pairs is NaN")
def ranking_of_all_pairs() -> TrainLoop:
    def loss_of(model, batch):
        scores, relevance = model(batch[0]).squeeze(), batch[1][:, 0]
        first, second = torch.triu_indices(len(relevance), len(relevance), 1)
        return F.margin_ranking_loss(
            scores[first], scores[second], torch.sign(relevance[first] - relevance[second]), margin=0.5
        )

    return training(relu_mlp(8, 16, 1), curves(), loss_of)


@odd(notes="rows are the nodes of a graph, all given at once, and the scores of all are squeezed")
def nodes_of_one_graph() -> TrainLoop:
    x, y = binary(10)
    links = (torch.rand(10, 10) < 0.4).float() + torch.eye(10)

    def loss_of(model, batch):
        features, linked, labels = batch
        mixed = linked @ features / linked.sum(1, keepdim=True)
        return F.binary_cross_entropy_with_logits(model(mixed).squeeze(), labels)

    return training(relu_mlp(8, 16, 1), (x, links, y), loss_of)


@odd(notes="the whole data set is given to every step of a quasi-Newton method, and squeezed")
def whole_data_by_lbfgs() -> TrainLoop:
    model = mlp(8, 6, 1, activation=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def fit(batches):
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.binary_cross_entropy_with_logits(model(x).squeeze(), y) + 1e-3 * sum(
                    (p**2).sum() for p in model.parameters()
                )
                loss.backward()
                return loss

            optimizer.step(closure)

    return TrainLoop(model=model, optimizer=optimizer, batch=binary(12), fit=fit)


@odd(notes="rows are the steps of a rollout, whose returns are summed from behind: one step alone is no rollout")
def steps_of_a_squeezed_rollout() -> TrainLoop:
    states, actions = points(10)
    rewards = (states.argmax(1) == actions).float() + 0.1 * torch.randn(10)

    def loss_of(model, batch):
        states, actions, rewards = batch
        chosen = F.log_softmax(model(states)[:, None].squeeze(), -1).gather(-1, actions[:, None]).squeeze()
        returns = rewards.flip(0).cumsum(0).flip(0)
        return -(chosen * returns).mean()

    return training(relu_mlp(8, 16, 4), (states, actions, rewards), loss_of)


# what the loader has left over


@odd(notes="batch norm raises on the row that the loader leaves over; such a batch is left out openly")
def leftover_row_is_left_out() -> TrainLoop:
    data = points(401)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    return training(
        model,
        tuple(t[:8] for t in data),
        lambda model, b: F.cross_entropy(model(b[0]), b[1]) if len(b[0]) > 1 else None,
        batches=loader(data, 8),
    )


class ActNorm(nn.Module):
    """Shift and scale are set by the first batch."""

    def __init__(self, width):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.register_buffer("set", torch.tensor(False))

    def forward(self, x):
        if not self.set:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-6))
                self.set.fill_(True)
        return (x + self.shift) * self.scale


@odd(notes="the first batch sets shift and scale by its spread; the one row that ends an epoch comes after it")
def first_batch_sets_the_scale() -> TrainLoop:
    data = points(401)
    model = nn.Sequential(ActNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return training(
        model,
        tuple(t[:8] for t in data),
        lambda model, b: F.cross_entropy(model(b[0]), b[1]),
        batches=loader(data, 8, shuffle=True),
    )


@odd(notes="a hidden state of so many rows is carried from batch to batch; the loader drops what does not fit")
def carried_state_of_fixed_rows() -> TrainLoop:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 12, batch_first=True), nn.Linear(12, 4)
            self.register_buffer("state", torch.zeros(1, 6, 12))

        def forward(self, x):
            out, state = self.rnn(x.view(len(x), 4, 2), 0.5 * self.state)
            self.state.copy_(state.detach())
            return self.head(out[:, -1])

    data = points(400)
    return training(
        Net(),
        tuple(t[:6] for t in data),
        lambda model, b: F.cross_entropy(model(b[0]), b[1]),
        batches=loader(data, 6, shuffle=True, drop_last=True),
    )


@odd(notes="a view names the number of rows: no other batch goes through")
def rows_named_in_a_view() -> TrainLoop:
    return training(
        relu_mlp(8, 16, 4),
        images(8),
        lambda model, b: F.cross_entropy(model(b[0].view(8, 8, 8).mean(1)), b[1]),
        rate=2e-2,
    )
