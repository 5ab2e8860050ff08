"""Padding that is pooled: in means, in the last position, in the last state of a recurrent net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from pytest_trainloop.loop import Padding
from tests.loops.padded_texts import PAD, class_loss, loop
from tests.loops.pairs import pair
from tests.loops.several_texts import VOCAB, padded_text, trained

MASKED = ("input_ids", "attention_mask", "labels")
WITH_LENGTHS = ("input_ids", "lengths", "labels")


class Pooled(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.pool = pool

    def forward(self, ids, mask):
        return self.head(self.pool(self.body(self.embed(ids)).tanh(), mask))


def mean_of_all(x, mask):
    return x.mean(dim=1)


def mean_of_real(x, mask):
    kept = mask.unsqueeze(-1).to(x.dtype)
    return (x * kept).sum(1) / kept.sum(1)


pair(
    "sentence_is_the_mean_of_all_positions",
    "padding_invariance",
    "padding_pooled",
    culprits=("mean",),
    mentions=("pooled", "these positions are padding: attention_mask is 0 there"),
    where="return x.mean(dim=1)",
    faulty=lambda: loop(Pooled(mean_of_all), MASKED, class_loss),
    fixed=lambda: loop(Pooled(mean_of_real), MASKED, class_loss),
)
pair(
    "average_pooling_of_declared_padding",
    "padding_invariance",
    "padding_pooled",
    culprits=("adaptive_avg_pool1d",),
    faulty=lambda: loop(
        Pooled(lambda x, mask: F.adaptive_avg_pool1d(x.transpose(1, 2), 1).squeeze(-1)),
        ("input_ids", "labels"),
        lambda model, b: class_loss(model, {**b, "attention_mask": b["input_ids"] != PAD}),
        padding=Padding(pad_id=PAD),
    ),
    fixed=lambda: loop(
        Pooled(mean_of_real),
        ("input_ids", "labels"),
        lambda model, b: class_loss(model, {**b, "attention_mask": b["input_ids"] != PAD}),
        padding=Padding(pad_id=PAD),
    ),
)
pair(
    "mean_of_zero_embeddings",
    "padding_invariance",
    "padding_pooled",
    level="advice",
    mentions=("a constant factor",),
    faulty=lambda: loop(Bag(mean_of_all), MASKED, class_loss),
    fixed=lambda: loop(Bag(mean_of_real), MASKED, class_loss),
)


class Bag(Pooled):
    """The padding's row of the table is zero."""

    def __init__(self, pool):
        super().__init__(pool)
        self.embed = nn.Embedding(16, 16, padding_idx=PAD)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, ids, mask):
        return self.head(self.pool(self.embed(ids), mask))


class Last(nn.Module):
    """A recurrent net; ``read`` makes one vector of what it gives."""

    def __init__(self, net, read):
        super().__init__()
        self.embed, self.net, self.head = nn.Embedding(16, 16), net(16, 16, batch_first=True), nn.Linear(16, 3)
        self.read = read

    def forward(self, ids, lengths):
        return self.head(self.read(self.net, self.embed(ids), lengths))


def by_length(model, batch):
    return F.cross_entropy(model(batch["input_ids"], batch["lengths"]), batch["labels"])


def last_state(net, x, lengths):
    _, hidden = net(x)
    return hidden[-1]


def packed_state(net, x, lengths):
    _, hidden = net(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))
    return hidden[-1]


def last_output(net, x, lengths):
    return net(x)[0][:, -1]


def own_last_output(net, x, lengths):
    return net(x)[0][torch.arange(len(x), device=x.device), lengths - 1]


pair(
    "last_state_of_a_gru_behind_the_padding",
    "padding_invariance",
    "padding_pooled",
    culprits=("gru",),
    mentions=("these positions are padding: they lie beyond lengths",),
    where="_, hidden = net(x)",
    faulty=lambda: loop(Last(nn.GRU, last_state), WITH_LENGTHS, by_length),
    fixed=lambda: loop(Last(nn.GRU, packed_state), WITH_LENGTHS, by_length),
)
pair(
    "last_output_of_an_lstm_is_that_of_padding",
    "padding_invariance",
    "padding_pooled",
    faulty=lambda: loop(Last(nn.LSTM, last_output), WITH_LENGTHS, by_length),
    fixed=lambda: loop(Last(nn.LSTM, own_last_output), WITH_LENGTHS, by_length),
)


# The last token of a causal model speaks for the text: on the right there is padding.


class LastToken(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 3)
        self.attention, self.own = nn.MultiheadAttention(16, 2, batch_first=True), own

    def forward(self, ids, mask):
        x = self.embed(ids)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
        if self.own:
            return self.head(x[torch.arange(len(x), device=x.device), mask.sum(1) - 1])
        return self.head(x[:, -1])


pair(
    "last_token_of_a_causal_model_is_padding",
    "padding_invariance",
    "padding_pooled",
    culprits=("__getitem__",),
    where="return self.head(x[:, -1])",
    faulty=lambda: loop(LastToken(own=False), MASKED, class_loss),
    fixed=lambda: loop(LastToken(own=True), MASKED, class_loss),
)


class TimeFirst(nn.Module):
    """Series with time as the first axis, read by the last state of a recurrent net."""

    def __init__(self, packed):
        super().__init__()
        self.rnn, self.head, self.packed = nn.GRU(6, 16), nn.Linear(16, 3), packed

    def forward(self, x, lengths):
        x = pack_padded_sequence(x, lengths, enforce_sorted=False) if self.packed else x
        return self.head(self.rnn(x)[1][-1])


def time_first(packed):
    lengths = torch.tensor([12, 8, 10, 5])
    x = torch.randn(12, 4, 6) * (torch.arange(12)[:, None] < lengths[None]).unsqueeze(-1)
    batch = x, lengths, torch.tensor([0, 1, 2, 1])
    return trained(TimeFirst(packed), batch, lambda model, item: F.cross_entropy(model(*item[:2]), item[2]))


pair(
    "last_state_of_padding_where_time_comes_first",
    "padding_invariance",
    "padding_pooled",
    where="self.rnn(x)",
    faulty=lambda: time_first(packed=False),
    fixed=lambda: time_first(packed=True),
)


def listed_lengths(pooled):
    lengths = [12, 8, 10, 5]
    x = torch.randn(4, 12, 6) * (torch.arange(12)[None] < torch.tensor(lengths)[:, None]).unsqueeze(-1)
    batch = {"x": x, "lengths": lengths, "y": torch.tensor([0, 1, 2, 1])}
    model = nn.ModuleList([nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Linear(16, 3)])
    return trained(model, batch, lambda m, b: F.cross_entropy(m[1](pooled(m[0](b["x"]), b["lengths"])), b["y"]))


pair(
    "averaged_over_padding_beside_a_list_of_lengths",
    "padding_invariance",
    "padding_pooled",
    where="states.mean(1)",
    faulty=lambda: listed_lengths(lambda states, lengths: states.mean(1)),
    fixed=lambda: listed_lengths(
        lambda states, lengths: torch.stack([s[:n].mean(0) for s, n in zip(states, lengths, strict=True)])
    ),
)


class Captions(nn.Module):
    def __init__(self, pooled):
        super().__init__()
        self.embed, self.picture, self.pooled = nn.Embedding(VOCAB, 16), nn.Linear(6, 16), pooled

    def forward(self, ids, mask, picture):
        text = F.normalize(self.pooled(self.embed(ids), mask.unsqueeze(-1)), dim=-1)
        return 5 * text @ F.normalize(self.picture(picture), dim=-1).mT


def captions(pooled):
    ids, mask = padded_text((9, 6, 5, 7), seed=8)

    def loss_of(model, batch):
        scores = model(batch["ids"], batch["mask"], batch["pixels"])
        own = torch.arange(len(scores))
        return F.cross_entropy(scores, own) + F.cross_entropy(scores.mT, own)

    return trained(Captions(pooled), {"ids": ids, "mask": mask, "pixels": torch.randn(4, 6)}, loss_of)


pair(
    "contrasted_captions_are_averaged_over_padding",
    "padding_invariance",
    "padding_pooled",
    where="states.mean(1)",
    faulty=lambda: captions(lambda states, mask: states.mean(1)),
    fixed=lambda: captions(lambda states, mask: (states * mask).sum(1) / mask.sum(1)),
)
