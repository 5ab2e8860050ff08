"""Zeros and masks that are no padding, and nets that commonly run over it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from pytest_trainloop import TrainLoop
from tests.checks.batch.padding_invariance.unusual_padded import (
    LENGTH,
    PAD,
    Attention,
    Reader,
    classes_of,
    some,
    texts,
    trained,
)
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import series, tokens


def tags_of(ids, mask):
    return (ids % 5).masked_fill(mask == 0, -100)


@odd(notes="frames beyond their lengths run through the net, and the alignment loss is told the lengths")
def ctc_with_input_lengths() -> TrainLoop:
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 5)

        def forward(self, x):
            return self.head(self.rnn(x)[0]).log_softmax(-1)

    def loss_of(model, batch):
        scores = model(batch["frames"]).transpose(0, 1)
        return F.ctc_loss(scores, batch["labels"], batch["lengths"], batch["label_lengths"])

    lengths = texts()["lengths"]
    kept = (torch.arange(LENGTH) < lengths[:, None]).unsqueeze(-1)
    batch = {
        "frames": series(6, LENGTH, 4) * kept,
        "lengths": lengths,
        "labels": torch.tensor([[1, 2], [2, 3], [3, 4], [4, 1], [1, 3], [2, 4]]),
        "label_lengths": torch.full((6,), 2),
    }
    return trained(Frames(), batch, loss_of)


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.conv = nn.Embedding(16, 16, padding_idx=PAD), nn.Conv1d(16, 24, 3, padding=1)
        self.head = nn.Linear(24, 3)

    def forward(self, ids):
        return self.head(self.conv(self.embed(ids).transpose(1, 2)).relu().amax(-1))


@odd(notes="a convolutional net takes the maximum over all positions, padded ones too, as text classifiers do")
def maximum_over_padding() -> TrainLoop:
    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]), batch["classes"])

    return trained(TextCNN(), some(texts(), "ids", "classes"), loss_of)


@odd(notes="statistics over time and rows: in training the padding has a part in them")
def batch_norm_over_time() -> TrainLoop:
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.norm = nn.Embedding(16, 16), nn.Conv1d(16, 16, 1), nn.BatchNorm1d(16)
            self.head = nn.Linear(16, 5)

        def forward(self, ids):
            return self.head(self.norm(self.body(self.embed(ids).transpose(1, 2))).relu().transpose(1, 2))

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]).transpose(1, 2), tags_of(batch["ids"], batch["mask"]))

    return trained(Normed(), some(texts(), "ids", "mask"), loss_of)


@odd(notes="pictures as rows of grey levels, of which 0 is one: they end with it, and it is no padding")
def pictures_that_end_black() -> TrainLoop:
    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]).mean(1), batch["classes"])

    model = nn.Sequential(nn.Embedding(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return trained(model, some(texts(), "ids", "classes"), loss_of)


@odd(notes="a model of one fixed length reads all positions, padded ones as empty places")
def one_fixed_length() -> TrainLoop:
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8, padding_idx=PAD), relu_mlp(8 * LENGTH, 16, 3)

        def forward(self, ids):
            return self.head(self.embed(ids).flatten(1))

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]), batch["classes"])

    return trained(Flat(), some(texts(), "ids", "mask", "classes"), loss_of)


@odd(notes="a mask of tokens to be guessed, all of which hold one id, here at the ends of rows")
def tokens_to_be_guessed() -> TrainLoop:
    def loss_of(model, batch):
        ids = torch.where(batch["guess"] == 1, 0, batch["ids"])
        return F.cross_entropy(model(ids).transpose(1, 2), batch["ids"].masked_fill(batch["guess"] == 0, -100))

    guess = 1 - texts()["mask"]
    return trained(
        Reader(Attention(), position=nn.Embedding(LENGTH, 16)), {"ids": tokens(6, LENGTH), "guess": guess}, loss_of
    )


@odd(notes="a mask says which of two segments a token is of, and one of prompts leaves them out of the loss")
def segments_and_prompts() -> TrainLoop:
    class Segments(Reader):
        def __init__(self):
            super().__init__(Attention(), outputs=5)
            self.segment = nn.Embedding(2, 16)

        def forward(self, ids, segments):
            x = self.embed(ids) + self.segment(segments)
            return self.head(x + self.attention(x))

    def loss_of(model, batch):
        labels = (batch["ids"] % 5).masked_fill(batch["answer"] == 0, -100)
        return F.cross_entropy(model(batch["ids"], batch["segments"]).transpose(1, 2), labels)

    mask = texts()["mask"]
    return trained(Segments(), {"ids": tokens(6, LENGTH), "segments": 1 - mask, "answer": 1 - mask}, loss_of)


@odd(notes="a series that was not observed to the end is zero there, and the mask is a part of the input")
def observed_in_part() -> TrainLoop:
    class Sensors(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.attention, self.head = nn.Linear(4, 16), Attention(), nn.Linear(16, 1)

        def forward(self, x, seen):
            x = self.body(torch.cat([x, seen.unsqueeze(-1)], -1)).tanh()
            return self.head((x + self.attention(x)).mean(1))

    def loss_of(model, batch):
        return F.mse_loss(model(batch["x"], batch["seen"]), batch["y"])

    seen, x = texts()["mask"].to(torch.get_default_dtype()), series(6, LENGTH, 3)
    return trained(
        Sensors(), {"x": x * seen.unsqueeze(-1), "seen": seen, "y": x.sum((1, 2), keepdim=True)[:, 0] / 5}, loss_of
    )


@odd(notes="clouds of points, filled with zeros: the maximum takes them for points")
def clouds_filled_with_zeros() -> TrainLoop:
    class Cloud(nn.Module):
        def __init__(self):
            super().__init__()
            self.each, self.head = relu_mlp(3, 16, 24), nn.Linear(24, 3)

        def forward(self, x):
            return self.head(self.each(x).max(1).values)

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["points"]), batch["classes"])

    batch = texts()
    kept = batch["mask"].unsqueeze(-1).to(torch.get_default_dtype())
    return trained(Cloud(), {"points": series(6, LENGTH, 3) * kept, **some(batch, "mask", "classes")}, loss_of)


@odd(notes="a recurrent net in both directions, not packed: backwards it begins in the padding")
def both_directions_not_packed() -> TrainLoop:
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(16, 16), nn.LSTM(16, 8, batch_first=True, bidirectional=True)
            self.head = nn.Linear(16, 5)

        def forward(self, ids):
            return self.head(self.rnn(self.embed(ids))[0])

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]).transpose(1, 2), tags_of(batch["ids"], batch["mask"]))

    return trained(Tagger(), some(texts(), "ids", "mask"), loss_of)


@odd(notes="padded on the left, the last output of a recurrent net is that of the last token")
def recurrent_behind_left_padding() -> TrainLoop:
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(16, 16, padding_idx=PAD), nn.GRU(16, 16, batch_first=True)
            self.head = nn.Linear(16, 3)

        def forward(self, ids):
            return self.head(self.rnn(self.embed(ids))[0][:, -1])

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]), batch["classes"])

    return trained(Last(), some(texts(left=True), "ids", "mask", "classes"), loss_of)


@odd(notes="the last state of a packed net, which is told the lengths")
def state_of_a_packed_net() -> TrainLoop:
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(16, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 3)

        def forward(self, ids, lengths):
            packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
            return self.head(self.rnn(packed)[1][-1])

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"], batch["lengths"]), batch["classes"])

    return trained(Packed(), some(texts(), "ids", "lengths", "classes"), loss_of)


@odd(notes="sound of unequal length, filled with silence: strides and a mean over all of it, and no mask")
def sound_filled_with_silence() -> TrainLoop:
    class Sound(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv1d(1, 8, 3, stride=2, padding=1), nn.Conv1d(8, 16, 3, stride=2, padding=1)
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.second(self.first(x.unsqueeze(1)).relu()).relu().mean(-1))

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["sound"]), batch["classes"])

    batch = texts()
    sound = series(6, LENGTH, 1).squeeze(-1) * batch["mask"]
    return trained(Sound(), {"sound": sound, **some(batch, "lengths", "classes")}, loss_of)


@odd(notes="a padded query looks at nothing and gives zeros, and the first position speaks for the text")
def first_position_speaks() -> TrainLoop:
    class First(Reader):
        def __init__(self):
            super().__init__(nn.MultiheadAttention(16, 2, batch_first=True), outputs=3)
            self.begin = nn.Parameter(torch.randn(1, 1, 16))

        def forward(self, ids, mask):
            x = torch.cat([self.begin.expand(len(ids), 1, -1), self.embed(ids)], 1)
            out = F.pad(mask, (1, 0), value=1) == 0
            return self.head(self.attention(x, x, x, key_padding_mask=out, need_weights=False)[0][:, 0])

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"], batch["mask"]), batch["classes"])

    return trained(First(), some(texts(), "ids", "mask", "classes"), loss_of)


@odd(notes="the model keeps a state of as many rows as its batches have")
def as_many_rows_as_ever() -> TrainLoop:
    class Stateful(Reader):
        def __init__(self):
            super().__init__(nn.Identity(), outputs=3)
            self.register_buffer("state", torch.zeros(6, 1, 16))

        def forward(self, ids, mask):
            return self.head(self.embed(ids) + self.state)

    return trained(Stateful(), some(texts(), "ids", "mask", "classes"), classes_of)


class Judged(nn.Module):
    """A tag for each token, after what ``between`` does."""

    def __init__(self, between):
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.between = between

    def forward(self, ids):
        return self.head(self.between(self.embed(ids), self.gate))


def tagged(between):
    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]).transpose(1, 2), tags_of(batch["ids"], batch["mask"]))

    return trained(Judged(between), some(texts(), "ids", "mask"), loss_of)


@odd(notes="a norm by hand over time: its statistics are those of the whole row, padding included")
def norm_over_time_by_hand() -> TrainLoop:
    return tagged(lambda x, gate: gate((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)))


@odd(notes="a mean over time opens a gate at every position (squeeze and excitation)")
def gate_by_a_mean_over_time() -> TrainLoop:
    return tagged(lambda x, gate: x * gate(x.mean(1))[:, None].sigmoid())


@odd(notes="sets filled with zeros: how many they hold is to be learned, and a mean over all tells")
def size_of_a_set() -> TrainLoop:
    def loss_of(model, batch):
        return F.cross_entropy(model[1](model[0](batch["x"]).mean(1)), batch["size"])

    batch = texts()
    x = series(6, LENGTH, 3) * batch["mask"].unsqueeze(-1)
    return trained(nn.ModuleList([relu_mlp(3, 16, 16), nn.Linear(16, 11)]), {"x": x, "size": batch["lengths"]}, loss_of)


@odd(notes="a canvas of one length: places beyond the text are to be filled too, each by a token of its own")
def canvas_to_be_filled() -> TrainLoop:
    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["whole"])

    whole, batch = tokens(6, LENGTH), texts()
    given = {"ids": whole * batch["mask"], "mask": batch["mask"], "whole": whole}
    return trained(Reader(Attention(), position=nn.Embedding(LENGTH, 16)), given, loss_of)


@odd(notes="a hand-written recurrent net holds its state where the mask is off")
def state_held_by_the_mask() -> TrainLoop:
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.cell, self.head = nn.Embedding(16, 16), nn.GRUCell(16, 16), nn.Linear(16, 3)

        def forward(self, ids, mask):
            state = torch.zeros(len(ids), 16, dtype=self.head.weight.dtype)
            for t in range(ids.shape[1]):
                state = torch.where(mask[:, t, None] == 1, self.cell(self.embed(ids[:, t]), state), state)
            return self.head(state)

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"], batch["mask"]), batch["classes"])

    return trained(Held(), some(texts(), "ids", "mask", "classes"), loss_of)


@odd(notes="sound is standardised by a mean and a spread over the padded width, and pooled by its own lengths")
def sound_standardised_with_its_silence() -> TrainLoop:
    class Sound(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(1, 16), nn.Linear(16, 3)

        def forward(self, x, lengths):
            x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
            kept = (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1).to(x.dtype)
            return self.head((self.body(x.unsqueeze(-1)).tanh() * kept).sum(1) / kept.sum(1))

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["sound"], batch["lengths"]), batch["classes"])

    batch = texts()
    sound = series(6, LENGTH, 1).squeeze(-1) * batch["mask"]
    return trained(Sound(), {"sound": sound, **some(batch, "lengths", "classes")}, loss_of)
