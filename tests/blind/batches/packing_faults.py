"""Faulty loops about packing: documents that see each other, borders, positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault

VOCAB = 26


def packs(rows=24, width=16, seed=0):
    """Rows of a fixed width, each filled with three documents: ids, document numbers, positions in the document."""
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


def labels_inside(ids, documents):
    """The next token, and -100 where it belongs to another document."""
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = -100
    return labels


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
    """A decoder that is told its mask and its positions."""

    def __init__(self, dim=16, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, dim), nn.Embedding(width, dim)
        self.norm, self.attention = nn.LayerNorm(dim), Attention(dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids, positions, mask):
        x = self.tokens(ids) + self.places(positions)
        x = x + self.attention(self.norm(x), mask)
        return self.head(x + self.mlp(x))


def causal(ids):
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


@fault(
    "packing",
    "the mask is causal only: a document attends to the documents packed before it (document_ids are "
    "used for labels alone)",
    thread="huggingface/nanoVLM#204",
    check="batch_independence",
)
def packed_pretraining():
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            ids, documents = batch["input_ids"], batch["document_ids"]
            logits = model(ids, batch["position_ids"], causal(ids))
            loss = F.cross_entropy(logits.flatten(0, 1), labels_inside(ids, documents).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(packs(), batch_size=6), fit=fit)


@fault(
    "packing",
    "labels are shifted over the whole pack: the last token of a document is taught the first one of the next",
    thread="meta-pytorch/torchtune#2613",
    check="batch_independence",
)
def finetune_recipe():
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ignore = torch.full((16, 1), -100)

    def loss_step(batch):
        ids, documents = batch["input_ids"], batch["document_ids"]
        mask = causal(ids) & (documents[:, :, None] == documents[:, None, :])
        logits = model(ids, batch["position_ids"], mask[:, None])
        labels = torch.hstack((ids[..., 1:], ignore[: ids.shape[0]]))
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_step(batch).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(packs(seed=1), batch_size=6), fit=fit)


@fault(
    "packing",
    "position ids run on through the pack (arange of the row): the second document does not begin at 0",
    thread="huggingface/nanoVLM#201",
    check="batch_independence",
)
def packed_language_model():
    torch.manual_seed(0)

    class LanguageModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = Decoder()

        def forward(self, input_ids, document_ids):
            rows, length = input_ids.shape
            current = torch.arange(0, length).unsqueeze(0).expand(rows, -1)
            mask = causal(input_ids) & (document_ids[:, :, None] == document_ids[:, None, :])
            return self.decoder(input_ids, current, mask[:, None])

    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            logits = model(batch["input_ids"], batch["document_ids"])
            labels = labels_inside(batch["input_ids"], batch["document_ids"])
            loss = F.cross_entropy(logits.transpose(1, 2), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(packs(seed=2), batch_size=6), fit=fit)


@fault(
    "packing",
    "the causal convolution slides over document borders: attention is kept apart by seq_idx, the convolution is not",
    thread="huggingface/transformers#46588",
    check="batch_independence",
)
def short_convolution():
    torch.manual_seed(0)

    class Hybrid(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, dim)
            self.conv = nn.Conv1d(dim, dim, 3, groups=dim)
            self.gate = nn.Linear(dim, dim)
            self.attention = Attention(dim)
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, VOCAB)

        def forward(self, ids, seq_idx):
            x = self.embed(ids)
            mixed = self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
            x = x + torch.sigmoid(self.gate(x)) * mixed
            mask = causal(ids) & (seq_idx[:, :, None] == seq_idx[:, None, :])
            return self.head(x + self.attention(self.norm(x), mask[:, None]))

    model = Hybrid()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def fit(batches):
        for batch in batches:
            logits = model(batch["input_ids"], batch["document_ids"])
            labels = labels_inside(batch["input_ids"], batch["document_ids"])
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(packs(seed=3), batch_size=8), fit=fit)


@fault(
    "packing",
    "packed.data is ordered by time, tags[mask] by row: outputs are compared with the tags of other texts",
    thread="https://pytorch.org/docs/master/generated/torch.nn.utils.rnn.pack_padded_sequence.html",
    check="batch_independence",
)
def packed_tagger():
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 12, padding_idx=0)
            self.rnn = nn.LSTM(12, 16, batch_first=True)
            self.out = nn.Linear(16, 5)

        def forward(self, ids, lengths):
            packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
            return self.out(self.rnn(packed)[0].data)

    def collate(rows):
        lengths = torch.tensor([len(row) for row in rows])
        ids = pad_sequence(rows, batch_first=True)
        return ids, lengths, pad_sequence([row * 3 % 5 for row in rows], batch_first=True)

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train(batches):
        for ids, lengths, tags in batches:
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            loss = F.cross_entropy(model(ids, lengths), tags[mask])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    generator = torch.Generator().manual_seed(4)
    texts = [
        torch.randint(1, VOCAB, (int(n),), generator=generator)
        for n in torch.randint(3, 11, (40,), generator=generator)
    ]
    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(texts, batch_size=8, collate_fn=collate), fit=train
    )


@fault(
    "packing",
    "index_add by document number without an offset for each pack: documents of the same number in all "
    "packs are pooled together",
    thread="mosaicml/llm-foundry#1464",
    check="batch_independence",
)
def document_classifier():
    torch.manual_seed(0)

    class Pooler(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, dim)
            self.encode = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))
            self.out = nn.Linear(dim, 4)

        def forward(self, ids, documents):
            rows, count = ids.shape[0], 3
            states = self.encode(self.embed(ids)).flatten(0, 1)
            index = documents.flatten()
            total = states.new_zeros(rows * count, states.shape[-1]).index_add(0, index, states)
            size = states.new_zeros(rows * count).index_add(0, index, torch.ones_like(states[:, 0]))
            return self.out(total / size.clamp(min=1).unsqueeze(-1)).view(rows, count, -1)

    model = Pooler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = packs(seed=5)
    for row in rows:
        row["labels"] = torch.stack([row["input_ids"][row["document_ids"] == d].sum() % 4 for d in range(3)])

    def fit(batches):
        for batch in batches:
            logits = model(batch["input_ids"], batch["document_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(rows, batch_size=6), fit=fit, ordered=False)
