"""Differences of a value from itself, and extremes of masked entries, that are meant."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.checks.loss.every_term_trains.unusual import trained
from tests.loops.nets import mlp
from tests.loops.odd import odd


@odd(notes="ratios of probabilities that are 1 and differences that are 0: they train by their slope")
def ratio_of_a_policy_to_itself() -> TrainLoop:
    def loss_of(model, x, y, _):
        chosen = model(x).log_softmax(-1).gather(1, y[:, None]).squeeze(1)
        log_ratio = chosen - chosen.detach()
        ratio = log_ratio.exp()
        advantage = x[:, 0]
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        drift = (chosen - chosen.detach()).square().mean()
        return policy + 0.1 * drift

    return trained(loss_of)


@odd(notes="every exit is compared with the last, and the last with itself")
def exits_that_learn_from_the_last_of_them() -> TrainLoop:
    def loss_of(model, x, y, _):
        exits = model(x).view(len(x), 3, 3).unbind(1)
        loss = F.cross_entropy(exits[-1], y)
        for scores in exits:
            loss = loss + F.mse_loss(scores, exits[-1].detach())
        return loss + sum(F.cross_entropy(scores, y) for scores in exits[:-1])

    return trained(loss_of, mlp(6, 24, 9))


@odd(notes="all pairs of rows, every row with itself among them; differences to the first; a way to write 0")
def distances_of_all_pairs() -> TrainLoop:
    def loss_of(model, x, y, _):
        z = model(x)
        total = x.sum() - x.sum()
        for one in z.unbind(1):
            total = total + (one[:, None] - one[None, :]).square().mean()
            for other in z.unbind(1):
                total = total + 0.01 * (one - other).square().mean()
        return F.cross_entropy(z, y) + 1e-3 * total

    return trained(loss_of)


@odd(notes="rows without a positive take the fill, others do not; -inf and inf as they belong")
def hardest_pairs_with_rows_that_have_none() -> TrainLoop:
    def loss_of(model, x, y, _):
        z = F.normalize(model(x), dim=-1)
        distances, same = torch.cdist(z, z), y[:, None] == y[None, :]
        others = same & ~torch.eye(len(y), dtype=torch.bool)
        farthest = distances.masked_fill(~others, -torch.inf).amax(1)
        nearest = distances.masked_fill(same, torch.inf).amin(1)
        return F.relu(farthest - nearest + 0.5).mean() + F.relu(0.1 - z.std(0)).mean()

    return trained(loss_of)
