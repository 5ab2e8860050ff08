"""Models that predict the next input and look as if they saw it, and are right."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.batch.causality.faults import LENGTH, VOCAB, WIDTH, language, text
from tests.loops.odd import odd


class Balanced(torch.autograd.Function):
    """Gives the weights as they are, and adds the gradient of the balance in the backward pass (Megatron-LM)."""

    @staticmethod
    def forward(ctx, weights, balance):
        ctx.save_for_backward(balance)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones_like(ctx.saved_tensors[0])


class Experts(nn.Module):
    def __init__(self, experts=3):
        super().__init__()
        self.ids, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mixer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, ids):
        hidden, _ = self.mixer(self.ids(ids))
        flat = hidden.flatten(0, 1)
        scores = self.gate(flat).softmax(-1)
        if self.training:
            scores = Balanced.apply(scores, 0.01 * scores.mean(0).square().sum())
        mixed = sum(scores[:, n : n + 1] * expert(flat) for n, expert in enumerate(self.experts))
        return self.head(mixed.view(hidden.shape))


@odd(notes="the balance of experts, over all positions, is added to the gradient alone: no output depends on it")
def balance_in_the_backward_pass_alone():
    return language(Experts())


class PrefixLM(nn.Module):
    """Attention to the whole of a prefix, and from there on to earlier positions (UniLM, PaliGemma)."""

    def __init__(self):
        super().__init__()
        self.ids, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, ids, prefix):
        at = torch.arange(LENGTH)
        hidden = (at[:, None] < at)[None] & (at >= prefix[:, None])[:, None]
        return self.head(self.layer(self.ids(ids), src_mask=hidden.repeat_interleave(2, 0)))


@odd(notes="only targets behind the prefix count, by a weight: outputs within it see its later positions")
def prefix_seen_both_ways():
    model = PrefixLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def fit(batches):
        model.train()
        for batch in batches:
            each = F.cross_entropy(
                model(batch["input_ids"], batch["prefix"]).transpose(1, 2), batch["labels"], reduction="none"
            )
            counts = torch.arange(1, LENGTH + 1) >= batch["prefix"][:, None]
            optimizer.zero_grad()
            ((each * counts).sum() / counts.sum()).backward()
            optimizer.step()

    batch = text() | {"prefix": torch.tensor([3, 4, 5, 6, 4])}
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)
