"""Models that are to tell the next input, and see it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair

VOCAB, WIDTH, LENGTH = 20, 16, 11


def text(rows=5):
    ids, after = data.tokens(rows=rows, length=LENGTH, vocab=VOCAB)
    return {"input_ids": ids, "labels": after}


def language(model, **fields):
    """A language model by a trainer of the usual kind."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def fit(batches):
        model.train()
        for batch in batches:
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), batch["labels"].reshape(-1))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    def evaluate():
        model.eval()
        with torch.no_grad():
            batch = text()
            return F.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["labels"]).item()

    return TrainLoop(model=model, optimizer=optimizer, batch=text(), fit=fit, evaluate=evaluate, **fields)


class Attention(nn.Module):
    """Multi-head attention by hand; ``weigh`` is given the scores."""

    def __init__(self, weigh, heads=2):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads, self.weigh = heads, weigh

    def split(self, x):
        rows, length, _ = x.shape
        return x.view(rows, length, self.heads, -1).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.split(part) for part in self.qkv(x).chunk(3, -1))
        weights = self.weigh(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class ReshapedHeads(Attention):
    def split(self, x):
        rows, length, _ = x.shape
        return x.reshape(rows, self.heads, length, -1)


def causal(scores, _training=True, diagonal=1):
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal)
    return scores.masked_fill(ahead, -torch.inf).softmax(-1)


def unmasked(scores, _training):
    return scores.softmax(-1)


def one_ahead(scores, _training):
    return causal(scores, diagonal=2)


def backwards(scores, _training):
    behind = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-1)
    return scores.masked_fill(behind, -torch.inf).softmax(-1)


def masked_too_late(scores, _training):
    return scores.softmax(-1).tril()


def over_queries(scores, _training):
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, -torch.inf).softmax(-2)


def in_training_only(scores, training):
    return causal(scores) if training else scores.softmax(-1)


class Decoder(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def decoder(*weigh, attention=Attention):
    return lambda: language(Decoder(*(attention(w) for w in weigh)))


for title, cause, faulty in (
    ("attention_sees_all_positions", "causal_mask_missing", decoder(unmasked)),
    ("the_second_attention_has_no_mask", "causal_mask_missing", decoder(causal, unmasked)),
    ("the_mask_begins_one_position_late", "mask_off_by_one", decoder(one_ahead)),
    ("the_mask_hides_the_past", "mask_inverted", decoder(backwards)),
    ("the_mask_comes_after_the_softmax", "masked_after_softmax", decoder(masked_too_late)),
    ("the_softmax_runs_over_the_queries", "softmax_over_queries", decoder(over_queries)),
    ("heads_split_by_a_reshape", "view_mixes_positions", decoder(causal, attention=ReshapedHeads)),
    ("the_mask_is_lost_in_evaluation", "mask_missing_in_eval", decoder(causal, in_training_only)),
):
    pair(
        title,
        "causality",
        cause,
        mentions=("1 of 2 attentions",) if "second" in title else (),
        faulty=faulty,
        fixed=decoder(causal, causal) if "second" in title or "lost" in title else decoder(causal),
    )


# The same with torch's own layers.


class TorchDecoder(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.head, self.masked = nn.Linear(WIDTH, VOCAB), masked

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.masked else None
        return self.head(self.layer(self.token(ids), src_mask=mask))


class FusedAttention(nn.Module):
    """The mask says what to hide, and the kernel takes it for what to keep."""

    def __init__(self, hides):
        super().__init__()
        self.qkv, self.hides = nn.Linear(WIDTH, 3 * WIDTH), hides

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(0 if self.hides else 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=later if self.hides else ~later)


pair(
    "an_encoder_layer_as_a_language_model",
    "causality",
    "causal_mask_missing",
    culprits=("multi_head_attention_forward in layer.self_attn",),
    faulty=lambda: language(TorchDecoder(masked=False)),
    fixed=lambda: language(TorchDecoder(masked=True)),
)


class TimeFirst(nn.Module):
    """As in torch's tutorial: ids (positions, rows), and layers without batch_first."""

    def __init__(self, masked):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0)
        self.head, self.masked = nn.Linear(WIDTH, VOCAB), masked

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(len(ids)) if self.masked else None
        return self.head(self.layer(self.token(ids), src_mask=mask))


def time_first(masked):
    model = TimeFirst(masked)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def fit(batches):
        for ids, following in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids).view(-1, VOCAB), following).backward()
            optimizer.step()

    batch = text()
    return TrainLoop(
        model=model, optimizer=optimizer, batch=(batch["input_ids"].T, batch["labels"].T.reshape(-1)), fit=fit
    )


pair(
    "positions_come_first_and_no_mask",
    "causality",
    "causal_mask_missing",
    culprits=("multi_head_attention_forward in layer.self_attn",),
    faulty=lambda: time_first(masked=False),
    fixed=lambda: time_first(masked=True),
)


def windows(masked):
    """Windows of one text that are one token apart: the next row is the next token as well."""
    loop = language(TorchDecoder(masked=masked))
    stream = torch.randint(VOCAB, (5 + LENGTH,), generator=torch.Generator().manual_seed(2))
    rows = stream.unfold(0, LENGTH + 1, 1)
    loop.batch = {"input_ids": rows[:, :-1].clone(), "labels": rows[:, 1:].clone()}
    return loop


pair(
    "windows_one_token_apart_and_no_mask",
    "causality",
    "causal_mask_missing",
    faulty=lambda: windows(masked=False),
    fixed=lambda: windows(masked=True),
)
pair(
    "a_mask_of_what_to_hide_for_a_kernel_that_keeps",
    "causality",
    "mask_inverted",
    where="F.scaled_dot_product_attention",
    faulty=lambda: language(Decoder(FusedAttention(hides=True))),
    fixed=lambda: language(Decoder(FusedAttention(hides=False))),
)


# Without attention.


class Recurrent(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True, **kwargs)
        self.head = nn.LazyLinear(VOCAB)
        self.head(torch.zeros(1, WIDTH * (2 if self.rnn.bidirectional else 1)))

    def forward(self, ids):
        return self.head(self.rnn(self.token(ids))[0])


class Convolutional(nn.Module):
    def __init__(self, left, norm=None):
        super().__init__()
        self.token, self.conv = nn.Embedding(VOCAB, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3)
        self.norm, self.head, self.left = norm or nn.Identity(), nn.Linear(WIDTH, VOCAB), left

    def forward(self, ids):
        x = self.token(ids).transpose(1, 2)
        x = x + torch.relu(self.conv(F.pad(x, (self.left, 2 - self.left))))
        return self.head(self.norm(x).transpose(1, 2))


class EachPosition(nn.Module):
    """Layer norm of channels first."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Squeezed(nn.Module):
    """Squeeze-and-excitation, over all of the sequence or over what came before."""

    def __init__(self, everything):
        super().__init__()
        self.gate, self.everything = nn.Linear(WIDTH, WIDTH), everything

    def forward(self, x):
        counts = torch.arange(1, x.shape[1] + 1)[None, :, None].to(x.dtype)
        context = x.mean(1, keepdim=True) if self.everything else x.cumsum(1) / counts
        return x * torch.sigmoid(self.gate(context))


class Reversed(nn.Module):
    """A running sum from the end."""

    def __init__(self, backwards):
        super().__init__()
        self.mix, self.backwards = nn.Linear(WIDTH, WIDTH), backwards

    def forward(self, x):
        sums = x.flip(1).cumsum(1).flip(1) if self.backwards else x.cumsum(1)
        return torch.tanh(self.mix(sums / 4))


for title, cause, where, faulty, fixed in (
    ("a_bidirectional_language_model", "bidirectional_layer", "self.rnn(self.token(ids))",
     lambda: language(Recurrent(bidirectional=True)), lambda: language(Recurrent())),
    ("a_convolution_padded_on_both_sides", "convolution_sees_ahead", "self.conv(F.pad(",
     lambda: language(Convolutional(left=1)), lambda: language(Convolutional(left=2))),
    ("group_norm_over_time", "statistics_over_time", "self.norm(x)",
     lambda: language(Convolutional(2, nn.GroupNorm(4, WIDTH))), lambda: language(Convolutional(2, EachPosition()))),
    ("a_gate_by_the_mean_of_the_sequence", "statistics_over_time", "context = x.mean(1, keepdim=True)",
     lambda: language(Decoder(Squeezed(True))), lambda: language(Decoder(Squeezed(False)))),
    ("a_running_sum_from_the_end", "sees_the_future", "x.flip(1)",
     lambda: language(Decoder(Reversed(True))), lambda: language(Decoder(Reversed(False)))),
):  # fmt: skip
    pair(title, "causality", cause, where=where, faulty=faulty, fixed=fixed)


# A forecaster, next values for tokens.


class Forecaster(nn.Module):
    def __init__(self, left):
        super().__init__()
        self.conv, self.head, self.left = nn.Conv1d(1, 12, 4), nn.Linear(12, 1), left

    def forward(self, series):
        x = F.pad(series.transpose(1, 2), (self.left, 3 - self.left))
        return self.head(torch.tanh(self.conv(x)).transpose(1, 2))


def forecast(left):
    def make():
        waves, _ = data.series(rows=6, length=14)
        model = Forecaster(left)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def step(batch):
            optimizer.zero_grad()
            F.mse_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
            optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=waves, step=step)

    return make


pair(
    "a_forecaster_that_looks_one_step_ahead",
    "causality",
    "convolution_sees_ahead",
    where="self.conv(x)",
    faulty=forecast(left=2),
    fixed=forecast(left=3),
)
