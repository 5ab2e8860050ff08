"""Models that predict the next input and look as if they saw it, and are right."""

import torch
from torch import nn

from tests.checks.batch.causality.faults import VOCAB, WIDTH, language
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
