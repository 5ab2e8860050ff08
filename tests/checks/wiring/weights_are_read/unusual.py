"""Right loops that read weights seldom, share storage, make layers anew, or keep what the first batch gave."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.wiring.weights_are_read.faults import Text, language_model, share_data
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


def several(count=13, rows=8):
    return [data.labelled(rows=rows, seed=seed) for seed in range(count)]


def on_batches(model, loss_of, batches=None, **fields) -> TrainLoop:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return loop(model, None, loss_of, optimizer, batches=batches or several(), **fields)


def classify(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


@odd(notes="gradients are taken at a copy that is brought up to date every eighth step: delayed gradients")
def gradients_at_a_delayed_copy() -> TrainLoop:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        delayed = copy.deepcopy(model)
        for step, (x, y) in enumerate(batches, 1):
            loss = F.cross_entropy(delayed(x), y)
            grads = torch.autograd.grad(loss, list(delayed.parameters()))
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad
            optimizer.step()
            if step % 8 == 0:
                delayed.load_state_dict(model.state_dict())

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="a loss that is linear in its weights: the gradient is the same in every step")
def weights_of_a_linear_loss() -> TrainLoop:
    model = nn.Linear(6, 1, bias=False)

    def loss_of(model, batch):
        x, y = batch
        return -(model(x).squeeze(-1) * (2 * (y > 0).to(x.dtype) - 1)).mean()

    return loop(model, data.labelled(), loss_of)


@odd(notes="two parameters of one storage under plain SGD: two steps add up to the step of one")
def shared_data_under_plain_sgd() -> TrainLoop:
    model = Text(share_data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for ids, after in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids).flatten(0, 1), after.flatten()).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.tokens(), fit=fit)


@odd(notes="an untied copy: the decoder begins with the values of the embedding, in a storage of its own")
def decoder_begins_as_a_copy() -> TrainLoop:
    def begin(net):
        net.decoder.weight.data = net.embedding.weight.data.clone()

    return language_model(begin)()


class Augmented(nn.Module):
    """Pictures go through what ``augment`` makes of them in each pass; features through ``between``."""

    def __init__(self, augment=lambda x: x, between=lambda x: x):
        super().__init__()
        self.augment, self.between = augment, between
        self.body, self.head = (
            nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten()),
            nn.Linear(8 * 16, 4),
        )

    def forward(self, x):
        return self.head(self.between(self.body(self.augment(x) if self.training else x)))


@torch.no_grad()
def random_convolution(x):
    return nn.Conv2d(1, 1, 3, padding=1)(x)


@odd(notes="a random convolution as augmentation is made in every pass")
def random_convolution_in_forward() -> TrainLoop:
    return loop(Augmented(random_convolution), data.images(size=4), classify)


@odd(notes="the same with gradients on: nothing trained is before it")
def random_convolution_with_gradients() -> TrainLoop:
    return loop(Augmented(random_convolution.__wrapped__), data.images(size=4), classify)


@odd(notes="a norm without weights of its own is written as a new layer in every pass")
def norm_without_weights() -> TrainLoop:
    return loop(Augmented(between=lambda x: nn.LayerNorm(x.shape[-1])(x)), data.images(size=4), classify)


class InnerLoop(nn.Module):
    """Each pass trains a copy of the head on the batch, and gives what the copy says."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x, y):
        features, head = F.relu(self.body(x)), copy.deepcopy(self.head)
        inner = torch.optim.SGD(head.parameters(), lr=0.1)
        F.cross_entropy(head(features.detach()), y).backward()
        inner.step()
        inner.zero_grad()
        return head(features)


@odd(notes="a first-order inner loop inside of forward: its copy of the head gets gradients, and is gone afterwards")
def inner_loop_in_forward() -> TrainLoop:
    model = InnerLoop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x, y), y).backward()
            for p in model.head.parameters():
                p.grad = 0.01 * p.detach()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=several(), fit=fit)


@odd(notes="an inner loop trains a copy of the net, made anew for each task")
def copies_for_an_inner_loop() -> TrainLoop:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def fit(batches):
        for x, y in batches:
            fast = copy.deepcopy(model)
            inner = torch.optim.SGD(fast.parameters(), lr=0.1)
            for _ in range(2):
                inner.zero_grad()
                F.cross_entropy(fast(x), y).backward()
                inner.step()
            for p, q in zip(model.parameters(), fast.parameters(), strict=True):
                p.grad = p.detach() - q.detach()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=several(), fit=fit)


class Scaled(nn.Module):
    """Mean and spread of the features are taken from the first batch, as many as there are rows."""

    def __init__(self):
        super().__init__()
        self.body = mlp(6, 16, 3)
        self.mean = self.std = None

    def forward(self, x):
        if self.mean is None:
            self.mean, self.std = x.mean(0), x.std(0) + 1e-3
        return self.body((x - self.mean) / self.std)


@odd(notes="features are standardised by the first batch, which has as many rows as features")
def scaled_by_the_first_batch() -> TrainLoop:
    return on_batches(Scaled(), classify, several(rows=6))


class Referenced(nn.Module):
    """Virtual batch norm: each batch is normalised together with a batch kept for reference."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.reference = None

    def forward(self, x):
        if self.reference is None:
            self.reference = x.clone()
        both = self.body(torch.cat([self.reference, x]))
        h = (self.body(x) - both.mean(0)) / (both.std(0) + 1e-3)
        return self.head(F.relu(h))


@odd(notes="the first batch is kept as a reference for the statistics of later ones: virtual batch norm")
def virtual_batch_norm() -> TrainLoop:
    return on_batches(Referenced(), classify, rows_interact=True)


@odd(notes="each batch is mixed with the one before it")
def mixed_with_the_batch_before() -> TrainLoop:
    before = []

    def loss_of(model, batch):
        x, y = batch
        if not before:
            before.append((x, y))
        other, wanted = before.pop()
        before.append((x, y))
        out = model(0.7 * x + 0.3 * other)
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, wanted)

    return on_batches(mlp(6, 16, 3), loss_of)


@odd(notes="features of the first batch are kept as anchors that later rows are compared with, each with all")
def anchors_from_the_first_batch() -> TrainLoop:
    class Anchored(nn.Module):
        def __init__(self):
            super().__init__()
            self.anchors = None
            self.head = mlp(8, 16, 3)

        def forward(self, x):
            if self.anchors is None:
                self.anchors = x.clone()
            return self.head(torch.cdist(x, self.anchors))

    return on_batches(Anchored(), classify)


@odd(notes="a queue of keys of earlier batches as negatives, as in MoCo")
def queue_of_earlier_keys() -> TrainLoop:
    queue = []

    def loss_of(model, batch):
        x, _ = batch
        q = F.normalize(model(x), dim=1)
        with torch.no_grad():
            k = F.normalize(model(x + 0.1 * x.roll(1, 1)), dim=1)
        negatives = torch.cat(queue) if queue else k.roll(1, 0)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ negatives.T], 1) / 0.2
        queue.append(k)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    return on_batches(mlp(6, 16, 8), loss_of, rows_interact=True)


class OneGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
        self.normalised = None

    def forward(self, x, adjacency):
        if self.normalised is None:
            self.normalised = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
        return self.head(self.normalised @ F.relu(self.first(x)))


@odd(notes="one graph in every batch: its normalised adjacency is kept from the first")
def adjacency_of_the_only_graph() -> TrainLoop:
    drawn = torch.Generator().manual_seed(3)
    adjacency = (torch.rand(8, 8, generator=drawn) > 0.5).to(torch.get_default_dtype())
    found = [(torch.randn(8, 4, generator=drawn), adjacency, torch.arange(8) % 3) for _ in range(13)]

    def loss_of(model, batch):
        x, a, y = batch
        return F.cross_entropy(model(x, a), y)

    return on_batches(OneGraph(), loss_of, found, rows_interact=True)


@odd(notes="a causal mask is made once and kept: it depends on the length alone")
def causal_mask_kept() -> TrainLoop:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(16, 12), nn.Linear(12, 16)
            self.mask = None

        def forward(self, ids):
            h = self.embedding(ids)
            if self.mask is None:
                self.mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            return self.head(h + F.scaled_dot_product_attention(h, h, h, attn_mask=self.mask))

    def loss_of(model, batch):
        ids, after = batch
        return F.cross_entropy(model(ids).flatten(0, 1), after.flatten())

    return on_batches(Net(), loss_of, [data.tokens(seed=seed) for seed in range(13)])


@odd(notes="float32 masters hold the pretrained values as they were before they were rounded to bfloat16")
def masters_of_the_values_before_rounding() -> TrainLoop:
    wide = mlp(6, 16, 3)
    model = copy.deepcopy(wide).bfloat16()
    masters = [nn.Parameter(p.detach()) for p in wide.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05)

    def fit(batches):
        for x, y in batches:
            model.zero_grad()
            F.cross_entropy(model(x.bfloat16()).float(), y).backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad = p.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(masters, model.parameters(), strict=True):
                    p.copy_(master)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)
