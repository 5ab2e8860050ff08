"""A Transformer that reverses a sequence: teacher forcing, padding, label smoothing, the schedule of Vaswani et al."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop

PAD, BEGIN, VOCABULARY, WIDTH, LENGTH, WARM_UP = 0, 1, 24, 32, 10, 4000


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, 4, 1, 1, dim_feedforward=64, dropout=0.1, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def embedded(self, ids):
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))

    def forward(self, source, target):
        later = torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), 1)
        hidden = self.transformer(
            self.embedded(source),
            self.embedded(target),
            tgt_mask=later,
            src_key_padding_mask=source == PAD,
            memory_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
        )
        return self.head(hidden)


def rate(step):
    step = max(step, 1)
    return WIDTH**-0.5 * min(step**-0.5, step * WARM_UP**-1.5)


def train(model, optimizer, scheduler, loader, epochs=3):
    for _ in range(epochs):
        model.train()
        for batch in loader:
            logits = model(batch["source"], batch["target"][:, :-1])
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch["target"][:, 1:].flatten(), ignore_index=PAD, label_smoothing=0.1
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()


def pairs(rows=8):
    source = torch.randint(2, VOCABULARY, (rows, LENGTH - 1))
    source[: rows // 2, -3:] = PAD
    lengths = (source != PAD).sum(1)
    target = torch.full((rows, LENGTH), PAD)
    target[:, 0] = BEGIN
    for row, length in enumerate(lengths.tolist()):
        target[row, 1 : length + 1] = source[row, :length].flip(0)
    return {"source": source, "target": target}


def make():
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    @torch.no_grad()
    def evaluate():
        model.eval()
        batch = pairs()
        right = model(batch["source"], batch["target"][:, :-1]).argmax(-1) == batch["target"][:, 1:]
        model.train()
        return right.float().mean().item()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=pairs(),
        batches=lambda n: [pairs() for _ in range(n)],
        fit=lambda batches: train(model, optimizer, scheduler, batches),
        evaluate=evaluate,
        padding=Padding(pad_id=PAD, ignore_index=PAD),
    )
