"""Gradient accumulation in its right forms: by windows, tokens, rows, sums, with changing lengths."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points, tokens


def windows(batches, size):
    """Consecutive groups of ``size`` batches; the last may be shorter."""
    window = []
    for batch in batches:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def train_windows(model, optimizer, batches, accumulate):
    for window in windows(batches, accumulate):
        for x, y in window:
            (F.cross_entropy(model(x), y) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def classifier(train, **extra):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda given: train(model, optimizer, given),
        **extra,
    )


@odd(notes="windows are collected first; a shorter last window is divided by its own length")
def accumulation_last_window_by_its_length(accumulate=4) -> TrainLoop:
    return classifier(lambda *a: train_windows(*a, accumulate), batches=fresh(points))


def train_dropping(model, optimizer, batches, accumulate):
    steps = len(batches) // accumulate
    source = iter(batches)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            x, y = next(source)
            (F.cross_entropy(model(x), y) / accumulate).backward()
        optimizer.step()


@odd(notes="batches that do not fill a last window are never read (drop_last)")
def accumulation_drops_the_last_window(accumulate=3) -> TrainLoop:
    return classifier(lambda *a: train_dropping(*a, accumulate))


class Accumulator:
    """Counts on through all epochs: a window may begin in one and end in the next."""

    def __init__(self, model, optimizer, accumulate):
        self.model, self.optimizer, self.accumulate, self.count = model, optimizer, accumulate, 0

    def epoch(self, batches):
        for x, y in batches:
            (F.cross_entropy(self.model(x), y) / self.accumulate).backward()
            self.count += 1
            if self.count % self.accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()


@odd(notes="the counter runs through epochs: an epoch may end inside a window, whose gradients wait for the next epoch")
def accumulation_window_spans_epochs(accumulate=2) -> TrainLoop:
    def train(model, optimizer, batches):
        trainer = Accumulator(model, optimizer, accumulate)
        for _ in range(2):
            trainer.epoch(batches)

    return classifier(train, batches=fresh(points))


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(16, 10), relu_mlp(10, 16, 16)

    def forward(self, ids):
        return self.body(self.embed(ids))


def padded_tokens():
    ids = tokens(4, 7)
    lengths = torch.randint(3, 8, (4, 1))
    return ids.masked_fill(torch.arange(7) >= lengths, 0)


def summed_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0, reduction="sum")


def train_by_tokens(model, optimizer, batches, accumulate):
    for window in windows(batches, accumulate):
        count = sum(int((ids[:, 1:] != 0).sum()) for ids in window)
        optimizer.zero_grad()
        for ids in window:
            (summed_loss(model, ids) / count).backward()
        optimizer.step()


@odd(
    notes="the summed loss is divided by the tokens of the whole window, which takes reading it before its "
    "first forward"
)
def accumulation_by_token_count(accumulate=2) -> TrainLoop:
    model = TokenModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=padded_tokens(),
        batches=fresh(padded_tokens),
        fit=lambda batches: train_by_tokens(model, optimizer, batches, accumulate),
    )


def train_normalised_at_the_end(model, optimizer, batches, accumulate):
    count = 0
    for i, ids in enumerate(batches, 1):
        summed_loss(model, ids).backward()
        count += int((ids[:, 1:] != 0).sum())
        if i % accumulate == 0 or i == len(batches):
            for p in model.parameters():
                p.grad.div_(max(count, 1))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            count = 0


@odd(notes="backward runs on sums; the gradients are divided once, just before clipping (fairseq)")
def accumulation_sums_divided_before_step(accumulate=2) -> TrainLoop:
    model = TokenModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=padded_tokens(),
        batches=fresh(padded_tokens),
        fit=lambda batches: train_normalised_at_the_end(model, optimizer, batches, accumulate),
    )


def train_micro_batches(model, optimizer, batches, accumulate):
    for x, y in batches:
        optimizer.zero_grad()
        for a, b in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            loss = F.mse_loss(model(a), b, reduction="sum") / y.numel()
            loss.backward()
        optimizer.step()


@odd(
    notes="each batch is cut into micro-batches; sums are divided by the rows of the whole, so uneven cuts are "
    "right too"
)
def accumulation_inside_one_batch(accumulate=3) -> TrainLoop:
    model = relu_mlp(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        fit=lambda batches: train_micro_batches(model, optimizer, batches, accumulate),
    )


class Distributed(nn.Module):
    """The face of DistributedDataParallel, with a no_sync that a single process does not need."""

    def __init__(self, module):
        super().__init__()
        self.module, self.synchronise = module, True

    @contextlib.contextmanager
    def no_sync(self):
        self.synchronise = False
        yield
        self.synchronise = True

    def forward(self, x):
        return self.module(x)


def train_no_sync(model, optimizer, batches, accumulate):
    for window in windows(batches, accumulate):
        for i, (x, y) in enumerate(window):
            last = i == len(window) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                (F.cross_entropy(model(x), y) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@odd(notes="all micro-batches but the last run within a no_sync context, behind a wrapper module")
def accumulation_under_no_sync(accumulate=2) -> TrainLoop:
    model = Distributed(relu_mlp(8, 16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_no_sync(model, optimizer, batches, accumulate),
    )


def train_growing(model, optimizer, batches, grow_every=4):
    size, steps, gathered = 1, 0, 0
    for x, y in batches:
        (F.cross_entropy(model(x), y) / size).backward()
        gathered += 1
        if gathered == size:
            optimizer.step()
            optimizer.zero_grad()
            gathered, steps = 0, steps + 1
            size = min(4, 1 + steps // grow_every)


@odd(notes="the window grows during training: 1, 2, 3, 4 batches per step (batch-size warm-up)")
def accumulation_window_grows() -> TrainLoop:
    return classifier(train_growing, batches=fresh(points))


def train_joined(model, optimizer, batches, accumulate):
    for window in windows(batches, accumulate):
        loss = sum(F.cross_entropy(model(x), y) for x, y in window) / len(window)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@odd(notes="the losses of several forwards are added and backpropagated once")
def one_backward_over_several_forwards(accumulate=3) -> TrainLoop:
    return classifier(lambda *a: train_joined(*a, accumulate), batches=fresh(points))


def train_cached_contrastive(model, optimizer, batches, parts=2):
    for x in batches:
        views = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        with torch.no_grad():
            cached = [model(v) for v in views]
        cached = [c.requires_grad_(True) for c in cached]
        similarity = F.normalize(cached[0], dim=1) @ F.normalize(cached[1], dim=1).T / 0.2
        F.cross_entropy(similarity, torch.arange(len(x))).backward()
        optimizer.zero_grad()
        for view, cache in zip(views, cached, strict=True):
            for part, gradient in zip(view.chunk(parts), cache.grad.chunk(parts), strict=True):
                model(part).backward(gradient)
        optimizer.step()


@odd(notes="the loss's backward stops at cached outputs; their gradients are fed into further backwards (GradCache)")
def gradient_cache_contrastive() -> TrainLoop:
    model = relu_mlp(8, 16, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points()[0],
        batches=fresh(lambda: points()[0]),
        fit=lambda batches: train_cached_contrastive(model, optimizer, batches),
    )
