"""Right loops in which some rows teach nothing, or nothing yet, or in which a loss is 0."""

from __future__ import annotations

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classified(loss_of, **fields):
    return loop(mlp(6, 16, 3), data.labelled(), loss_of, **fields)


@odd(notes="the last rows are held out: their loss is computed without gradients, for the log")
def rows_held_out_for_the_log() -> TrainLoop:
    logged = []

    def loss_of(model, batch):
        x, y = batch
        with torch.no_grad():
            logged.append(F.cross_entropy(model(x[12:]), y[12:]).item())
        return F.cross_entropy(model(x[:12]), y[:12])

    return classified(loss_of)


@odd(notes="the loss of held-out rows is computed by the same function with gradients on, and only logged")
def rows_held_out_by_the_same_function() -> TrainLoop:
    logged = []

    def loss_of(model, batch):
        x, y = batch

        def cost(part):
            return F.cross_entropy(model(x[part]), y[part])

        logged.append(float(cost(slice(12, None))))
        return cost(slice(12))

    return classified(loss_of)


@odd(notes="the accuracy on held-out rows is computed with gradients on")
def accuracy_of_rows_held_out() -> TrainLoop:
    logged = []

    def loss_of(model, batch):
        x, y = batch
        logged.append((model(x[12:]).argmax(1) == y[12:]).float().mean().item())
        return F.cross_entropy(model(x[:12]), y[:12])

    return classified(loss_of)


@odd(notes="the hardest quarter of the rows teaches")
def hardest_quarter() -> TrainLoop:
    def loss_of(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses.topk(max(1, len(losses) // 4)).values.mean()

    return classified(loss_of)


@odd(notes="the hardest row teaches")
def hardest_row() -> TrainLoop:
    return classified(lambda model, b: F.cross_entropy(model(b[0]), b[1], reduction="none").max())


@odd(notes="the second half has no labels, and teaches where the model is sure, which it is not at first")
def pseudo_labels_for_half_of_the_rows() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        logits = model(x)
        known, guessed = logits[:8], logits[8:]
        sure, label = guessed.detach().softmax(-1).max(-1)
        extra = F.cross_entropy(guessed, label, reduction="none") * (sure > 0.999)
        return F.cross_entropy(known, y[:8]) + extra.mean()

    return classified(loss_of)


@odd(notes="half of the rows, drawn anew for each step")
def random_half_of_the_rows() -> TrainLoop:
    def loss_of(model, batch):
        chosen = torch.randperm(len(batch[0]))[: max(1, len(batch[0]) // 2)]
        return F.cross_entropy(model(batch[0][chosen]), batch[1][chosen])

    return classified(loss_of)


@odd(notes="half of the rows, drawn by python's generator")
def random_half_of_the_rows_by_python() -> TrainLoop:
    def loss_of(model, batch):
        chosen = random.sample(range(len(batch[0])), max(1, len(batch[0]) // 2))
        return F.cross_entropy(model(batch[0][chosen]), batch[1][chosen])

    return classified(loss_of)


@odd(notes="rows go to a replay buffer, and each step draws a few of what is there")
def rows_drawn_from_a_replay_buffer() -> TrainLoop:
    x, y = data.labelled()
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        memory = []
        for xs, ys in batches:
            memory += list(zip(xs, ys, strict=True))
            picked = random.sample(memory, min(8, len(memory)))
            inputs, labels = torch.stack([p[0] for p in picked]), torch.stack([p[1] for p in picked])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(x, y), fit=fit)


@odd(notes="a batch of 15 rows is cut into parts of 4, and what is left over is left out: advice")
def rows_left_over_by_parts_of_four() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        parts = max(1, len(x) // 4)
        size = min(4, len(x))
        losses = [F.cross_entropy(model(x[i * size :][:size]), y[i * size :][:size]) for i in range(parts)]
        return torch.stack(losses).mean()

    return loop(mlp(6, 16, 3), data.labelled(rows=15), loss_of)


@odd(notes="rows come in pairs, and the last of an odd number has no partner: advice")
def odd_row_without_a_partner() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        score = model(x).squeeze(-1)
        pairs = len(score) // 2 * 2
        higher, lower = score[:pairs:2], score[1:pairs:2]
        sign = (y.squeeze(-1)[:pairs:2] - y.squeeze(-1)[1:pairs:2]).sign()
        return F.softplus(-sign * (higher - lower)).sum() / max(1, pairs // 2)

    return loop(mlp(6, 16, 1), data.table(rows=15), loss_of)


@odd(notes="one process of two takes every other row: advice")
def every_other_row_for_one_process() -> TrainLoop:
    rank, world = 0, 2

    def loss_of(model, batch):
        x, y = batch
        return F.cross_entropy(model(x[rank::world]), y[rank::world])

    return classified(loss_of)


@odd(notes="one process of two takes its half of the rows: advice")
def one_half_of_the_rows_for_one_process() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        share = max(1, len(x) // 2)
        return F.cross_entropy(model(x[:share]), y[:share])

    return classified(loss_of)


@odd(notes="the last row carries no weight")
def last_row_without_a_weight() -> TrainLoop:
    x, y = data.labelled()
    weight = torch.ones(16)
    weight[-3:] = 0.0

    def loss_of(model, batch):
        x, y, weight = batch
        return (F.cross_entropy(model(x), y, reduction="none") * weight).sum() / weight.sum().clamp(min=1)

    return loop(mlp(6, 16, 3), (x, y, weight), loss_of)


@odd(notes="the last rows have no label")
def last_rows_without_a_label() -> TrainLoop:
    x, y = data.labelled()
    y = torch.where(torch.arange(16) < 12, y, -100)

    def loss_of(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum") / (y != -100).sum().clamp(min=1)

    return loop(mlp(6, 16, 3), (x, y), loss_of)


@odd(notes="the last rows of a domain without labels count for the batch norm alone: advice")
def rows_for_the_batch_norm_alone() -> TrainLoop:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def loss_of(model, batch):
        x, y = batch
        known = max(1, len(x) // 2)
        return F.cross_entropy(model(x)[:known], y[:known])

    return loop(model, data.labelled(), loss_of)


@odd(notes="the first half is the support that adapts the weights, the second half the query")
def support_and_query() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        half = max(1, len(x) // 2)
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, weights, (x[:half],)), y[:half])
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, fast, (x[-half:],)), y[-half:])

    return classified(loss_of)


@odd(notes="the weight of a row is 0 or 1, and a constant is added to the loss")
def masked_rows_and_a_constant() -> TrainLoop:
    x, y = data.labelled()

    def loss_of(model, batch):
        x, y, valid = batch
        return (F.cross_entropy(model(x), y, reduction="none") * valid).mean() + 0.5

    return loop(mlp(6, 16, 3), (x, y, (torch.arange(16) % 4 > 0).long()), loss_of)


@odd(notes="rewards are 0 or 1, and rows with 0 teach nothing")
def rewards_of_zero_and_one() -> TrainLoop:
    states, actions, _ = data.episode()

    def loss_of(model, batch):
        states, actions, reward = batch
        chosen = F.log_softmax(model(states), -1).gather(1, actions[:, None]).squeeze(1)
        return -(chosen * reward).mean()

    return loop(mlp(4, 16, 3), (states, actions, (states[:, 0] > 0).float()), loss_of)


@odd(notes="a censored row adds no event")
def survival_with_censored_rows() -> TrainLoop:
    x, y = data.table()
    time, event = y.squeeze(-1).exp(), (torch.arange(16) % 3 > 0).float()

    def loss_of(model, batch):
        x, time, event = batch
        rate = model(x).squeeze(-1)
        return (rate.exp() * time - event * rate).mean()

    return loop(mlp(6, 16, 1), (x, time, event), loss_of)


@odd(notes="a truncated hinge: far on the wrong side a row costs 2 and teaches nothing")
def truncated_hinge() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        return (1 - (2.0 * y - 1) * model(x).squeeze(-1)).clamp(0, 2).mean()

    return loop(mlp(6, 16, 1), data.labelled(classes=2), loss_of)


@odd(notes="positives are pulled together, and negatives pushed apart as far as the margin only")
def contrastive_pairs_with_a_margin() -> TrainLoop:
    left, right = data.views(left=6, right=6)

    def loss_of(model, batch):
        left, right, same = batch
        apart = (model(left) - model(right)).norm(dim=1)
        return (same * apart**2 + (1 - same) * (1.0 - apart).clamp(min=0) ** 2).mean()

    return loop(mlp(6, 16, 4), (left, right, (torch.arange(8) % 2).float()), loss_of)


@odd(notes="every reward of the batch is 0, and so is the loss")
def rewards_of_zero() -> TrainLoop:
    states, actions, _ = data.episode()

    def loss_of(model, batch):
        states, actions, reward = batch
        chosen = F.log_softmax(model(states), -1).gather(1, actions[:, None]).squeeze(1)
        return -(chosen * reward).mean()

    return loop(mlp(4, 16, 3), (states, actions, torch.zeros(16)), loss_of)


@odd(notes="negatives of the batch are so far away that every margin is kept from the start")
def negatives_that_are_far_away() -> TrainLoop:
    anchor = drawn(12, 6)
    triplets = anchor, anchor + 0.01 * drawn(12, 6, seed=1), -5 * anchor
    return loop(mlp(6, 16, 4), triplets, lambda m, b: F.triplet_margin_loss(*map(m, b), margin=0.05))


@odd(notes="a ramp weighs the loss, and begins with 0 for the first steps")
def ramp_that_begins_with_zero() -> TrainLoop:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            (min(1.0, step / 100) * F.cross_entropy(model(x), y)).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="a student learns from a copy of itself, besides the labels")
def consistency_with_an_equal_teacher() -> TrainLoop:
    model = mlp(6, 16, 3)
    teacher = copy.deepcopy(model)

    def loss_of(model, batch):
        x, y = batch
        with torch.no_grad():
            target = teacher(x)
        logits = model(x)
        return F.cross_entropy(logits, y) + F.mse_loss(logits, target)

    return loop(model, data.labelled(), loss_of)


@odd(notes="the last step of each rollout only gives the value that the returns begin from")
def last_row_as_bootstrap() -> TrainLoop:
    states, _, rewards = data.episode()
    model = mlp(4, 16, 1)

    def loss_of(model, batch):
        states, rewards = batch
        values = model(states).squeeze(-1)
        with torch.no_grad():
            following = values[-1]
            returns = []
            for reward in rewards[:-1].flip(0):
                following = reward + 0.9 * following
                returns.append(following)
        if not returns:
            return values.sum() * 0.0 + (values - rewards).pow(2).mean()
        return F.mse_loss(values[:-1], torch.stack(returns[::-1]))

    return loop(model, (states, rewards), loss_of)


@odd(notes="an insensitive loss: errors below 0.1 cost nothing")
def insensitive_to_small_errors() -> TrainLoop:
    def loss_of(model, batch):
        return F.relu((model(batch[0]) - batch[1]).abs() - 0.1).mean()

    return loop(mlp(6, 16, 1), data.table(), loss_of)


@odd(notes="four epochs over shuffled parts of the rows for each batch, as in PPO")
def epochs_over_shuffled_parts() -> TrainLoop:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            for _ in range(2):
                for part in torch.randperm(len(x)).split(5):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x[part]), y[part]).backward()
                    optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="shuffled parts of one size, what is left over is dropped: other rows each time")
def shuffled_parts_of_one_size() -> TrainLoop:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            order = torch.randperm(len(x))
            for start in range(0, max(1, len(x) - 4), 5):
                part = order[start : start + 5]
                optimizer.zero_grad()
                F.cross_entropy(model(x[part]), y[part]).backward()
                optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="each row names the position of its anchor, and the first two rows are the anchors")
def anchors_named_by_position() -> TrainLoop:
    x, y = data.labelled()
    anchor = torch.arange(len(x)) % 2

    def loss_of(model, batch):
        x, y, anchor = batch
        z = model(x)
        return F.cross_entropy(z, y) + 0.1 * (z - z[anchor].detach()).square().mean()

    return loop(mlp(6, 16, 3), (x, y, anchor), loss_of)


@odd(notes="logits of two classes, and a table of one value a class, are indexed with labels of 0 and 1")
def classes_index_a_table_of_as_many_entries_as_rows() -> TrainLoop:
    x, y = data.labelled(classes=2)

    def loss_of(model, batch):
        x, y = batch
        logits = model(x)
        groups = torch.zeros(len(x), 3).index_add(0, y.long(), logits)
        return F.cross_entropy(logits - 0.1 * groups[y.long()] / len(x), y.long())

    return loop(mlp(6, 16, 3), (x, y), loss_of)


@odd(notes="a loss takes the same difference of returns and values twice, and old values of the rollout are not needed")
def returns_compared_twice_beside_old_values():
    features, returns = data.table()
    model = mlp(6, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            values = model(batch["observations"])
            zeros = torch.zeros_like(batch["returns"] - values)
            F.huber_loss(batch["returns"] - values, zeros).backward()
            optimizer.step()

    rollout = {"observations": features, "values": 0.3 * torch.sin(7 * features[:, :1]), "returns": returns}
    return TrainLoop(model=model, optimizer=optimizer, batch=rollout, fit=fit)


@odd(notes="negatives are drawn until they are not a row's positive: draws that are equal for all rows would never end")
def negatives_drawn_until_they_fit() -> TrainLoop:
    def loss_of(model, batch):
        scores, positives = model(batch[0]), batch[1].tolist()
        negatives = torch.randint(3, (len(positives),))
        for row, positive in enumerate(positives):
            while int(negatives[row]) == positive:
                negatives[row] = torch.randint(3, ())
        picked = [scores.gather(1, labels[:, None]) for labels in (batch[1], negatives)]
        return -F.logsigmoid(picked[0] - picked[1]).mean()

    return classified(loss_of)
