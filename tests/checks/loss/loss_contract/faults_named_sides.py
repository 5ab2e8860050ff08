"""Rankings whose sides are turned: the batch says which item is the positive one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.pairs import pair


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item, self.bias = nn.Embedding(6, 8), nn.Embedding(12, 8), nn.Embedding(12, 1)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1) + self.bias(item).squeeze(-1)


def ranking(loss_of):
    def make():
        g = torch.Generator().manual_seed(0)
        user = torch.randint(6, (16,), generator=g)
        batch = {
            "user": user,
            "pos_item": user * 2,
            "neg_item": (user * 2 + torch.randint(1, 12, (16,), generator=g)) % 12,
        }
        model = Factors()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for b in batches:
                optimizer.zero_grad()
                loss_of(model(b["user"], b["pos_item"]), model(b["user"], b["neg_item"])).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "positive_item_ranked_below_the_negative",
    "loss_contract",
    "sides_turned",
    quick=True,
    culprits=("pos_item", "neg_item"),
    faulty=ranking(lambda pos, neg: F.softplus(pos - neg).mean()),
    fixed=ranking(lambda pos, neg: F.softplus(neg - pos).mean()),
)


# Direct preference optimisation, with the log-probabilities of a reference in the batch.


def preferences(sign):
    def make():
        g = torch.Generator().manual_seed(1)
        batch = {name: torch.randint(9, (6, 5), generator=g) for name in ("chosen_ids", "rejected_ids")}
        batch |= {f"reference_{side}": -9 - torch.rand(6, generator=g) for side in ("chosen", "rejected")}
        model = nn.Sequential(nn.Embedding(9, 12), nn.Linear(12, 9))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def log_probs(ids):
            return model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2).sum(1)

        def fit(batches):
            for b in batches:
                chosen = log_probs(b["chosen_ids"]) - b["reference_chosen"]
                rejected = log_probs(b["rejected_ids"]) - b["reference_rejected"]
                optimizer.zero_grad()
                (-F.logsigmoid(0.1 * sign * (chosen - rejected)).mean()).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "rejected_answer_preferred",
    "loss_contract",
    "sides_turned",
    faulty=preferences(-1),
    fixed=preferences(1),
)
