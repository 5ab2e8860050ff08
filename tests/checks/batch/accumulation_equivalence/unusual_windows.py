"""Accumulation by a knob, in the right forms that are not ``loss / k``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.checks.batch.accumulation_equivalence.unusual_accumulation import windows
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, images, points, tokens


def loop(model, optimizer, batch, fit, **extra):
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **extra)


@odd(notes="the loss is not divided: the rate is (a window of k is k times the sum, and SGD takes lr / k)")
def windows_rate_divided_in_place_of_loss(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / accumulate)

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for x, y in window:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return loop(model, optimizer, points(12), fit)


@odd(notes="the summed loss is never divided, with or without accumulation: the sum over a window is the sum")
def windows_of_sums(accumulate=1):
    model = relu_mlp(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for x, y in window:
                F.mse_loss(model(x), y, reduction="sum").backward()
            optimizer.step()

    return loop(model, optimizer, curves(12), fit)


@odd(notes="gradients, not losses, are divided: after the last backward, before the clip")
def windows_gradients_averaged(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def fit(batches):
        for window in windows(batches, accumulate):
            for x, y in window:
                F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                p.grad.div_(len(window))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return loop(model, optimizer, points(12), fit)


@odd(notes="a hook on every parameter divides its gradient as it arrives; the loss is left whole")
def windows_divided_by_hooks(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient / accumulate)

    def fit(batches):
        whole = len(batches) // accumulate * accumulate
        for i, (x, y) in enumerate(batches, start=1):
            if i > whole:
                break
            F.cross_entropy(model(x), y).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return loop(model, optimizer, points(12), fit)


@odd(notes="backward takes 1 / k as its gradient: loss.backward(torch.tensor(1 / k))")
def windows_scaled_through_backward(accumulate=1):
    model = relu_mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for x, y in window:
                F.mse_loss(model(x), y).backward(torch.tensor(1.0 / len(window)))
            optimizer.step()

    return loop(model, optimizer, curves(12), fit)


@odd(notes="gradients come from autograd.grad and are added up in buffers of the trainer's own")
def windows_in_own_buffers(accumulate=1):
    model = relu_mlp(8, 16, 4)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=3e-3)

    def fit(batches):
        for window in windows(batches, accumulate):
            sums = [torch.zeros_like(p) for p in parameters]
            for x, y in window:
                found = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
                for total, gradient in zip(sums, found, strict=True):
                    total.add_(gradient, alpha=1 / len(window))
            for p, total in zip(parameters, sums, strict=True):
                p.grad = total
            optimizer.step()

    return loop(model, optimizer, points(12), fit)


@odd(notes="LBFGS: the closure goes through the whole window each time it is called")
def windows_under_lbfgs(accumulate=1):
    model = relu_mlp(8, 8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

    def fit(batches):
        for window in windows(batches, accumulate):

            def closure(window=window):
                optimizer.zero_grad()
                total = 0.0
                for x, y in window:
                    loss = F.mse_loss(model(x), y) / len(window)
                    loss.backward()
                    total += loss.item()
                return total

            optimizer.step(closure)

    return loop(model, optimizer, curves(12), fit)


@odd(notes="SAM over a window: up the mean gradient of all micro-batches, and down the gradient found there")
def windows_under_sam(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def gather(window):
        optimizer.zero_grad()
        for x, y in window:
            (F.cross_entropy(model(x), y) / len(window)).backward()

    def fit(batches):
        for window in windows(batches, accumulate):
            gather(window)
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            with torch.no_grad():
                up = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
                for p, e in zip(model.parameters(), up, strict=True):
                    p.add_(e)
            gather(window)
            with torch.no_grad():
                for p, e in zip(model.parameters(), up, strict=True):
                    p.sub_(e)
            optimizer.step()

    return loop(model, optimizer, points(12), fit)


@odd(notes="two optimizers share a window; the slow one steps every second window only")
def windows_at_two_speeds(accumulate=1):
    model = nn.ModuleDict({"body": relu_mlp(8, 16, 16), "head": nn.Linear(16, 4)})
    fast = torch.optim.Adam(model["head"].parameters(), lr=3e-3)
    slow = torch.optim.Adam(model["body"].parameters(), lr=1e-3)

    def fit(batches):
        for turn, window in enumerate(windows(batches, accumulate), start=1):
            for x, y in window:
                (F.cross_entropy(model["head"](model["body"](x).relu()), y) / len(window)).backward()
            fast.step()
            fast.zero_grad()
            if turn % 2 == 0:
                for p in model["body"].parameters():
                    p.grad.mul_(0.5)
                slow.step()
                slow.zero_grad()

    return loop(model, [fast, slow], points(12), fit)


@odd(notes="a GAN: the discriminator sees k micro-batches a step, and so does the generator after it")
def windows_of_a_gan(accumulate=1):
    generator, discriminator = relu_mlp(4, 16, 8), relu_mlp(8, 16, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def fit(batches):
        for window in windows(batches, accumulate):
            opt_d.zero_grad()
            for real in window:
                fake = generator(torch.randn(len(real), 4)).detach()
                loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
                (loss / len(window)).backward()
            opt_d.step()
            opt_g.zero_grad()
            for real in window:
                fake = generator(torch.randn(len(real), 4))
                (F.softplus(-discriminator(fake)).mean() / len(window)).backward()
            opt_g.step()

    return loop([generator, discriminator], [opt_g, opt_d], points(12)[0], fit)


@odd(notes="a contrastive loss within each micro-batch: examples meet, so that windows are not meant to be equal")
def windows_of_a_contrastive_loss(accumulate=1):
    model = relu_mlp(8, 16, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for x, y in window:
                z = F.normalize(model(x), dim=1)
                scores = z @ (z + 0.1 * torch.roll(z, 1, 0)).T / 0.3
                (F.cross_entropy(scores, y % len(x)) / len(window)).backward()
            optimizer.step()

    return loop(model, optimizer, points(12), fit)


@odd(notes="batch norm: statistics of a micro-batch are not those of the batch; the gradients are right all the same")
def windows_with_batch_norm(accumulate=1):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad(set_to_none=False)
            for x, y in window:
                (F.cross_entropy(model(x), y) / len(window)).backward()
            optimizer.step()

    return loop(model, optimizer, images(12), fit)


@odd(notes="an average of the weights is taken once a step, dropout differs in every micro-batch, warm-up is from 0")
def windows_with_average_dropout_and_warmup(accumulate=1):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))

    def fit(batches):
        for window in windows(batches, accumulate):
            for x, y in window:
                (F.cross_entropy(model(x), y) / len(window)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update_parameters(model)

    return loop(model, optimizer, points(12), fit, scheduler=scheduler)


@odd(notes="classes are weighted: a micro-batch's mean divides by its own weights, which is what the project means")
def windows_with_class_weights(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    weights = torch.tensor([1.0, 1.0, 2.0, 4.0])

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for x, y in window:
                (F.cross_entropy(model(x), y, weight=weights.to(x.dtype)) / len(window)).backward()
            optimizer.step()

    return loop(model, optimizer, points(12), fit)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 12), relu_mlp(12, 16, 16)

    def forward(self, ids):
        return self.head(self.embed(ids))


def ragged(rows=8, length=9):
    ids = tokens(rows, length)
    return ids.masked_fill(torch.arange(length) >= torch.randint(3, length + 1, (rows, 1)), 0)


@odd(notes="per-sequence means, averaged over sequences: each row weighs the same whatever its length")
def windows_of_sequence_means(accumulate=1):
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss_of(ids):
        losses = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], ignore_index=0, reduction="none")
        counted = (ids[:, 1:] != 0).to(losses.dtype)
        return ((losses * counted).sum(1) / counted.sum(1)).mean()

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for ids in window:
                (loss_of(ids) / len(window)).backward()
            optimizer.step()

    return loop(model, optimizer, ragged(), fit, padding=Padding(pad_id=0))


@odd(notes="sums over tokens divided by a constant (the longest a batch can be), not by the tokens at hand")
def windows_by_a_constant_number_of_tokens(accumulate=1):
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for ids in window:
                logits = model(ids[:, :-1]).flatten(0, 1)
                summed = F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=0, reduction="sum")
                (summed / (len(ids) * 8 * len(window))).backward()
            optimizer.step()

    return loop(model, optimizer, ragged(), fit)


@odd(notes="the batch is cut by an index array that a fixed seed shuffles; weights of the parts are their rows")
def windows_of_shuffled_rows(accumulate=1):
    model = relu_mlp(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
            optimizer.zero_grad()
            for rows in order.chunk(accumulate):
                (F.mse_loss(model(x[rows]), y[rows]) * len(rows) / len(x)).backward()
            optimizer.step()

    return loop(model, optimizer, curves(12), fit)


@odd(notes="a bonus for the entropy and a weight penalty, both divided with the loss; the loss may be negative")
def windows_with_penalties(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for x, y in window:
                logits = model(x)
                entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
                penalty = sum(p.square().sum() for p in model.parameters())
                loss = F.cross_entropy(logits, y) - 2.0 * entropy + 1e-3 * penalty
                (loss / len(window)).backward()
            optimizer.step()

    return loop(model, optimizer, points(12), fit)


@odd(notes="the penalty's gradient is added once for each window, just before the step")
def windows_with_penalty_once(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for x, y in window:
                (F.cross_entropy(model(x), y) / len(window)).backward()
            (1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
            optimizer.step()

    return loop(model, optimizer, points(12), fit)


@odd(notes="noise on the inputs is drawn for every micro-batch: no two ways of cutting can agree")
def windows_with_noise(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for x, y in window:
                (F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y) / len(window)).backward()
            optimizer.step()

    return loop(model, optimizer, points(12), fit)


@odd(notes="under a GradScaler: one scale for a window, unscaled once, clipped, stepped and updated once")
def windows_under_a_scaler(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def fit(batches):
        for window in windows(batches, accumulate):
            for x, y in window:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x).float(), y) / len(window)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return loop(model, optimizer, points(12), fit, scaler=scaler)
