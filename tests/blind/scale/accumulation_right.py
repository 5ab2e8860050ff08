"""Micro-batches whose gradients are reduced in time."""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


@right("accumulation", "all micro-batches but the last run in no_sync", thread="karpathy/nanochat#33")
def no_sync_but_last(ranks=1, accumulate=1):
    net = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def train(batches):
        micro = [(i, *b) for i, b in enumerate(batches)]
        for i, x, y in micro:
            boundary = (i + 1) % accumulate == 0 or i + 1 == len(micro)
            with nullcontext() if boundary or ranks == 1 else model.no_sync():
                (F.cross_entropy(model(x), y) / accumulate).backward()
            if boundary:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 8), torch.randint(4, (8,))), fit=train)


@right("accumulation", "require_backward_grad_sync is set before the forward pass", thread="karpathy/build-nanogpt#30")
def flag_before_forward(ranks=1, steps=2):
    net = nn.Sequential(nn.Embedding(12, 10), nn.Linear(10, 12))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def train(batches):
        for tokens in batches:
            optimizer.zero_grad(set_to_none=True)
            for k, part in enumerate(tokens.chunk(steps)):
                if ranks > 1:
                    model.require_backward_grad_sync = k == steps - 1
                logits = model(part[:, :-1])
                (F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / steps).backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=torch.randint(12, (8, 7)), fit=train)


@right("accumulation", "every micro-batch is reduced: slower, and the same", thread="huggingface/accelerate#106")
def always_synced(ranks=1, accumulate=1):
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    model = DDP(net, static_graph=False, bucket_cap_mb=1) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def train(loader):
        for step, (x,) in enumerate(loader, 1):
            loss = F.mse_loss(model(x), x) / accumulate
            loss.backward()
            if step % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 6),), fit=train)


class Pair:
    """Two wrapped modules, both held back until the last piece."""

    def __init__(self, ranks: int) -> None:
        self.encoder, self.decoder = nn.Linear(10, 16), nn.Linear(16, 10)
        self.wrapped = [DDP(m) if ranks > 1 else m for m in (self.encoder, self.decoder)]
        self.optimizer = torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=1e-3)

    def hold(self, use: bool) -> ExitStack:
        stack = ExitStack()
        for module in self.wrapped:
            if use and isinstance(module, DDP):
                stack.enter_context(module.no_sync())
        return stack

    def fit_batch(self, x: torch.Tensor) -> None:
        parts = x.chunk(2)
        for part in parts:
            with self.hold(part is not parts[-1]):
                out = self.wrapped[1](torch.relu(self.wrapped[0](part)))
                ((out - part).square().sum() / x.numel()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@right("accumulation", "both wrapped modules leave no_sync for the last piece", thread="speechbrain/speechbrain#2010")
def two_modules_held(ranks=1):
    pair = Pair(ranks)
    return TrainLoop(
        model={"encoder": pair.encoder, "decoder": pair.decoder},
        optimizer=pair.optimizer,
        batch=torch.randn(8, 10),
        fit=lambda batches: [pair.fit_batch(b) for b in batches],
    )


@right(
    "accumulation",
    "the same micro-batches in all, so that each rank makes fewer; the loss is divided by its own number",
    thread="karpathy/nanoGPT#354",
)
def micro_batches_shared_out(ranks=1, gradient_accumulation_steps=4):
    ddp = int(os.environ.get("WORLD_SIZE", "1")) > 1 and ranks > 1
    if ddp and not dist.is_initialized():
        dist.init_process_group("gloo")
    seed_offset = int(os.environ["RANK"]) if ddp else 0
    torch.manual_seed(1337 + seed_offset)
    if ddp:
        gradient_accumulation_steps //= dist.get_world_size()
    raw_model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))
    model = DDP(raw_model) if ddp else raw_model
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=6e-4, betas=(0.9, 0.95))

    def train(batches):
        for tokens in batches:
            for micro_step, part in enumerate(tokens.chunk(gradient_accumulation_steps)):
                if ddp:
                    model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
                logits = model(part[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / gradient_accumulation_steps
                loss.backward()
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    tokens = torch.arange(8 * 6).mul(7).remainder(11).view(8, 6)
    return TrainLoop(model=raw_model, optimizer=optimizer, batch=tokens, fit=train)
