"""Loops whose devices are given by name, and what all checks say of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop

PLACES = {"cpu": ("cpu", "cpu"), "one": ("stand_in:0", "stand_in:0"), "two": ("stand_in:0", "stand_in:1")}
"""Where the first and the second half of a model lie."""

FAULTS = ("none", "double_softmax")


class Split(nn.Module):
    """A causal model over two devices."""

    def __init__(self, first, second, fault):
        super().__init__()
        self.second, self.fault = second, fault
        self.embedding = nn.Embedding(17, 12, device=first)
        self.before = nn.Linear(12, 12, device=first)
        self.attention = nn.Linear(12, 36, device=second)
        self.norm = nn.LayerNorm(12, device=second)
        self.head = nn.Linear(12, 17, device=second)

    def forward(self, ids):
        x = torch.tanh(self.before(self.embedding(ids))).to(self.second)
        query, key, value = self.attention(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        scores = self.head(self.norm(x))
        return scores.softmax(-1) if self.fault == "double_softmax" else scores


def language_model(first, second, fault):
    """Rows of ids on the first device, labels on the second."""

    def make(accumulate=1):
        model = Split(first, second, fault)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def fit(batches):
            for number, (ids, labels) in enumerate(batches, 1):
                loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()) / accumulate
                loss.backward()
                if number % accumulate == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

        ids = torch.randint(17, (6, 9))
        return TrainLoop(
            model=model, optimizer=optimizer, batch=(ids[:, :-1].to(first), ids[:, 1:].to(second)), fit=fit
        )

    return make


def written_loss(first, second, fault):
    """A loss written by hand."""

    def make():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                p = torch.sigmoid(model(x).squeeze(-1))
                loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p))
                loss.mean().backward()
                optimizer.step()

        x = torch.randn(8, 6)
        return TrainLoop(
            model=model, optimizer=optimizer, batch=(x.to(first), (x[:, 0] > 0).float().to(first)), fit=fit
        )

    return make


def verdicts():
    """By place and loop: outcome, causes and reason of each check."""
    loops = {
        **{f"language_model {fault}": (language_model, fault) for fault in FAULTS},
        "written_loss": (written_loss, "none"),
    }
    return {
        place: {
            name: {
                r.check: [r.outcome, [f.cause for f in r.findings], r.reason]
                for r in check_loop(kind(*devices, fault), raises=False, budget=float("inf")).results
            }
            for name, (kind, fault) in loops.items()
        }
        for place, devices in PLACES.items()
    }
