"""Infinities and NaN that are meant, or that the loop deals with openly."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def plain(model, optimizer, loss_of):
    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()

    return fit


@odd(notes="a batch whose loss is not finite is skipped openly, before backward")
def notfinite_batch_skipped():
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for i, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x) / (0.0 if i % 3 == 0 else 1.0), y)
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="weights that are no longer finite are put back to the last good ones")
def notfinite_weights_put_back():
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        good = copy.deepcopy(model.state_dict())
        for i, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x) / (0.0 if i % 3 == 1 else 1.0), y).backward()
            optimizer.step()
            if all(bool(p.isfinite().all()) for p in model.parameters()):
                good = copy.deepcopy(model.state_dict())
            else:
                model.load_state_dict(good)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


class Causal(nn.Module):
    """Attention to earlier positions only; the first has none, and its NaN is made zero."""

    def __init__(self):
        super().__init__()
        self.queries, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        q = self.queries(x)
        later = torch.ones(x.shape[1], x.shape[1]).triu().bool()
        weights = (q @ q.transpose(1, 2)).masked_fill(later, float("-inf")).softmax(-1)
        return self.out(torch.nan_to_num(weights) @ q)


@odd(notes="scores are masked by -inf, a row without any is NaN after softmax and made zero: its slope is masked too")
def notfinite_rows_of_attention():
    model = Causal()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.randn(6, 5, 4)
    return TrainLoop(
        model=model, optimizer=optimizer, batch=x, fit=plain(model, optimizer, lambda b: model(b).square().mean())
    )


@odd(notes="unknown targets are NaN, and chosen away before the difference is taken")
def notfinite_unknown_targets():
    model = relu_mlp(8, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    y = torch.randn(12, 2).masked_fill(torch.arange(24).reshape(12, 2) % 5 == 0, float("nan"))

    def loss_of(batch):
        x, targets = batch
        known = ~targets.isnan()
        return (model(x)[known] - targets[known]).square().mean()

    return TrainLoop(
        model=model, optimizer=optimizer, batch=(torch.randn(12, 8), y), fit=plain(model, optimizer, loss_of)
    )


@odd(notes="the perplexity that is logged overflows, and is capped for the log")
def notfinite_perplexity_in_the_log():
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y, reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.exp(loss).clamp(max=1e6).item()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(96), fit=fit)


@odd(notes="the log of a mask of zeros and ones is added to the scores: -inf where nothing may be chosen")
def notfinite_log_of_a_mask():
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    allowed = torch.tensor([1.0, 1.0, 1.0, 0.0])

    def loss_of(batch):
        x, y = batch
        return F.cross_entropy(model(x) + allowed.log(), y % 3)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=plain(model, optimizer, loss_of))


@odd(notes="parameters are made without values, and set by the loop before anything uses them")
def notfinite_until_initialised():
    model = relu_mlp(8, 16, 4)
    for p in model.parameters():
        nn.init.constant_(p, float("nan"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        plain(model, optimizer, lambda b: F.cross_entropy(model(b[0]), b[1]))(batches)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="a mask of -inf is a parameter that does not train")
def notfinite_mask_as_a_parameter():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = relu_mlp(8, 16, 4)
            self.mask = nn.Parameter(torch.tensor([0.0, 0.0, 0.0, float("-inf")]), requires_grad=False)

        def forward(self, x):
            return self.body(x) + self.mask

    model = Masked()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.05)
    x, y = points(12)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(x, y % 3),
        fit=plain(model, optimizer, lambda b: F.cross_entropy(model(b[0]), b[1])),
    )


@odd(notes="the first losses under a loss scaler overflow in float16, and their steps are skipped until the scale fits")
def notfinite_while_the_scale_is_found():
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            scaler.scale(4 * F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="a weight decays so fast in the first steps that gradients grow and fall again: nothing overflows")
def notfinite_nothing_overflows():
    model = relu_mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = fresh(lambda: (10 * torch.randn(12, 8), 30 * torch.randn(12, 1)))

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@odd(notes="a forward algorithm in logarithms begins at -inf for all states but one, number by number")
def notfinite_forward_algorithm_by_hand():
    model = relu_mlp(8, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x in batches:
            scores = model(x).log_softmax(1)
            state = [torch.zeros(()), torch.tensor(float("-inf"))]
            for row in scores:
                state = [state[0] + row[0], torch.logaddexp(state[0], state[1]) + row[1]]
            loss = -torch.logaddexp(*state)
            assert torch.isfinite(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(6, 8), fit=fit, rows_interact=True)
