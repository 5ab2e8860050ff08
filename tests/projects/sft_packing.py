"""Supervised fine-tuning with packing: prompts and answers of several conversations in one row, each attending to
itself only; the loss counts answers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop

VOCABULARY, CONTEXT, WIDTH, HEADS, IGNORED = 48, 32, 32, 4, -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, input_ids, position_ids, document_ids):
        causal = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).tril()
        mask = causal & (document_ids[:, :, None] == document_ids[:, None, :])
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask[:, None])
        return self.head(self.norm(x))


def conversation(draw):
    prompt = torch.randint(1, VOCABULARY, (int(torch.randint(3, 6, (), generator=draw)),), generator=draw)
    answer = (prompt.repeat(2)[: int(torch.randint(4, 9, (), generator=draw))] + 1) % VOCABULARY
    return torch.cat([prompt, answer]), torch.cat([torch.full_like(prompt, IGNORED), answer])


def packed(rows: int, seed: int):
    """Rows that are full of whole conversations; what does not fit is the start of none."""
    draw, made = torch.Generator().manual_seed(seed), []
    for _ in range(rows):
        row = {"input_ids": [], "labels": [], "position_ids": [], "document_ids": []}
        document = 0
        while len(row["input_ids"]) < CONTEXT:
            ids, labels = conversation(draw)
            room = CONTEXT - len(row["input_ids"])
            row["input_ids"] += ids[:room].tolist()
            row["labels"] += [IGNORED, *labels[1:].tolist()][:room]
            row["position_ids"] += range(min(room, len(ids)))
            row["document_ids"] += [document] * min(room, len(ids))
            document += 1
        made.append({name: torch.tensor(column) for name, column in row.items()})
    return torch.utils.data.default_collate(made)


def loss_of(model, batch):
    logits = model(batch["input_ids"], batch["position_ids"], batch["document_ids"])
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def train(model, optimizer, scheduler, batches, accumulate):
    """Windows of micro-batches weigh each answer token the same."""
    window = []
    for batch in batches:
        window.append(batch)
        if len(window) < accumulate:
            continue
        tokens = sum((micro["labels"][:, 1:] != IGNORED).sum() for micro in window)
        for micro in window:
            (loss_of(model, micro) / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        window = []


def make(accumulate=1):
    model = Decoder()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=lambda n: [packed(4, seed) for seed in range(n)],
        fit=lambda batches: train(model, optimizer, scheduler, batches, accumulate),
        rows_interact=False,
    )
