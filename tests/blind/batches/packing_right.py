"""Right loops about packing that look odd."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from pytest_trainloop import TrainLoop
from tests.blind.cases import right

VOCAB = 26


def packs(rows=24, width=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(rows):
        cuts = torch.randperm(width - 5, generator=generator)[:2].sort().values + 3
        lengths = [int(cuts[0]), int(cuts[1] - cuts[0]), int(width - cuts[1])]
        ids = torch.randint(1, VOCAB, (width,), generator=generator)
        documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        out.append({"input_ids": ids, "document_ids": documents, "position_ids": positions})
    return out


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask):
        rows, length, dim = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(rows, length, dim))


class Decoder(nn.Module):
    def __init__(self, dim=16, width=40):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, dim), nn.Embedding(width, dim)
        self.norm, self.attention = nn.LayerNorm(dim), Attention(dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids, positions, mask):
        x = self.tokens(ids) + self.places(positions)
        x = x + self.attention(self.norm(x), mask)
        return self.head(x + self.mlp(x))


@right(
    "packing",
    "three documents in a row: block-diagonal causal mask, positions from 0 in each, no label across a border",
    thread="huggingface/transformers#25452",
)
def block_diagonal():
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            ids, documents = batch["input_ids"], batch["document_ids"]
            same = documents[:, :, None] == documents[:, None, :]
            mask = same & torch.ones_like(same[0]).tril()
            logits = model(ids, batch["position_ids"], mask[:, None])
            labels = ids[:, 1:].masked_fill(documents[:, 1:] != documents[:, :-1], -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(packs(), batch_size=6), fit=fit)


@right(
    "packing",
    "one stream of documents joined by an end-of-text token is cut into rows of one length: attention "
    "over borders is meant",
    thread="huggingface/trl#784",
)
def joined_stream(eot=0):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(3, 12, (60,), generator=generator).tolist()
    stream = torch.cat([F.pad(torch.randint(1, VOCAB, (n,), generator=generator), (0, 1), value=eot) for n in sizes])
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def batches(n, block_size=16):
        draw = torch.Generator().manual_seed(2)
        out = []
        for _ in range(n):
            start = torch.randint(len(stream) - block_size - 1, (8,), generator=draw).tolist()
            x = torch.stack([stream[i : i + block_size] for i in start])
            y = torch.stack([stream[i + 1 : i + 1 + block_size] for i in start])
            out.append((x, y))
        return out

    def train(data):
        for x, y in data:
            length = x.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            logits = model(x, torch.arange(length), mask)
            loss = F.cross_entropy(logits.view(-1, VOCAB), y.view(-1))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=train)


@right(
    "packing",
    "rows of a PackedSequence lie by time; the labels are packed the same way, so .data of both agree",
    thread="https://pytorch.org/docs/master/generated/torch.nn.utils.rnn.pack_padded_sequence.html",
)
def packed_labels():
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(VOCAB, 12), nn.LSTM(12, 16), nn.Linear(16, 5)

        def forward(self, packed):
            return self.out(self.rnn(packed._replace(data=self.embed(packed.data)))[0].data)

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def fit(batches):
        for batch in batches:
            rows = [ids[:length] for ids, length in zip(batch["ids"], batch["lengths"].tolist(), strict=True)]
            packed = pack_sequence(rows, enforce_sorted=False)
            tags = pack_sequence([row * 3 % 5 for row in rows], enforce_sorted=False)
            loss = F.cross_entropy(model(packed), tags.data)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    generator = torch.Generator().manual_seed(3)
    data = []
    for _ in range(5):
        lengths = torch.randint(3, 11, (8,), generator=generator)
        ids = torch.randint(1, VOCAB, (8, 10), generator=generator)
        data.append({"ids": ids * (torch.arange(10) < lengths[:, None]), "lengths": lengths})
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@right(
    "packing",
    "the corpus runs through the rows from batch to batch: the state of the LSTM is kept, detached, for the next batch",
    thread="pytorch/examples#103",
)
def truncated_bptt(rows=6, bptt=8):
    torch.manual_seed(0)

    class RNNModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.rnn, self.decoder = nn.Embedding(VOCAB, 16), nn.LSTM(16, 16), nn.Linear(16, VOCAB)

        def forward(self, data, hidden):
            output, hidden = self.rnn(self.encoder(data), hidden)
            return self.decoder(output), hidden

    def repackage_hidden(hidden):
        return None if hidden is None else tuple(h.detach() for h in hidden)

    generator = torch.Generator().manual_seed(4)
    corpus = torch.randint(0, VOCAB, (rows * 50,), generator=generator).view(rows, -1).t().contiguous()
    data = [(corpus[i : i + bptt], corpus[i + 1 : i + 1 + bptt]) for i in range(0, 40, bptt)]
    model = RNNModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train(batches):
        hidden = None
        for source, target in batches:
            hidden = repackage_hidden(hidden)
            if hidden is not None and hidden[0].shape[1] != source.shape[1]:
                hidden = None
            output, hidden = model(source, hidden)
            loss = F.cross_entropy(output.flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train, batch_dim=1)


@right(
    "packing",
    "attention is computed for one document after the other along cumulative lengths of the flattened batch (varlen)",
    thread="MeetKai/functionary#265",
)
def cumulative_lengths():
    torch.manual_seed(0)

    class Varlen(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed, self.places, self.qkv = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim), nn.Linear(dim, 3 * dim)
            self.head = nn.Linear(dim, VOCAB)

        def forward(self, ids, positions, cu_seqlens):
            x = self.embed(ids) + self.places(positions)
            q, k, v = self.qkv(x).chunk(3, -1)
            parts = [
                F.scaled_dot_product_attention(q[None, a:b], k[None, a:b], v[None, a:b], is_causal=True)[0]
                for a, b in pairwise(cu_seqlens)
            ]
            return self.head(x + torch.cat(parts))

    model = Varlen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            positions = batch["position_ids"].flatten()
            borders = [*positions.eq(0).nonzero().flatten().tolist(), len(positions)]
            ids = batch["input_ids"].flatten()
            labels = torch.roll(ids, -1).masked_fill(torch.roll(positions, -1).eq(0), -100)
            loss = F.cross_entropy(model(ids, positions, borders), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(packs(seed=5), batch_size=6), fit=fit)


@right(
    "packing",
    "document vectors by index_add, with the pack's number as an offset to the document's number",
    thread="mosaicml/llm-foundry#1464",
)
def pooled_documents():
    torch.manual_seed(0)

    class Pooler(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed, self.encode = nn.Embedding(VOCAB, dim), nn.Sequential(nn.Linear(dim, 32), nn.ReLU())
            self.out = nn.Linear(32, 4)

        def forward(self, ids, documents):
            rows = len(ids)
            states = self.encode(self.embed(ids)).flatten(0, 1)
            index = (documents + 3 * torch.arange(rows).unsqueeze(1)).flatten()
            total = states.new_zeros(3 * rows, states.shape[-1]).index_add(0, index, states)
            size = torch.bincount(index, minlength=3 * rows).clamp(min=1).unsqueeze(-1)
            return self.out(total / size).view(rows, 3, -1)

    model = Pooler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = packs(seed=6)
    for row in rows:
        row["labels"] = torch.stack([row["input_ids"][row["document_ids"] == d].sum() % 4 for d in range(3)])

    def fit(batches):
        for batch in batches:
            logits = model(batch["input_ids"], batch["document_ids"])
            loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(rows, batch_size=6), fit=fit, ordered=False)


@right(
    "packing",
    "a prefix that is seen whole, also by its own earlier tokens, and a causal rest; labels of the prefix are ignored",
    thread="bigscience-workshop/t-zero#32",
)
def prefix_language_model():
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(7)
    data = [
        {
            "input_ids": torch.randint(1, VOCAB, (8, 14), generator=generator),
            "prefix": torch.randint(3, 8, (8,), generator=generator),
        }
        for _ in range(5)
    ]

    def fit(batches):
        for batch in batches:
            ids, prefix = batch["input_ids"], batch["prefix"]
            place = torch.arange(ids.shape[1])
            inside = place < prefix[:, None]
            mask = (place[:, None] >= place) | inside[:, None, :]
            logits = model(ids, place, mask[:, None])
            labels = ids[:, 1:].masked_fill(inside[:, 1:], -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@right(
    "packing",
    "the recurrence is reset where a document begins, and the convolution's taps over a border are zeroed by seq_idx",
    thread="state-spaces/mamba#434",
)
def reset_recurrence():
    torch.manual_seed(0)

    class Mixer(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, dim)
            self.taps = nn.Parameter(torch.randn(3, dim) * 0.3)
            self.decay, self.value, self.head = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, VOCAB)

        def forward(self, ids, seq_idx):
            x = self.embed(ids)
            mixed = x * self.taps[0]
            for lag in (1, 2):
                same = (seq_idx[:, lag:] == seq_idx[:, :-lag]).unsqueeze(-1)
                mixed = mixed + F.pad(x[:, :-lag] * same, (0, 0, lag, 0)) * self.taps[lag]
            decay, value = torch.sigmoid(self.decay(mixed)), self.value(mixed)
            begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
            state, states = torch.zeros_like(value[:, 0]), []
            for t in range(ids.shape[1]):
                kept = state.masked_fill(begins[:, t, None], 0.0)
                state = decay[:, t] * kept + (1 - decay[:, t]) * value[:, t]
                states.append(state)
            return self.head(torch.stack(states, 1))

    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def fit(batches):
        for batch in batches:
            ids, documents = batch["input_ids"], batch["document_ids"]
            labels = ids[:, 1:].masked_fill(documents[:, 1:] != documents[:, :-1], -100)
            logits = model(ids, documents)[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(packs(seed=8), batch_size=6), fit=fit)


@right(
    "packing",
    "outputs of an unsorted packed batch are unpacked to the rows' own order before they meet the labels",
    thread="pytorch/pytorch#3662",
)
def unpacked_order():
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru, self.out = nn.Embedding(VOCAB, 12), nn.GRU(12, 16, batch_first=True), nn.Linear(16, 3)

        def forward(self, ids, lengths):
            order = lengths.argsort(descending=True)
            rows = [self.embed(ids[i, : lengths[i]]) for i in order.tolist()]
            states, sizes = pad_packed_sequence(self.gru(pack_sequence(rows))[0], batch_first=True)
            last = states[torch.arange(len(rows)), sizes - 1]
            return self.out(last[order.argsort()])

    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(9)
    data = []
    for _ in range(5):
        lengths = torch.randint(3, 11, (8,), generator=generator)
        ids = torch.randint(1, VOCAB, (8, 10), generator=generator) * (torch.arange(10) < lengths[:, None])
        data.append((ids, lengths, ids.sum(1) % 3))

    def train(batches):
        for ids, lengths, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids, lengths), labels).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)
