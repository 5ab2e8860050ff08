"""Sequence models: carried states, packed rows, tied tables, rare tokens, rows along another axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pytest_trainloop.loop import Padding, TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, series, tokens


class TiedLM(nn.Module):
    """Input table and output layer are one tensor."""

    def __init__(self, vocabulary=16, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(self.body(self.embed(ids)))


def next_token_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train_lm(model, optimizer, batches):
    for ids in batches:
        loss = next_token_loss(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@odd(
    notes="one parameter has two names and is given to the optimizer once; "
    "rows of ids that do not occur have no gradient"
)
def tied_language_model() -> TrainLoop:
    model = TiedLM()
    decayed = {id(p): p for p in model.parameters() if p.ndim > 1}
    groups = [
        {"params": list(decayed.values()), "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if id(p) not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=tokens(),
        batches=fresh(tokens),
        loss=next_token_loss,
        fit=lambda batches: train_lm(model, optimizer, batches),
    )


class CarryingRNN(nn.Module):
    def __init__(self, width=3, hidden=12):
        super().__init__()
        self.rnn, self.out = nn.LSTM(width, hidden, batch_first=True), nn.Linear(hidden, width)

    def forward(self, x, state=None):
        h, state = self.rnn(x, state)
        return self.out(h), state


def repackage(state):
    return tuple(s.detach() for s in state)


def train_truncated(model, optimizer, batches, window=5):
    for x in batches:
        state = None
        for start in range(0, x.size(1) - 1, window):
            piece = x[:, start : start + window + 1]
            if state is not None:
                state = repackage(state)
            out, state = model(piece[:, :-1], state)
            loss = F.mse_loss(out, piece[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@odd(
    notes="several steps per batch; the state goes on from window to window, detached between them (truncated "
    "backpropagation)"
)
def truncated_backpropagation_within_a_batch() -> TrainLoop:
    model = CarryingRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=series(4, 11),
        batches=fresh(lambda: series(4, 11)),
        fit=lambda batches: train_truncated(model, optimizer, batches),
    )


def train_stateful(model, optimizer, batches, clip=0.5):
    state = None
    for x in batches:
        if state is not None:
            state = repackage(state)
        out, state = model(x[:, :-1], state)
        optimizer.zero_grad()
        F.mse_loss(out, x[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@odd(notes="the hidden state of one batch is the start of the next, so a batch's loss depends on what came before")
def hidden_state_carried_across_batches() -> TrainLoop:
    model = CarryingRNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=series(4, 8),
        fit=lambda batches: train_stateful(model, optimizer, batches),
    )


class PackedTagger(nn.Module):
    def __init__(self, vocabulary=16, width=10, tags=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.rnn = nn.LSTM(width, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, tags)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=ids.size(1))
        return self.out(h)


def ragged(rows=4, length=5):
    ids = tokens(rows, length)
    lengths = torch.randint(2, length + 1, (rows,))
    padded = torch.arange(length) >= lengths[:, None]
    return {"ids": ids.masked_fill(padded, 0), "lengths": lengths, "tags": (ids % 3).masked_fill(padded, -100)}


def train_tagger(model, optimizer, batches):
    for b in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(b["ids"], b["lengths"]).transpose(1, 2), b["tags"]).backward()
        optimizer.step()


@odd(notes="rows of unequal length in one packed sequence, longest first and back again; padding id and label differ")
def packed_bidirectional_lstm() -> TrainLoop:
    model = PackedTagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=ragged(),
        batches=fresh(ragged),
        padding=Padding(pad_id=0, ignore_index=-100),
        fit=lambda batches: train_tagger(model, optimizer, batches),
    )


class Seq2Seq(nn.Module):
    """With teacher forcing by a coin per step; otherwise the model's own detached guess is fed back."""

    def __init__(self, vocabulary=12, width=10):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder, self.decoder = nn.GRU(width, width, batch_first=True), nn.GRUCell(width, width)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, source, target, forcing=0.5):
        h = self.encoder(self.embed(source))[1][-1]
        token, logits = torch.zeros_like(target[:, 0]), []
        for t in range(target.size(1)):
            h = self.decoder(self.embed(token), h)
            logits.append(self.out(h))
            token = target[:, t] if torch.rand(()) < forcing else logits[-1].detach().argmax(1)
        return torch.stack(logits, 1)


def train_seq2seq(model, optimizer, batches):
    for source, target in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(source, target).flatten(0, 1), target.flatten()).backward()
        optimizer.step()


@odd(
    notes="argmax of a detached output is an input of the next step; "
    "the graph differs from batch to batch (scheduled sampling)"
)
def scheduled_sampling_seq2seq() -> TrainLoop:
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = tokens(5, 4, 12)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(ids, ids.flip(1)),
        fit=lambda batches: train_seq2seq(model, optimizer, batches),
    )


class SpeechNet(nn.Module):
    def __init__(self, symbols=5):
        super().__init__()
        self.net = relu_mlp(3, 16, symbols)

    def forward(self, x):
        return self.net(x).log_softmax(-1).transpose(0, 1)


def train_ctc(model, optimizer, batches):
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    for b in batches:
        optimizer.zero_grad()
        criterion(model(b["x"]), b["labels"], b["frames"], b["lengths"]).backward()
        optimizer.step()


@odd(
    notes="log-probabilities into the loss on purpose, time first, lengths beside the rows, impossible rows "
    "zeroed (CTC)"
)
def ctc_speech_model() -> TrainLoop:
    model = SpeechNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows, frames = 4, 8
    batch = {
        "x": torch.randn(rows, frames, 3),
        "labels": torch.randint(1, 5, (rows, 3)),
        "frames": torch.full((rows,), frames),
        "lengths": torch.tensor([3, 2, 3, 1]),
    }
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=batch,
        fit=lambda batches: train_ctc(model, optimizer, batches),
    )
