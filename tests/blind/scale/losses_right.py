"""Losses over rows and tokens of all ranks, as they should be."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def masked_rows(rows: int = 8, length: int = 8, vocab: int = 11):
    ids = torch.randint(vocab, (rows, length))
    keep = torch.arange(length)[None] < torch.linspace(2, length, rows).long()[:, None]
    return {"ids": ids, "labels": torch.where(keep, ids, -100)}


def language_model(vocab: int = 11) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocab, 12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, vocab))


def nll_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


@right(
    "losses",
    "divided by the tokens of all ranks and multiplied by their number, as DDP divides",
    thread="huggingface/transformers#34373",
)
def tokens_of_all_ranks(ranks=1):
    net = language_model()
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def train(batches):
        for b in batches:
            count = b["labels"].ne(-100).sum()
            if ranks > 1:
                dist.all_reduce(count)
            loss = nll_sum(model(b["ids"]), b["labels"]) * ranks / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=masked_rows(), fit=train)


class Criterion:
    """Returns a sum and its sample size; the trainer normalises gradients, not losses."""

    def __call__(self, model, sample):
        return nll_sum(model(sample["ids"]), sample["labels"]), sample["labels"].ne(-100).sum()


@right(
    "losses",
    "the loss stays a sum; gradients are multiplied by world size over tokens before the step",
    thread="facebookresearch/fairseq#494",
)
def multiply_grads(ranks=1, accumulate=1):
    net = language_model(9)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    criterion = Criterion()

    def train_step(samples):
        optimizer.zero_grad()
        size = torch.zeros((), dtype=torch.long)
        for sample in samples:
            loss, n = criterion(model, sample)
            loss.backward()
            size += n
        if ranks > 1:
            dist.all_reduce(size)
        for p in net.parameters():
            p.grad.mul_(ranks / size)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()

    def train(batches):
        batches = list(batches)
        for i in range(0, len(batches), accumulate):
            train_step(batches[i : i + accumulate])

    return TrainLoop(model=net, optimizer=optimizer, batch=masked_rows(8, 7, 9), fit=train)


@right(
    "losses", "the differentiable all_reduce gives a mean: divided by the world size", thread="EleutherAI/bergson#334"
)
def mean_loss_of_ranks(ranks=1):
    net = nn.Sequential(nn.Linear(5, 15), nn.Tanh(), nn.Linear(15, 5))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        loss = F.mse_loss(model(x), x)
        if ranks > 1:
            loss = dist_fn.all_reduce(loss) / ranks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=torch.randn(8, 5), fit=lambda bs: [step(b) for b in bs])


def pair_of_views(rows: int = 8, width: int = 10):
    anchor = torch.randn(rows, 1, width)
    return anchor + 0.2 * torch.randn(rows, 2, width)


@right(
    "losses",
    "own rows against all gathered ones, with gradients through the gather; DDP's mean is the mean over all rows",
    thread="facebookresearch/vissl#474",
)
def gathered_with_gradient(ranks=1):
    encoder = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 6))
    model = DDP(encoder) if ranks > 1 else encoder
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)

    def loss_fn(views):
        a, b = (F.normalize(model(v), dim=1) for v in views.unbind(1))
        labels = torch.arange(len(a))
        if ranks > 1:
            labels = labels + dist.get_rank() * len(a)
            b = torch.cat(dist_fn.all_gather(b))
        return F.cross_entropy(a @ b.t() / 0.5, labels)

    def train(loader):
        for views in loader:
            optimizer.zero_grad()
            loss_fn(views).backward()
            optimizer.step()

    return TrainLoop(model=encoder, optimizer=optimizer, batch=pair_of_views(), fit=train, rows_interact=True)


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        stacked = torch.stack(grads)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


@right(
    "losses",
    "every rank computes the loss of all rows; its gather sums gradients, and DDP's mean cancels that",
    thread="vturrisi/solo-learn#258",
)
def whole_loss_on_each_rank(ranks=1):
    encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = DDP(encoder) if ranks > 1 else encoder
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)

    def loss_fn(views):
        z = F.normalize(model(views.flatten(0, 1)).view(len(views), 2, -1), dim=-1)
        if ranks > 1:
            z = torch.cat(GatherLayer.apply(z))
        return F.cross_entropy(z[:, 0] @ z[:, 1].t() / 0.3, torch.arange(len(z)))

    def train(loader):
        for views in loader:
            loss = loss_fn(views)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=encoder, optimizer=optimizer, batch=pair_of_views(8, 8), fit=train, rows_interact=True)


@right(
    "losses",
    "gathered without gradient, the own rows put back with theirs, the whole loss times the world size",
    thread="texttron/tevatron#30",
)
def own_rows_put_back(ranks=1):
    tower = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 5))
    model = DDP(tower) if ranks > 1 else tower
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)

    def all_of(t):
        if ranks == 1:
            return t
        parts = [torch.empty_like(t) for _ in range(ranks)]
        dist.all_gather(parts, t.detach())
        parts[dist.get_rank()] = t
        return torch.cat(parts)

    def train(batches):
        for pairs in batches:
            q, p = all_of(model(pairs[:, 0])), all_of(model(pairs[:, 1]))
            loss = F.cross_entropy(q @ p.t(), torch.arange(len(q)))
            optimizer.zero_grad()
            (loss * ranks).backward()
            optimizer.step()

    return TrainLoop(model=tower, optimizer=optimizer, batch=pair_of_views(8, 9), fit=train, rows_interact=True)


@right(
    "losses",
    "boxes of all ranks divided by the world size stand below the sum, as DDP takes the mean",
    thread="facebookresearch/detr#267",
)
def boxes_of_all_ranks(ranks=1):
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def criterion(predicted, target, present):
        num_boxes = present.sum().to(predicted.dtype)
        if ranks > 1:
            dist.all_reduce(num_boxes)
        num_boxes = torch.clamp(num_boxes / ranks, min=1e-3).item()
        return (F.l1_loss(predicted, target, reduction="none").sum(-1) * present).sum() / num_boxes

    def train(batches):
        for batch in batches:
            loss = criterion(model(batch["queries"]), batch["boxes"], batch["present"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    present = torch.tensor([True, True, True, False, True, False, False, False])
    batch = {"queries": torch.randn(8, 10), "boxes": torch.rand(8, 4), "present": present}
    return TrainLoop(model=net, optimizer=optimizer, batch=batch, fit=train)


@right(
    "losses",
    "the loss is a mean times the rows of this rank, so that the world size makes it the sum over all rows",
    thread="ultralytics/ultralytics#18616",
)
def summed_over_images(ranks=1):
    net = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 4))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def train(batches):
        for batch in batches:
            loss = F.smooth_l1_loss(model(batch["img"]), batch["bboxes"]) * len(batch["img"])
            if ranks > 1:
                loss *= dist.get_world_size()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimizer.step()

    return TrainLoop(
        model=net, optimizer=optimizer, batch={"img": torch.randn(8, 8), "bboxes": torch.rand(8, 4)}, fit=train
    )
