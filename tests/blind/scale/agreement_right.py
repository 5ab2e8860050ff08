"""Buffers, averages, rates and decisions on which the ranks agree."""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def small(inp: int, out: int, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inp, width), nn.Tanh(), nn.Linear(width, out))


def reduced(t: torch.Tensor, ranks: int) -> torch.Tensor:
    if ranks > 1:
        dist.all_reduce(t)
    return t


class GlobalNorm(nn.Module):
    def __init__(self, dim: int, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.register_buffer("sums", torch.zeros(dim))
        self.register_buffer("squares", torch.ones(dim))
        self.register_buffer("count", torch.ones(()))

    @torch.no_grad()
    def update(self, x: torch.Tensor) -> None:
        packed = torch.cat([x.sum(0), x.square().sum(0), torch.tensor([float(len(x))])])
        reduced(packed, self.ranks)
        d = len(self.sums)
        self.sums += packed[:d]
        self.squares += packed[d : 2 * d]
        self.count += packed[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.sums / self.count
        return (x - mean) / (self.squares / self.count - mean**2).clamp_min(1e-4).sqrt()


@right("agreement", "statistics of observations are summed over the ranks", thread="leggedrobotics/rsl_rl#226")
def shared_statistics(ranks=1):
    norm, net = GlobalNorm(5, ranks), small(5, 2)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def train(batches):
        for obs, target in batches:
            norm.update(obs)
            optimizer.zero_grad()
            F.mse_loss(model(norm(obs)), target).backward()
            optimizer.step()

    batch = (torch.randn(16, 5) * 2 + 1, torch.randn(16, 2))
    return TrainLoop(model={"net": net, "norm": norm}, optimizer=optimizer, batch=batch, fit=train)


@right(
    "agreement",
    "every rank averages the same weights by itself: the averages stay alike without a word",
    thread="facebookresearch/unbiased-teacher#31",
)
def average_on_each_rank(ranks=1):
    net = small(6, 6)
    shadow = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def train(batches):
        for x in batches:
            with torch.no_grad():
                goal = shadow(x)
            optimizer.zero_grad()
            (F.mse_loss(model(x), x) + 0.5 * F.mse_loss(model(x + 0.1), goal)).backward()
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(list(shadow.parameters()), list(net.parameters()), 0.1)

    return TrainLoop(
        model={"net": net, "shadow": shadow},
        optimizer=optimizer,
        batch=torch.randn(8, 6),
        fit=train,
        frozen=("shadow.",),
    )


@right("agreement", "rank 0 alone keeps the average, which no rank trains with", thread="lucidrains/ema-pytorch#9")
def average_for_sampling(ranks=1):
    main = not (ranks > 1 and dist.get_rank())
    net = small(4, 4)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    average = [p.detach().clone() for p in net.parameters()] if main else None

    def train(batches):
        for x in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), x.flip(1)).backward()
            optimizer.step()
            if main:
                for a, p in zip(average, net.parameters(), strict=True):
                    a.mul_(0.99).add_(p.detach(), alpha=0.01)

    return TrainLoop(model=net, optimizer=optimizer, batch=torch.randn(8, 4), fit=train)


@right("agreement", "the teacher's centre is reduced before it moves", thread="facebookresearch/dino#102")
def centre_of_all(ranks=1):
    student = small(8, 10, 20)
    teacher = copy.deepcopy(student).requires_grad_(False)
    center = torch.zeros(1, 10)
    model = DDP(student) if ranks > 1 else student
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def train(batches):
        for crops in batches:
            logits = teacher(crops[:, 0])
            target = F.softmax((logits - center) / 0.1, -1)
            loss = -(target * F.log_softmax(model(crops[:, 1]) / 0.1, -1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                batch_center = reduced(logits.sum(0, keepdim=True), ranks) / (len(logits) * ranks)
                center.lerp_(batch_center.to(center.dtype), 0.1)
                for s, t in zip(student.parameters(), teacher.parameters(), strict=True):
                    t.lerp_(s, 0.05)

    return TrainLoop(
        model={"student": student, "teacher": teacher},
        optimizer=optimizer,
        batch=torch.randn(8, 2, 8) * 2,
        fit=train,
        frozen=("teacher.",),
        rows_interact=True,
    )


class Queue(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.q, self.k = small(7, 5), small(7, 5).requires_grad_(False)
        self.k.load_state_dict(self.q.state_dict())
        self.register_buffer("bank", F.normalize(torch.randn(24, 5), dim=1))

    def forward(self, views: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.q(views[:, 0]), dim=1)
        with torch.no_grad():
            k = F.normalize(self.k(views[:, 1]), dim=1)
            logits_bank = self.bank.clone()
            if self.ranks > 1:
                parts = [torch.empty_like(k) for _ in range(self.ranks)]
                dist.all_gather(parts, k)
                new = torch.cat(parts)
            else:
                new = k
            self.bank.copy_(torch.cat([new, self.bank])[: len(self.bank)])
        return torch.cat([(q * k).sum(1, keepdim=True), q @ logits_bank.t()], 1) / 0.3


@right(
    "agreement",
    "the queue takes the keys of all ranks in rank order, on every rank alike",
    thread="Haochen-Wang409/U2PL#138",
)
def gathered_queue(ranks=1):
    net = Queue(ranks)
    model = DDP(net, broadcast_buffers=False) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.q.parameters(), lr=0.1)

    def train(loader):
        for views in loader:
            logits = model(views)
            optimizer.zero_grad()
            F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)).backward()
            optimizer.step()

    return TrainLoop(
        model=net, optimizer=optimizer, batch=torch.randn(8, 2, 7), fit=train, frozen=("k.",), rows_interact=True
    )


@right("agreement", "warm-up and decay stepped on all ranks, logged on one", thread="huggingface/diffusers#8312")
def scheduler_everywhere(ranks=1, warmup=2, total=10):
    main = not (ranks > 1 and dist.get_rank())
    net = small(6, 3)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: (s + 1) / warmup if s < warmup else 0.5 * (1 + math.cos(math.pi * (s - warmup) / total))
    )
    lines = []

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if main:
                lines.append(f"{loss.item():.3f} {scheduler.get_last_lr()[0]:.2e}")

    return TrainLoop(
        model=net,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=(torch.randn(8, 6), torch.randint(3, (8,))),
        fit=train,
    )


@right("agreement", "the plateau scheduler is given the mean over ranks", thread="horovod/horovod#42")
def plateau_on_mean(ranks=1):
    rank = dist.get_rank() if ranks > 1 else 0
    net = nn.Linear(4, 1)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    x = torch.linspace(-1, 1, 32).view(8, 4)
    y = x.sum(1, keepdim=True) * torch.tensor([1.0, -2.0] * 4)[:, None]

    def validate() -> float:
        with torch.no_grad():
            total = F.mse_loss(net(x[rank::ranks]), y[rank::ranks], reduction="sum")
        return (reduced(total, ranks) / len(x)).item()

    def train(batches):
        for a, b in batches:
            optimizer.zero_grad()
            F.mse_loss(model(a), b).backward()
            optimizer.step()
            scheduler.step(validate())

    a = torch.randn(8, 4)
    return TrainLoop(model=net, optimizer=optimizer, scheduler=scheduler, batch=(a, a.sum(1, keepdim=True)), fit=train)


@right(
    "agreement",
    "all ranks skip where one has no target: the flag is reduced first",
    thread="ecmwf/WeatherGenerator#2718",
)
def skip_together(ranks=1, limit=1e4):
    net = small(6, 2)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def train(batches):
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            bad = reduced((~torch.isfinite(loss) | (loss > limit)).detach().to(torch.int32), ranks)
            optimizer.zero_grad()
            loss.backward()
            if bad > 0:
                continue
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randn(8, 2)), fit=train)


@right(
    "agreement",
    "a rank without positives trains with a zero loss, so that it takes part in the reduction",
    thread="pytorch/audio#3749",
)
def zero_loss_takes_part(ranks=1):
    net = small(9, 4)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)

    def train(batches):
        for x, labels in batches:
            logits = model(x)
            keep = labels >= 0
            if keep.any():
                loss = F.cross_entropy(logits[keep], labels[keep], reduction="sum") / len(labels)
            else:
                loss = logits.sum() * 0.0
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    labels = torch.full((8,), -1)
    labels[0] = 1
    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 9), labels), fit=train)


@right("agreement", "rank 0 decides to stop and tells the others", thread="ultralytics/yolov5#8345")
def stop_is_broadcast(ranks=1):
    main = not (ranks > 1 and dist.get_rank())
    net = small(5, 5)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    held_out = torch.linspace(-1, 1, 20).view(4, 5)

    def train(batches):
        for x in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            optimizer.step()
            stop = [False]
            if main:
                with torch.no_grad():
                    stop = [F.mse_loss(net(held_out), held_out).item() < 1e-6]
            if ranks > 1:
                dist.broadcast_object_list(stop, 0)
            if stop[0]:
                break

    return TrainLoop(model=net, optimizer=optimizer, batch=torch.randn(8, 5), fit=train)


@right(
    "agreement",
    "rank 0 validates with the bare module while the others wait at the barrier that all reach",
    thread="jpata/particleflow#233",
)
def validate_bare_module(ranks=1):
    main = not (ranks > 1 and dist.get_rank())
    net = small(6, 2)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    held_out = torch.randn(8, 6)

    def train(batches):
        for step, (x, y) in enumerate(batches):
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step % 2 == 0:
                if main:
                    net.eval()
                    with torch.no_grad():
                        net(held_out).argmax(1).sum().item()
                    net.train()
                if ranks > 1:
                    dist.barrier()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randint(2, (8,))), fit=train)


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(3))
        self.out = nn.Linear(12, 3)
        self.coin = torch.Generator().manual_seed(11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        for block in self.blocks:
            if torch.rand((), generator=self.coin) < 0.7:
                h = h + block(h)
        return self.out(h)


@right(
    "agreement",
    "layers are dropped by a generator with one seed on all ranks, and unused ones are looked for",
    thread="huggingface/accelerate#1191",
)
def dropped_together(ranks=1):
    net = StochasticDepth()
    model = DDP(net, find_unused_parameters=True) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randint(3, (8,))), fit=train)
