"""Rows that meet in the loss, in targets or in returns, on purpose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(count, *shape, seed=0):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def two_views():
    x, _ = data.labelled()
    return x, x + 0.1 * drawn(*x.shape, seed=4)


@odd(notes="both views are one batch of twice as many rows; each row's positive stands half a batch on")
def simclr_of_two_halves():
    def loss_of(model, batch):
        z = F.normalize(model(torch.cat(batch)), dim=-1)
        scores = z @ z.T / 0.5
        scores = scores.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        rows = len(batch[0])
        return F.cross_entropy(scores, torch.arange(2 * rows).roll(rows))

    return loop(mlp(6, 24, 8), two_views(), loss_of)


@odd(notes="the two halves of one batch are two views, by a loader that samples pairs")
def halves_of_one_batch_are_pairs():
    def loss_of(model, batch):
        first, second = F.normalize(model(batch), dim=-1).chunk(2)
        return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))

    return loop(mlp(6, 24, 8), torch.cat(two_views()), loss_of)


@odd(notes="negatives come from a queue; the positive is always the first score")
def momentum_contrast():
    queue = F.normalize(drawn(20, 8, seed=9), dim=-1)

    def loss_of(model, batch):
        q, k = F.normalize(model(batch[0]), dim=-1), F.normalize(model(batch[1]), dim=-1).detach()
        scores = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.T.to(q.dtype)], 1) / 0.2
        return F.cross_entropy(scores, torch.zeros(len(q), dtype=torch.long))

    return loop(mlp(6, 24, 8), two_views(), loss_of)


@odd(notes="rows are mixed with others, and compared with the labels of both")
def mixed_up_rows():
    def loss_of(model, batch):
        x, y = batch
        order = torch.randperm(len(x))
        scores = model(0.7 * x + 0.3 * x[order])
        return 0.7 * F.cross_entropy(scores, y) + 0.3 * F.cross_entropy(scores, y[order])

    return loop(mlp(6, 24, 3), data.labelled(), loss_of)


@odd(notes="a part of each image comes from the row at the other end; labels are mixed by its share")
def cut_and_mixed_with_the_flipped_batch():
    def loss_of(model, batch):
        x, y = batch
        mixed = torch.cat([x[:, :4], x.flip(0)[:, 4:]], 1)
        wanted = F.one_hot(y, 3).to(x.dtype)
        return F.cross_entropy(model(mixed), 2 / 3 * wanted + 1 / 3 * wanted.flip(0))

    return loop(mlp(6, 24, 3), data.labelled(), loss_of)


@odd(notes="soft assignments are divided by what each cluster gets of the batch, and then by row (DEC)")
def clusters_sharpened_over_the_batch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.centres = mlp(6, 24, 4), nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            q = 1 / (1 + torch.cdist(self.body(x), self.centres).square())
            return q / q.sum(1, keepdim=True)

    def loss_of(model, x):
        q = model(x)
        p = q.detach().square() / q.detach().sum(0)
        p = p / p.sum(1, keepdim=True)
        return (p * (p.log() - q.log())).sum(1).mean()

    return loop(Net(), data.labelled()[0], loss_of)


@odd(notes="columns of the outputs are decorrelated over the batch (Barlow Twins, brought to length 1 along the rows)")
def columns_decorrelated_over_the_batch():
    def loss_of(model, batch):
        one, other = (F.normalize(z - z.mean(0), dim=0) for z in map(model, batch))
        c = one.T @ other
        return (c.diagonal() - 1).square().sum() + 0.01 * (c - torch.diag(c.diagonal())).square().sum()

    return loop(mlp(6, 24, 4), two_views(), loss_of)


@odd(notes="Pearson's correlation with the target, for each output over the rows")
def correlation_over_the_rows():
    wanted = drawn(16, 3, seed=8)

    def loss_of(model, batch):
        told, y = model(batch[0]), batch[1]
        return 1 - F.cosine_similarity(told - told.mean(0), y - y.mean(0), dim=0).mean()

    return loop(mlp(6, 24, 3), (data.labelled()[0], wanted), loss_of)


@odd(notes="variance and covariance over the batch keep the outputs from collapsing (VICReg)")
def variance_over_the_rows():
    def loss_of(model, batch):
        one, other = map(model, batch)
        centred = one - one.mean(0)
        spread = F.relu(1 - (one.var(0) + 1e-4).sqrt()).mean()
        covariance = centred.T @ centred / (len(one) - 1)
        off = (covariance - torch.diag(covariance.diagonal())).square().sum() / one.shape[1]
        return 10 * F.mse_loss(one, other) + 10 * spread + off

    return loop(mlp(6, 24, 4), two_views(), loss_of)


@odd(notes="classes weigh by how rare they are in this batch")
def classes_weighed_by_their_share_of_the_batch():
    def loss_of(model, batch):
        x, y = batch
        counts = torch.bincount(y, minlength=3).clamp(min=1).to(x.dtype)
        losses = F.cross_entropy(model(x), y, reduction="none")
        return (losses * (len(y) / counts)[y]).sum() / len(y) + 0.01 * model(x).square().mean()

    return loop(mlp(6, 24, 3), data.labelled(), loss_of)


@odd(notes="only the hardest rows of the batch count")
def hardest_rows_of_the_batch():
    def loss_of(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses.topk(len(losses) // 2).values.mean()

    return loop(mlp(6, 24, 3), data.labelled(), loss_of)


@odd(notes="rows weigh by a softmax over the batch of their losses (distributionally robust)")
def rows_weighed_by_their_losses():
    def loss_of(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses.detach().softmax(0) * losses).sum()

    return loop(mlp(6, 24, 3), data.labelled(), loss_of)


@odd(notes="triplets of the hardest positive and negative in the batch, by labels")
def batch_hard_triplets():
    def loss_of(model, batch):
        z, y = model(batch[0]), batch[1]
        apart = torch.cdist(z, z)
        same = y[:, None] == y[None]
        near = apart.masked_fill(same, float("inf")).min(1).values
        far = apart.masked_fill(~same, 0.0).max(1).values
        return F.relu(far - near + 1).mean()

    return loop(mlp(6, 24, 4), data.labelled(), loss_of)


@odd(notes="risk sets: times are sorted in the loss, and hazards added up over the patients still at risk (Cox)")
def risk_sets_sorted_in_the_loss():
    def loss_of(model, batch):
        order = batch["time"].argsort(descending=True)
        risk = model(batch["x"])[:, 0][order]
        return -((risk - risk.logcumsumexp(0)) * batch["event"][order]).mean()

    batch = {"x": data.labelled()[0], "time": drawn(16, seed=3).exp(), "event": (torch.arange(16) % 3 > 0).float()}
    return loop(mlp(6, 24, 1), batch, loss_of)


@odd(notes="each row is one step of an episode: returns are added up over the rows")
def one_episode_is_the_batch():
    def loss_of(model, batch):
        states, actions, rewards = batch
        returns = rewards.flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        return -(model(states).log_softmax(-1).gather(1, actions[:, None])[:, 0] * returns).mean()

    return loop(mlp(4, 24, 3), data.episode(), loss_of)


@odd(notes="generalised advantages along the steps, the first axis of a rollout; environments are the second")
def advantages_along_the_first_axis():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.policy, self.value = mlp(4, 24, 16), nn.Linear(16, 3), nn.Linear(16, 1)

        def forward(self, x):
            hidden = self.body(x).tanh()
            return self.policy(hidden), self.value(hidden)[..., 0]

    def loss_of(model, batch):
        scores, values = model(batch["obs"])
        advantages, last = [], torch.zeros(values.shape[1])
        for t in reversed(range(len(values) - 1)):
            going = 1 - batch["dones"][t]
            delta = batch["rewards"][t] + 0.99 * values[t + 1].detach() * going - values[t].detach()
            last = delta + 0.94 * going * last
            advantages.insert(0, last)
        gained = torch.stack(advantages)
        returns = gained + values[:-1].detach()
        gained = (gained - gained.mean()) / (gained.std() + 1e-8)
        chosen = scores[:-1].log_softmax(-1).gather(2, batch["actions"][:-1, :, None])[..., 0]
        ratio = (chosen - batch["old"][:-1]).exp()
        clipped = torch.min(ratio * gained, ratio.clamp(0.8, 1.2) * gained)
        return -clipped.mean() + 0.5 * (values[:-1] - returns).square().mean()

    batch = {
        "obs": drawn(9, 5, 4),
        "actions": classes(3, 9, 5),
        "rewards": drawn(9, 5, seed=2),
        "dones": (drawn(9, 5, seed=3) > 1).float(),
        "old": -1.1 + 0.1 * drawn(9, 5, seed=4),
    }
    return loop(Both(), batch, loss_of)


@odd(notes="scores of all items that other rows chose are each row's negatives (sampled softmax)")
def items_of_other_rows_are_negatives():
    def loss_of(model, batch):
        scores = model(batch[0])[:, batch[1]]
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return loop(mlp(6, 24, 40), (data.labelled()[0], torch.randperm(40, generator=torch.Generator())[:16]), loss_of)


@odd(notes="each told point with its nearest wanted one, and the other way round (Chamfer)")
def nearest_points_of_two_sets():
    def loss_of(model, batch):
        apart = torch.cdist(model(batch[0]), batch[1])
        return apart.min(1).values.mean() + apart.min(0).values.mean()

    return loop(mlp(6, 24, 2), (data.labelled()[0], drawn(16, 2, seed=6)), loss_of)


@odd(notes="experts are to be used alike by the batch, beside an ordinary loss")
def experts_used_alike():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 4), nn.ModuleList(mlp(6, 16, 3) for _ in range(4))

        def forward(self, x):
            gates = self.gate(x).softmax(-1)
            return sum(gates[:, i : i + 1] * e(x) for i, e in enumerate(self.experts)), gates

    def loss_of(model, batch):
        scores, gates = model(batch[0])
        share = F.one_hot(gates.argmax(-1), 4).to(gates.dtype).mean(0)
        return F.cross_entropy(scores, batch[1]) + 0.1 * 4 * (share * gates.mean(0)).sum()

    return loop(Net(), data.labelled(), loss_of)


@odd(notes="the root of the mean square over the batch")
def root_mean_square():
    return loop(mlp(6, 24, 1), data.table(), lambda m, b: (m(b[0]) - b[1]).square().mean().sqrt())


@odd(notes="rewards are told for pairs of which the better one comes first; margins are those of the pair")
def preferences_of_pairs():
    def loss_of(model, batch):
        return -F.logsigmoid(model(batch["chosen"]) - model(batch["rejected"]) - batch["margin"][:, None]).mean()

    batch = {"chosen": drawn(8, 6), "rejected": drawn(8, 6, seed=1), "margin": drawn(8, seed=2).abs()}
    return loop(mlp(6, 24, 1), batch, loss_of)


@odd(notes="a statistics network tells pairs of a row from pairs of different rows (mutual information)")
def rows_paired_at_random():
    def loss_of(model, batch):
        x, y = batch
        own = model(torch.cat([x, y], 1)).mean()
        others = model(torch.cat([x, y[torch.randperm(len(y))]], 1)).exp().mean().log()
        return others - own

    return loop(mlp(8, 24, 1), (data.labelled()[0], drawn(16, 2, seed=6)), loss_of)


@odd(notes="values are told for the next state, which is the next row of a replayed stream")
def next_row_is_the_next_state():
    def loss_of(model, batch):
        values = model(batch["obs"])[:, 0]
        wanted = batch["reward"][:-1] + 0.9 * values[1:].detach()
        return (values[:-1] - wanted).square().mean()

    return loop(mlp(4, 24, 1), {"obs": drawn(12, 4), "reward": drawn(12, seed=2)}, loss_of)


@odd(notes="rows and targets are sorted by length alike before a loop over buckets")
def both_sorted_by_length():
    def loss_of(model, batch):
        order = batch["length"].argsort()
        buckets = zip(batch["x"][order].split(4), batch["y"][order].split(4), strict=True)
        return sum(F.cross_entropy(model(x), y, reduction="sum") for x, y in buckets) / len(order)

    x, y = data.labelled()
    return loop(mlp(6, 24, 3), {"x": x, "y": y, "length": torch.randperm(16, generator=torch.Generator())}, loss_of)


@odd(notes="every pair of a quantile and a target of one row, not of two rows")
def quantiles_of_each_row():
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss_of(model, batch):
        off = batch[1] - model(batch[0])
        return torch.maximum(levels * off, (levels - 1) * off).mean()

    return loop(mlp(6, 24, 3), data.table(), loss_of)


@odd(notes="targets are mixed as vectors of probabilities, by the permutation of the inputs")
def mixed_rows_with_soft_targets():
    def loss_of(model, batch):
        x, wanted = batch[0], F.one_hot(batch[1], 3).to(batch[0].dtype)
        order = torch.randperm(len(x))
        return F.cross_entropy(model(0.6 * x + 0.4 * x[order]), 0.6 * wanted + 0.4 * wanted[order])

    return loop(mlp(6, 24, 3), data.labelled(), loss_of)


@odd(notes="as many samples of each class come one after the other, and are cut by their number")
def samples_of_each_class():
    def loss_of(model, batch):
        z = model(batch["x"])
        parts = [z[n : n + 3] for n in range(0, len(z), 3)]
        near = torch.stack([(part - part.mean(0)).square().mean() for part in parts]).mean()
        return near - torch.log(1 + z.var(0)).sum()

    batch = {"x": drawn(12, 6), "label": torch.arange(4).repeat_interleave(3)}
    return loop(mlp(6, 24, 4), batch, loss_of, rows_interact=True)


@odd(notes="positives share a label; labels happen to be sorted (supervised contrastive)")
def positives_of_sorted_labels():
    def loss_of(model, batch):
        z, y = F.normalize(model(batch["x"]), dim=-1), batch["label"]
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        same = (y[:, None] == y[None]).to(z.dtype) - torch.eye(len(z), dtype=z.dtype)
        return -(scores.log_softmax(1) * same).sum() / same.sum()

    batch = {"x": drawn(11, 6), "label": torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])}
    return loop(mlp(6, 24, 4), batch, loss_of, rows_interact=True)


@odd(notes="each row of a series is told from the row before, never across the border of two series")
def steps_of_several_series():
    def loss_of(model, batch):
        told, series = model(batch["x"])[:, 0], batch["series"]
        inside = (series[1:] == series[:-1]).to(told.dtype)
        return ((told[1:] - batch["y"][1:] - 0.5 * told[:-1]).square() * inside).sum() / inside.sum()

    series = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])
    batch = {"x": drawn(11, 6), "series": series, "y": drawn(11, seed=2)}
    return loop(mlp(6, 24, 1), batch, loss_of, rows_interact=True)


@odd(notes="a softmax over the documents of each query, which are one after the other")
def documents_ranked_by_query():
    def loss_of(model, batch):
        scores, total = model(batch["x"])[:, 0], 0.0
        for query in batch["query"].unique():
            own = batch["query"] == query
            total = total - (scores[own].log_softmax(0) * batch["grade"][own].softmax(0)).sum()
        return total / len(scores)

    query = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3])
    batch = {"x": drawn(12, 6), "query": query, "grade": drawn(12, seed=2)}
    return loop(mlp(6, 24, 1), batch, loss_of, rows_interact=True)


@odd(notes="the part that is mixed in is empty in most rows (the border of an image); targets are mixed in any case")
def empty_borders_are_mixed_in():
    def loss_of(model, batch):
        x, y = batch
        order = torch.randperm(len(x))
        scores = model(torch.cat([x[:, :4], x[order][:, 4:]], 1))
        return 0.7 * F.cross_entropy(scores, y) + 0.3 * F.cross_entropy(scores, y[order])

    x, y = data.labelled()
    x = x.clone()
    x[torch.arange(len(x)) % 3 > 0, 4:] = 0.0
    return loop(mlp(6, 24, 3), (x, y), loss_of)
