"""Typing slips, as projects have them, each with its repaired twin."""

# ruff: noqa: B015, B018, E712, F841, PERF401, RET503, RET504, RUF059

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair
from tests.loops.plain import cross_entropy, loop, train


class Reader(nn.Module):
    """Reads words by one query; ``mask`` is given the scores and where padding is."""

    def __init__(self, mask):
        super().__init__()
        self.table, self.query, self.head = nn.Embedding(20, 8), nn.Parameter(torch.randn(8)), nn.Linear(8, 3)
        self.mask = mask

    def forward(self, ids):
        words = self.table(ids)
        weights = self.mask(words @ self.query, ids == 0).softmax(-1)
        return self.head((weights[..., None] * words).sum(1))


def reader(mask, kind=Reader):
    def make():
        ids = torch.randint(1, 20, (12, 7)).masked_fill(torch.arange(7) >= torch.randint(3, 8, (12, 1)), 0)
        return loop(kind(mask), (ids, torch.arange(12) % 3), cross_entropy)

    return make


def mask_lost(scores, padding):
    scores.masked_fill(padding, -1e4)
    return scores


def mask_kept(scores, padding):
    scores = scores.masked_fill(padding, -1e4)
    return scores


class Tabular(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y = data.labelled(24)
        self.x[0, 0] = 60.0

    def __len__(self):
        return len(self.x)


class Unclipped(Tabular):
    def __getitem__(self, i):
        row = self.x[i].numpy().copy()
        row.clip(-3, 3)
        return torch.from_numpy(row), self.y[i]


class Clipped(Tabular):
    def __getitem__(self, i):
        row = self.x[i].numpy().copy()
        row = row.clip(-3, 3)
        return torch.from_numpy(row), self.y[i]


def net(dropout=0.0):
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def from_rows(rows):
    return lambda: loop(net(), None, cross_entropy, batches=torch.utils.data.DataLoader(rows(), batch_size=8))


def zero_named(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad
        cross_entropy(model, batch).backward()
        optimizer.step()


def zero_called(model, optimizer, batches):
    train(model, optimizer, batches, cross_entropy)


def schedule_named(model, optimizer, batches):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
        scheduler.step


def schedule_called(model, optimizer, batches):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
        scheduler.step()


def lr_compared(model, optimizer, batches):
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] == 5e-3 * min(1.0, (step + 1) / 4)
        zero_called(model, optimizer, [batch])


def lr_assigned(model, optimizer, batches):
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 4)
        zero_called(model, optimizer, [batch])


def trained_by(train, prepare=lambda model: None):
    def make():
        model = net()
        prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        batch = data.labelled()
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda b: train(model, optimizer, b))

    return make


def freeze_compared(model):
    for p in model[0].parameters():
        p.requires_grad == False


def freeze_misspelt(model):
    for p in model[0].parameters():
        p.require_grad = False


def freeze_assigned_to_the_method(model):
    for p in model[0].parameters():
        p.requires_grad_ = False


def freeze(model):
    for p in model[0].parameters():
        p.requires_grad = False


def penalty_replaces(model, batch):
    loss = cross_entropy(model, batch)
    loss =+ 0.01 * model(batch[0]).square().mean()  # fmt: skip
    return loss


def penalty_added(model, batch):
    loss = cross_entropy(model, batch)
    loss += 0.01 * model(batch[0]).square().mean()
    return loss


def smoothed_replaces(model, batch):
    scores = model(batch[0])
    total = F.cross_entropy(scores, batch[1])
    total =+ 0.1 * F.cross_entropy(scores, batch[1], label_smoothing=0.2)  # fmt: skip
    return total


def smoothed_added(model, batch):
    scores = model(batch[0])
    total = F.cross_entropy(scores, batch[1])
    total += 0.1 * F.cross_entropy(scores, batch[1], label_smoothing=0.2)
    return total


def by(loss_of):
    return lambda: loop(net(), data.labelled(), loss_of)


class Summary(nn.Module):
    """An LSTM's last states of rows that were sorted; ``back`` puts them in their order."""

    def __init__(self, back):
        super().__init__()
        self.rnn, self.decoder, self.head = nn.LSTM(1, 8, batch_first=True), nn.LSTMCell(1, 8), nn.Linear(8, 1)
        self.back = back

    def forward(self, x):
        order = torch.arange(len(x)).flip(0)
        _, (h, c) = self.rnn(x[order])
        return self.head(self.decoder(x[:, -1], self.back(h[0], c[0], order.argsort()))[0])


def one_state_twice(h, c, rows):
    h, c = h[rows], h[rows]
    return h, c


def both_states(h, c, rows):
    h, c = h[rows], c[rows]
    return h, c


def summary(back):
    return lambda: loop(Summary(back), data.series(), lambda m, b: F.mse_loss(m(b[0]), b[1]))


class Posterior(nn.Module):
    """A Gaussian of the input, and one of its left half, that are drawn together (as a conditional VAE does)."""

    def __init__(self, both):
        super().__init__()
        self.whole, self.left, self.decoder = nn.Linear(6, 8), nn.Linear(3, 8), nn.Linear(4, 6)
        self.both = both


def first_spread_twice(model, x):
    mean_whole, logvar_whole = model.whole(x).chunk(2, -1)
    mean_left, logvar_left = model.left(x[:, :3]).chunk(2, -1)
    return mean_whole, logvar_whole, mean_left, logvar_whole


def both_spreads(model, x):
    mean_whole, logvar_whole = model.whole(x).chunk(2, -1)
    mean_left, logvar_left = model.left(x[:, :3]).chunk(2, -1)
    return mean_whole, logvar_whole, mean_left, logvar_left


def elbo(model, batch):
    mean, logvar, prior, prior_logvar = model.both(model, batch[0])
    drawn = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
    ratio = (logvar.exp() + (mean - prior) ** 2) / prior_logvar.exp()
    divergence = 0.5 * (prior_logvar - logvar + ratio - 1).sum(-1)
    return ((model.decoder(drawn) - batch[0]).square().sum(-1) + divergence).mean()


def posterior(both):
    return lambda: loop(Posterior(both), data.labelled(), elbo)


def focal(scores, labels, gamma, alpha):
    chosen = scores.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return -(alpha * (1 - chosen.exp()) ** gamma * chosen).mean()


def focal_crossed(model, batch, alpha=0.25, gamma=2.0):
    return focal(model(batch[0]), batch[1], alpha, gamma)


def focal_straight(model, batch, alpha=0.25, gamma=2.0):
    return focal(model(batch[0]), batch[1], gamma=gamma, alpha=alpha)


def corrupted(x, rate_observed, rate_missing):
    hidden = torch.rand(x.shape, dtype=x.dtype) < rate_missing / (rate_missing + rate_observed)
    return x.masked_fill(hidden, 0.0)


def corruption_crossed(model, batch, missing_rate=0.1, observed_rate=0.9):
    return F.cross_entropy(model(corrupted(batch[0], missing_rate, observed_rate)), batch[1])


def corruption_straight(model, batch, missing_rate=0.1, observed_rate=0.9):
    return F.cross_entropy(model(corrupted(batch[0], observed_rate, rate_missing=missing_rate)), batch[1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def encode(self, x):
        mean, logvar = self.body(x).chunk(2, -1)
        return mean, logvar


def divergence(model, x, mean, logvar):
    drawn = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
    spread = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1)
    return ((model.decoder(drawn) - x).square().sum(-1) + spread).mean()


def encoded_crossed(model, batch):
    logvar, mean = model.encode(batch[0])
    return divergence(model, batch[0], mean, logvar)


def encoded_straight(model, batch):
    mean, logvar = model.encode(batch[0])
    return divergence(model, batch[0], mean, logvar)


def split(batch):
    x, y = batch
    inputs, context = x[:, :3], x[:, 3:]
    return inputs, context, y


def halves_crossed(model, batch):
    context, inputs, y = split(batch)
    return F.cross_entropy(model(torch.cat([inputs, 0.1 * context], 1)), y)


def halves_straight(model, batch):
    inputs, context, y = split(batch)
    return F.cross_entropy(model(torch.cat([inputs, 0.1 * context], 1)), y)


def encoder(loss_of):
    return lambda: loop(Encoder(), data.labelled(), loss_of)


def smoothing_not_given(model, batch, label_smoothing=0.2):
    return F.cross_entropy(model(batch[0]), batch[1])


def smoothing_given(model, batch, label_smoothing=0.2):
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=label_smoothing)


class Pool(nn.Module):
    def forward(self, words, padding=None):
        kept = torch.ones_like(words[..., 0]) if padding is None else (~padding).to(words)
        return (words * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)


class Sentences(nn.Module):
    """Reads words by their mean; ``read`` gives the pool what it made of the ids."""

    def __init__(self, read):
        super().__init__()
        self.table, self.pool, self.head, self.read = nn.Embedding(20, 8), Pool(), nn.Linear(8, 3), read

    def forward(self, ids):
        return self.head(self.read(self, self.table(ids), ids))


def padding_not_given(model, words, ids):
    padding = ids == 0
    return model.pool(words)


def padding_given(model, words, ids):
    padding = ids == 0
    return model.pool(words, padding=padding)


class Forgetful(nn.Module):
    def __init__(self, smoothing=0.2):
        super().__init__()
        self.label_smoothing = smoothing

    def forward(self, scores, labels):
        return F.cross_entropy(scores, labels)


class Smoothed(nn.Module):
    def __init__(self, smoothing=0.2):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, scores, labels):
        return F.cross_entropy(scores, labels, label_smoothing=self.smoothing)


def criterion(kind):
    made = kind()
    return by(lambda model, batch: made(model(batch[0]), batch[1]))


class Heads(nn.Module):
    """Scores of several heads; ``join`` makes one of them."""

    def __init__(self, join):
        super().__init__()
        self.heads, self.join = nn.ModuleList(nn.Linear(6, 3) for _ in range(3)), join

    def forward(self, x):
        return self.join(self.heads, x)


def returns_in_the_first_round(heads, x):
    scores = 1.0 * heads[0](x)
    for head in heads[1:]:
        scores += head(x)
        return scores


def returns_the_sum(heads, x):
    scores = 1.0 * heads[0](x)
    for head in heads[1:]:
        scores += head(x)
    return scores


def stacks_the_first(heads, x):
    found = []
    for head in heads:
        found.append(head(x))
        return torch.stack(found).mean(0)


def stacks_all(heads, x):
    found = []
    for head in heads:
        found.append(head(x))
    return torch.stack(found).mean(0)


def heads(join):
    return lambda: loop(Heads(join), data.labelled(), cross_entropy)


def two_views(model, batch):
    view_1 = batch[0] + 0.1 * torch.randn_like(batch[0])
    view_2 = batch[0] + 0.1 * torch.randn_like(batch[0])
    return view_1, view_2


def view_left(model, batch):
    view_1, view_2 = two_views(model, batch)
    scores_1 = model(view_1)
    scores_2 = model(view_1)
    return F.cross_entropy(scores_1, batch[1]) + F.cross_entropy(scores_2, batch[1])


def both_views(model, batch):
    view_1, view_2 = two_views(model, batch)
    scores_1 = model(view_1)
    scores_2 = model(view_2)
    return F.cross_entropy(scores_1, batch[1]) + F.cross_entropy(scores_2, batch[1])


def smoothing_by_key(model, batch):
    settings = {"smoothing_rate": 0.2}
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=settings.get("smooting_rate", 0.0))


def smoothing_by_its_key(model, batch):
    settings = {"rate_of_smoothing": 0.2}
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=settings.get("rate_of_smoothing", 0.0))


def weight_by_key(model, batch):
    weights = {"penalty_weight": 0.1}
    scores = model(batch[0])
    return F.cross_entropy(scores, batch[1]) + weights.get("penalty_wieght", 1.0) * scores.square().mean()


def weight_by_its_key(model, batch):
    weights = {"weight_of_penalty": 0.1}
    scores = model(batch[0])
    return F.cross_entropy(scores, batch[1]) + weights.get("weight_of_penalty", 1.0) * scores.square().mean()


class Critics(nn.Module):
    """Two critics, of which the lower value is the target; ``lower`` gives it."""

    def __init__(self, lower):
        super().__init__()
        self.critic_1, self.critic_2, self.lower = nn.Linear(6, 1), nn.Linear(6, 1), lower

    def forward(self, x):
        return self.critic_1(x), self.critic_2(x), self.lower(self, 0.5 * x).detach()


def lower_of_one(critics, x):
    q1, q2 = critics.critic_1(x), critics.critic_2(x)
    return torch.min(q1, q1)


def lower_of_both(critics, x):
    q1, q2 = critics.critic_1(x), critics.critic_2(x)
    return torch.min(q1, q2)


def bellman(model, batch):
    one, other, after = model(batch[0])
    target = batch[1][:, None] + 0.9 * after
    return F.mse_loss(one, target) + F.mse_loss(other, target)


def critics(lower):
    return lambda: loop(Critics(lower), data.labelled(), bellman)


class Pixels(nn.Module):
    """Classifies images with the channels last; ``first`` brings them to the front."""

    def __init__(self, first):
        super().__init__()
        self.body, self.head, self.first = nn.Conv2d(3, 8, 3), nn.Linear(8, 3), first

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.first(x))).mean((2, 3)))


def channels_by_reshape(x):
    rows, height, width, channels = x.shape
    return x.reshape(rows, channels, height, width)


def channels_by_permute(x):
    return x.permute(0, 3, 1, 2)


def pixels(first):
    return lambda: loop(Pixels(first), (torch.randn(12, 5, 6, 3), torch.arange(12) % 3), cross_entropy)


class Attention(nn.Module):
    """Attention of several heads, which ``split`` makes."""

    def __init__(self, split):
        super().__init__()
        self.three, self.head, self.split = nn.Linear(3, 24), nn.Linear(8, 3), split

    def forward(self, x):
        q, k, v = (self.split(part, 2) for part in self.three(x).chunk(3, -1))
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


def heads_by_reshape(x, heads):
    rows, steps, width = x.shape
    return x.reshape(rows, heads, steps, -1)


def heads_by_transpose(x, heads):
    rows, steps, width = x.shape
    return x.reshape(rows, steps, heads, -1).transpose(1, 2)


def attention(split):
    return lambda: loop(Attention(split), (torch.randn(12, 7, 3), torch.arange(12) % 3), cross_entropy)


class Decoder(nn.Module):
    """Tells a series step by step; ``follow`` runs the cell over the steps from a first state."""

    def __init__(self, follow):
        super().__init__()
        self.gru = nn.GRU(1, 8, batch_first=True)
        self.start, self.head, self.follow = nn.Linear(1, 8), nn.Linear(8, 1), follow

    def forward(self, x):
        return self.head(self.follow(self, x, torch.tanh(self.start(x[:, 0]))[None]))


def state_of_the_start(model, x, start):
    outputs, state = [], start
    for step in range(x.size(1)):
        output, state = model.gru(x[:, step : step + 1], start)
        outputs.append(output)
    return torch.cat(outputs, 1)[:, -1]


def state_of_the_step_before(model, x, start):
    outputs, state = [], start
    for step in range(x.size(1)):
        output, state = model.gru(x[:, step : step + 1], state)
        outputs.append(output)
    return torch.cat(outputs, 1)[:, -1]


def pair_of_the_start(model, x, start):
    outputs = []
    for step in x.unbind(1):
        output, after = model.gru(step[:, None], start)
        outputs.append(output[:, 0])
    return torch.stack(outputs).mean(0)


def pair_of_the_step_before(model, x, start):
    outputs = []
    for step in x.unbind(1):
        output, start = model.gru(step[:, None], start)
        outputs.append(output[:, 0])
    return torch.stack(outputs).mean(0)


def decoder(follow):
    return lambda: loop(Decoder(follow), data.series(), lambda m, b: F.mse_loss(m(b[0]), b[1]))


_FIXED = trained_by(zero_called)
_PAIRS = {
    "result_not_kept": {
        "mask_of_scores_lost": (reader(mask_lost), reader(mask_kept)),
        "clip_of_a_row_lost": (from_rows(Unclipped), from_rows(Clipped)),
    },
    "method_not_called": {
        "zero_grad_without_parentheses": (trained_by(zero_named), _FIXED),
        "scheduler_step_without_parentheses": (trained_by(schedule_named), trained_by(schedule_called)),
    },
    "comparison_as_statement": {
        "requires_grad_compared": (trained_by(zero_called, freeze_compared), trained_by(zero_called, freeze)),
        "lr_compared": (trained_by(lr_compared), trained_by(lr_assigned)),
    },
    "attribute_without_effect": {
        "requires_grad_misspelt": (trained_by(zero_called, freeze_misspelt), trained_by(zero_called, freeze)),
        "requires_grad_assigned_to_the_method": (
            trained_by(zero_called, freeze_assigned_to_the_method),
            trained_by(zero_called, freeze),
        ),
    },
    "plus_behind_the_equals_sign": {
        "penalty_replaces_the_loss": (by(penalty_replaces), by(penalty_added)),
        "smoothed_term_replaces_the_loss": (by(smoothed_replaces), by(smoothed_added)),
    },
    "name_repeated": {
        "cell_state_from_the_hidden_state": (summary(one_state_twice), summary(both_states)),
        "one_spread_returned_twice": (posterior(first_spread_twice), posterior(both_spreads)),
        "view_left_in_a_copied_line": (by(view_left), by(both_views)),
        "lower_of_one_critic": (critics(lower_of_one), critics(lower_of_both)),
    },
    "key_misspelt": {
        "smoothing_by_a_misspelt_key": (by(smoothing_by_key), by(smoothing_by_its_key)),
        "weight_by_a_misspelt_key": (by(weight_by_key), by(weight_by_its_key)),
    },
    "reshape_for_permute": {
        "channels_to_the_front_by_reshape": (pixels(channels_by_reshape), pixels(channels_by_permute)),
        "heads_by_reshape": (attention(heads_by_reshape), attention(heads_by_transpose)),
    },
    "state_not_carried": {
        "decoder_begins_again_at_each_step": (decoder(state_of_the_start), decoder(state_of_the_step_before)),
        "mean_of_states_from_the_start": (decoder(pair_of_the_start), decoder(pair_of_the_step_before)),
    },
    "return_inside_loop": {
        "heads_summed_in_a_loop_that_returns": (heads(returns_in_the_first_round), heads(returns_the_sum)),
        "heads_stacked_in_a_loop_that_returns": (heads(stacks_the_first), heads(stacks_all)),
    },
    "arguments_swapped": {
        "focal_alpha_as_gamma": (by(focal_crossed), by(focal_straight)),
        "missing_rate_as_observed_rate": (by(corruption_crossed), by(corruption_straight)),
    },
    "argument_not_given": {
        "label_smoothing_not_given": (by(smoothing_not_given), by(smoothing_given)),
        "smoothing_of_the_criterion_not_given": (criterion(Forgetful), criterion(Smoothed)),
        "padding_not_given_to_the_pool": (reader(padding_not_given, Sentences), reader(padding_given, Sentences)),
    },
    "results_swapped": {
        "mean_as_logvar": (encoder(encoded_crossed), encoder(encoded_straight)),
        "context_as_inputs": (by(halves_crossed), by(halves_straight)),
    },
}

for cause, pairs in _PAIRS.items():
    for number, (name, (faulty, fixed)) in enumerate(pairs.items()):
        pair(name, "no_typos", cause, faulty=faulty, fixed=fixed, quick=number == 0)
