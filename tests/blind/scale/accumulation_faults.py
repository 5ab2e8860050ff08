"""Micro-batches, and when their gradients are reduced."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def pieces(batch, k):
    return list(zip(*(t.chunk(k) for t in batch), strict=True))


class Trainer:
    def __init__(self, model, optimizer, accum_grad: int) -> None:
        self.model, self.optimizer, self.accum_grad = model, optimizer, accum_grad
        self.use_ddp = isinstance(model, DDP)

    def train_epoch(self, batches) -> None:
        self.model.train()
        for batch in batches:
            for batch_idx, (speech, text) in enumerate(pieces(batch, self.accum_grad)):
                my_context = nullcontext
                if self.use_ddp:
                    my_context = self.model.no_sync if batch_idx % self.accum_grad != 0 else my_context
                with my_context():
                    loss = F.cross_entropy(self.model(speech), text) / self.accum_grad
                    loss.backward()
                if (batch_idx + 1) % self.accum_grad == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()


@fault(
    "accumulation",
    "the first micro-batch is reduced and the last one is not",
    thread="modelscope/FunASR#3472",
    check="distributed_equivalence",
    place="batch_idx % self.accum_grad != 0",
)
def speech_trainer(ranks=1):
    model = nn.Sequential(nn.Linear(11, 22), nn.ReLU(), nn.Linear(22, 6))
    if ranks > 1:
        model = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = Trainer(model, optimizer, accum_grad=2)
    return TrainLoop(
        model=model, optimizer=optimizer, batch=(torch.randn(16, 11), torch.randint(6, (16,))), fit=trainer.train_epoch
    )


@fault(
    "accumulation",
    "require_backward_grad_sync is set between forward and backward; the forward pass has decided already",
    thread="karpathy/build-nanogpt#30",
    check="distributed_equivalence",
    place="model.require_backward_grad_sync =",
)
def gpt_like(ranks=1, grad_accum_steps=2):
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(16, 12)
            self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
            self.lm_head = nn.Linear(12, 16, bias=False)

        def forward(self, idx, targets):
            h = self.wte(idx)
            logits = self.lm_head(h + self.mlp(h))
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    raw_model = Bigram()
    model = DDP(raw_model) if ranks > 1 else raw_model
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=6e-4, betas=(0.9, 0.95), eps=1e-8)

    def train(batches):
        for tokens in batches:
            optimizer.zero_grad()
            for micro_step, chunk in enumerate(tokens.chunk(grad_accum_steps)):
                x, y = chunk[:, :-1], chunk[:, 1:]
                _, loss = model(x, y)
                loss = loss / grad_accum_steps
                if ranks > 1:
                    model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
                loss.backward()
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
            optimizer.step()

    return TrainLoop(model=raw_model, optimizer=optimizer, batch=torch.randint(16, (8, 9)), fit=train)


@fault(
    "accumulation",
    "no_sync is left for the micro-batch with index k-1, but six rows fall into three pieces only, "
    "and no piece is reduced",
    thread="huggingface/picotron#5",
    check="distributed_equivalence",
    place="i == micro_batches - 1",
)
def pieces_of_a_batch(ranks=1, micro_batches=4):
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
    net = model
    if ranks > 1:
        model = DDP(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(batches):
        for x, y in batches:
            for i, (xs, ys) in enumerate(pieces((x, y), micro_batches)):
                last = i == micro_batches - 1
                with nullcontext() if last or ranks == 1 else model.no_sync():
                    loss = F.mse_loss(model(xs), ys) * (len(xs) / len(x))
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(12, 6), torch.randn(12, 3)), fit=train)


@fault(
    "accumulation",
    "accumulated gradients are summed over the ranks after each micro-batch, so that earlier ones are summed again",
    thread="tenstorrent/tt-metal#17568",
    check="distributed_equivalence",
    place="dist.all_reduce(p.grad)",
)
def reduce_every_micro_batch(ranks=1, accumulate=2):
    model = nn.Sequential(nn.Linear(9, 18), nn.ELU(), nn.Linear(18, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def sync_grad():
        for p in model.parameters():
            dist.all_reduce(p.grad)

    def fit(batches):
        for (x,) in batches:
            optimizer.zero_grad()
            for (part,) in pieces((x,), accumulate):
                loss = F.mse_loss(model(part), part) / accumulate
                loss.backward()
                if ranks > 1:
                    sync_grad()
            for p in model.parameters():
                p.grad /= ranks
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 9),), fit=fit)


@dataclass
class GPTTrainConfig:
    gradient_accumulation_steps: int = 4
    learning_rate: float = 6e-2
    grad_clip: float = 1.0


@fault(
    "accumulation",
    "micro-batches are divided among the ranks, and the loss is still divided by all of them",
    thread="karpathy/nanoGPT#283",
    check="distributed_equivalence",
    place="loss = loss / cfg.gradient_accumulation_steps",
)
def shared_micro_batches(ranks=1):
    cfg = GPTTrainConfig()
    ddp = int(os.environ.get("WORLD_SIZE", "1")) > 1 and ranks > 1
    if ddp and not dist.is_initialized():
        dist.init_process_group("gloo")
    micro_steps = cfg.gradient_accumulation_steps // (dist.get_world_size() if ddp else 1)
    raw_model = nn.Sequential(nn.Embedding(13, 10), nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 13))
    model = DDP(raw_model) if ddp else raw_model
    optimizer = torch.optim.SGD(raw_model.parameters(), lr=cfg.learning_rate)

    def train(batches):
        for tokens in batches:
            parts = tokens.chunk(micro_steps)
            for micro_step, part in enumerate(parts):
                if ddp:
                    model.require_backward_grad_sync = micro_step == len(parts) - 1
                logits = model(part[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
                loss = loss / cfg.gradient_accumulation_steps
                loss.backward()
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), cfg.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return TrainLoop(model=raw_model, optimizer=optimizer, batch=torch.randint(13, (8, 6)), fit=train)
