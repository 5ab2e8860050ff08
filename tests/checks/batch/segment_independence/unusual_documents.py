"""Documents behind each other in one row, kept apart or not meant to be."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from tests.checks.batch.segment_independence.faults_documents import by_numbers, run_on
from tests.loops.odd import odd
from tests.loops.plain import loop
from tests.loops.segmented import (
    PackedDecoder,
    everything_before,
    generator,
    next_token,
    packed_documents,
    within_documents,
)


@odd(notes="documents behind each other, each sees itself alone by the positions that start again")
def packed_documents_with_a_mask():
    return loop(PackedDecoder(within_documents), packed_documents(), next_token)


@odd(notes="texts behind each other with an end token, cut into rows: each sees all that stood before it")
def packed_texts_without_a_mask():
    stream = torch.cat([torch.cat([torch.arange(n) % 23 + 1, torch.zeros(1, dtype=torch.long)]) for n in (5, 8, 4, 11)])
    ids = stream[:32].view(2, 16)
    batch = {"input_ids": ids, "position_ids": torch.arange(16).expand(2, -1), "labels": ids}
    return loop(PackedDecoder(everything_before), batch, next_token)


class VariableLength(nn.Module):
    """Attention over tokens without rows, document by document."""

    def __init__(self):
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(24, 16), nn.Linear(16, 48), nn.Linear(16, 24)

    def forward(self, input_ids, cu_seqlens):
        hidden = self.tokens(input_ids)
        mixed = []
        borders = cu_seqlens.tolist()
        for first, last in itertools.pairwise(borders):
            query, key, value = self.qkv(hidden[first:last]).chunk(3, -1)
            mixed.append(F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0])
        return self.head(hidden + torch.cat(mixed))


def packed_with_borders(sizes=(4, 6, 3, 7)):
    packed = packed_documents(sizes)
    ids, labels = packed["input_ids"][0], packed["labels"][0]
    return {
        "input_ids": ids,
        "labels": torch.cat([labels[1:], labels.new_full((1,), -100)]),
        "cu_seqlens": torch.tensor([0, *sizes]).cumsum(0).int(),
    }


@odd(notes="tokens of all documents on one axis, attention between the borders of each")
def variable_length_attention():
    def loss_of(model, batch):
        return F.cross_entropy(model(batch["input_ids"], batch["cu_seqlens"]), batch["labels"])

    return loop(VariableLength(), packed_with_borders(), loss_of)


@odd(notes="segments are the two sentences of one pair, which are to see each other")
def sentence_pairs_with_segment_ids():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.kinds = nn.Embedding(24, 16), nn.Embedding(2, 16)
            self.attend, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 3)

        def forward(self, input_ids, segment_ids):
            hidden = self.tokens(input_ids) + self.kinds(segment_ids)
            return self.head(self.attend(hidden, hidden, hidden)[0][:, 0])

    ids = torch.randint(24, (6, 10), generator=generator(1))
    segments = (torch.arange(10) >= torch.tensor([3, 5, 4, 6, 5, 2])[:, None]).long()
    batch = {"input_ids": ids, "segment_ids": segments, "labels": ids[:, 0] % 3}
    return loop(Pairs(), batch, lambda m, b: F.cross_entropy(m(b["input_ids"], b["segment_ids"]), b["labels"]))


@odd(notes="positions start again for the answer of each row: an encoder's text and its answer in one row")
def positions_that_restart_for_the_answer():
    ids = torch.randint(24, (4, 12), generator=generator(2))
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(4, -1)
    labels = ids.clone()
    labels[:, :7] = -100
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return loop(PackedDecoder(everything_before), batch, next_token)


@odd(notes="documents by segment numbers with 0 for padding, as T5 packs them; cross-document scores are masked")
def documents_by_segment_numbers():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places, self.qkv = nn.Embedding(24, 16), nn.Embedding(8, 16), nn.Linear(16, 48)
            self.head = nn.Linear(16, 24)

        def forward(self, inputs, segments, positions):
            hidden = self.tokens(inputs) + self.places(positions)
            same = (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, None]
            query, key, value = self.qkv(hidden).chunk(3, -1)
            scores = (query @ key.transpose(1, 2)).masked_fill(~same, -1e9)
            return self.head(hidden + scores.softmax(-1) @ value)

    segments = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0], [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0]])
    inputs = torch.randint(1, 24, (2, 12), generator=generator(3)) * (segments > 0)
    batch = {
        "inputs": inputs,
        "inputs_segmentation": segments,
        "inputs_position": positions,
        "targets": inputs.where(segments > 0, torch.tensor(-100)),
    }

    def loss_of(model, b):
        scores = model(b["inputs"], b["inputs_segmentation"], b["inputs_position"])
        return F.cross_entropy(scores.flatten(0, 1), b["targets"].flatten())

    return loop(Encoder(), batch, loss_of)


@odd(notes="a recurrent net starts again at each document, by a loop over the borders")
def recurrent_net_that_starts_again():
    class Restarted(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.cell, self.head = nn.Embedding(24, 16), nn.GRUCell(16, 16), nn.Linear(16, 24)

        def forward(self, input_ids, position_ids):
            hidden, out = torch.zeros(len(input_ids), 16, dtype=self.head.weight.dtype), []
            for at in range(input_ids.shape[1]):
                hidden = hidden * (position_ids[:, at] > 0)[:, None]
                hidden = self.cell(self.tokens(input_ids[:, at]), hidden)
                out.append(hidden)
            return self.head(torch.stack(out, 1))

    return loop(Restarted(), packed_documents(), next_token)


@odd(notes="rotary positions run on through packed documents: only distances matter")
def packed_documents_with_rotary_positions():
    return by_numbers(turn=True)()


@odd(notes="packed documents without positions")
def packed_documents_without_positions():
    return by_numbers()()


@odd(notes="windows of equal length in each row, numbered: their places are features of the grid")
def numbered_windows_of_equal_length():
    return by_numbers(apart="", place=run_on, numbers=lambda: numbers_of_windows(5, 4))()


def numbers_of_windows(count, length):
    return torch.arange(count).repeat_interleave(length).expand(3, -1)


@odd(notes="the speaker's turn of each token, counted through a dialogue and embedded")
def turns_of_a_dialogue_that_are_embedded():
    class Dialogue(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.turns = nn.Embedding(24, 16), nn.Embedding(8, 16)
            self.mix, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 24)

        def forward(self, tokens, doc):
            return self.head(self.mix(self.tokens(tokens) + self.turns(doc))[0])

    lo = by_numbers(borders=False)()
    return loop(Dialogue(), lo.batch, lambda m, b: next_of(m(b["tokens"], b["doc"]), b["tokens"]))


@odd(notes="the number of the phoneme of each frame, which the model is to tell")
def frames_aligned_with_phonemes():
    class Aligner(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.GRU(5, 8, batch_first=True), nn.Linear(8, 6)

        def forward(self, frames):
            return self.head(self.body(frames)[0])

    counts = ((4, 7, 3, 6), (6, 5, 9), (2, 3, 8, 2, 5))
    part = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in counts])
    frames = torch.randn(3, 20, 5, generator=generator(4)) + part[..., None]
    return loop(
        Aligner(),
        {"frames": frames, "part": part},
        lambda m, b: F.cross_entropy(m(b["frames"]).flatten(0, 1), b["part"].flatten()),
    )


def next_of(scores, tokens):
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
