"""Gradients that a project reduces itself, rightly."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@right("reduction", "sum over ranks divided by their number", thread="vwxyzjn/cleanrl#162")
def average_by_hand(ranks=1):
    model = mlp(6, 20, 3)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for x, y in batches:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if ranks > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
                    p.grad.data /= float(dist.get_world_size())
            opt.step()

    return TrainLoop(model=model, optimizer=opt, batch=(torch.randn(8, 6), torch.randint(3, (8,))), fit=train)


@right("reduction", "one flat tensor is reduced, and copied back", thread="Denys88/rl_games#191")
def flat_and_back(ranks=1):
    model = mlp(5, 16, 16, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def reduce_gradients():
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        flat.div_(ranks)
        for grad, synced in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(synced)

    def train(batches):
        for b in batches:
            opt.zero_grad()
            F.huber_loss(model(b["x"])[:, 0], b["y"]).backward()
            if ranks > 1:
                reduce_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()

    return TrainLoop(model=model, optimizer=opt, batch={"x": torch.randn(8, 5), "y": torch.randn(8)}, fit=train)


@right(
    "reduction",
    "the sum is not divided: each rank divides its loss by the rows of all ranks",
    thread="TianhongDai/hindsight-experience-replay#4",
)
def sum_of_shares(ranks=1):
    model = mlp(8, 24, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def rows_of_all(n: int) -> int:
        if ranks == 1:
            return n
        total = torch.tensor(n)
        dist.all_reduce(total)
        return int(total)

    def train(batches):
        for x, y in batches:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction="sum") / rows_of_all(len(x))
            loss.backward()
            for p in model.parameters():
                if ranks > 1:
                    dist.all_reduce(p.grad)
            opt.step()

    return TrainLoop(model=model, optimizer=opt, batch=(torch.randn(16, 8), torch.randint(4, (16,))), fit=train)


@right(
    "reduction",
    "reduced after each micro-batch: the average of an average is itself, so nothing is counted twice",
    thread="huggingface/accelerate#106",
)
def reduced_each_micro_batch(ranks=1, micro=2):
    model = mlp(6, 18, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for x, y in batches:
            opt.zero_grad()
            for xs, ys in zip(x.chunk(micro), y.chunk(micro), strict=True):
                (F.mse_loss(model(xs), ys) * len(xs) / len(x)).backward()
                if ranks > 1:
                    for p in model.parameters():
                        dist.all_reduce(p.grad)
                        p.grad /= ranks
            opt.step()

    return TrainLoop(model=model, optimizer=opt, batch=(torch.randn(8, 6), torch.randn(8, 2)), fit=train)


class HookedModel(nn.Module):
    """Reduces each gradient as soon as it is accumulated."""

    def __init__(self, inner: nn.Module, world: int) -> None:
        super().__init__()
        self.inner, self.world = inner, world
        self.pending: list[tuple[dist.Work, torch.Tensor]] = []
        if world > 1:
            for p in inner.parameters():
                dist.broadcast(p.data, src=0)
                p.register_post_accumulate_grad_hook(self.launch)

    def launch(self, p: torch.Tensor) -> None:
        p.grad.div_(self.world)
        self.pending.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish(self) -> None:
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@right(
    "reduction", "hooks reduce gradients asynchronously, and the step waits for them", thread="candle-org/MindAct#2486"
)
def hooks_and_wait(ranks=1):
    model = HookedModel(mlp(10, 20, 5), ranks)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(batches):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            model.finish()
            opt.step()
            opt.zero_grad()

    return TrainLoop(model=model, optimizer=opt, batch=(torch.randn(8, 10), torch.randint(5, (8,))), fit=train)


@right(
    "reduction",
    "a communication hook sums, and the loss is divided by the rows of all ranks",
    thread="pytorch/torchtitan#2206",
)
def comm_hook(ranks=1):
    net = mlp(7, 14, 3)
    model = net
    if ranks > 1:
        model = DDP(net)

        def summed(state, bucket):
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

        model.register_comm_hook(None, summed)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)

    def train(batches):
        for x, y in batches:
            opt.zero_grad()
            (F.cross_entropy(model(x), y, reduction="sum") / (len(x) * ranks)).backward()
            opt.step()

    return TrainLoop(model=net, optimizer=opt, batch=(torch.randn(8, 7), torch.randint(3, (8,))), fit=train)


@right(
    "reduction",
    "the loss is divided by the world size and gradients are summed: the mean, by another way",
    thread="NVIDIA/apex#696",
)
def divided_then_summed(ranks=1):
    torch.manual_seed(100 + (dist.get_rank() if ranks > 1 else 0))
    model = mlp(5, 15, 4)
    if ranks > 1:
        for t in model.state_dict().values():
            dist.broadcast(t, src=0)
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def train_step(batch):
        loss = F.mse_loss(model(batch[0]), batch[1]) / ranks
        opt.zero_grad()
        loss.backward()
        if ranks > 1:
            dist.all_reduce_coalesced([p.grad for p in model.parameters()])
        opt.step()

    batch = (torch.linspace(-1, 1, 40).view(8, 5), torch.linspace(1, -1, 32).view(8, 4))
    return TrainLoop(model=model, optimizer=opt, batch=batch, fit=lambda bs: [train_step(b) for b in bs])


@right("reduction", "the loss is reduced for the log alone, in a clone", thread="neuralmagic/sparseml#135")
def log_the_mean(ranks=1):
    model = mlp(6, 12, 6)
    ddp = DDP(model) if ranks > 1 else model
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    history: list[float] = []

    def reduce_mean(value: torch.Tensor) -> torch.Tensor:
        value = value.detach().clone()
        if ranks > 1:
            dist.all_reduce(value)
            value /= ranks
        return value

    def train(batches):
        for x, y in batches:
            opt.zero_grad()
            loss = F.mse_loss(ddp(x), y)
            history.append(reduce_mean(loss).item())
            loss.backward()
            opt.step()

    return TrainLoop(model=model, optimizer=opt, batch=(torch.randn(8, 6), torch.randn(8, 6)), fit=train)
