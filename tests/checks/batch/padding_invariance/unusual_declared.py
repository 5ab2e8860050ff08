"""Padding that is declared, and does not count although it looks as if it did."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pytest_trainloop import Padding, TrainLoop
from tests.checks.batch.padding_invariance.unusual_padded import (
    LENGTH,
    PAD,
    Attention,
    Causal,
    Experts,
    Reader,
    Rotated,
    Sloped,
    causal,
    classes_of,
    next_token,
    some,
    texts,
    trained,
    without_padding,
)
from tests.loops.odd import odd
from tests.loops.random_data import series, tokens

DECLARED = Padding(pad_id=PAD, ignore_index=-100)


def tags_of(ids):
    return (ids % 5).masked_fill(ids == PAD, -100)


def tag_loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).transpose(1, 2), tags_of(batch["ids"]))


def declared(model, keys, loss_of, *, left=False, **fields):
    return trained(model, some(texts(left=left), *keys), loss_of, **{"padding": DECLARED, **fields})


@odd(notes="no padding mask in attention, absolute positions, padding declared: a causal model never looks behind")
def declared_causal_and_padded_on_the_right() -> TrainLoop:
    return declared(Reader(Causal(), position=nn.Embedding(LENGTH, 16)), ("ids", "mask"), next_token)


@odd(notes="declared padding on the left, and distances counted from the left edge (ALiBi)")
def declared_distances_from_the_left_edge() -> TrainLoop:
    return declared(Reader(Sloped()), ("ids", "mask"), next_token, left=True)


@odd(notes="declared padding on the left, angles from the left edge (RoPE) in a table that numpy made in float32")
def declared_angles_of_a_table_in_float32() -> TrainLoop:
    place = np.arange(32, dtype=np.float32)[:, None] * np.float32(0.3) ** np.arange(4, dtype=np.float32)
    sin, cos = torch.from_numpy(np.sin(place)), torch.from_numpy(np.cos(place))

    class FromTable(Rotated):
        def turned(self, x):
            a, b = x.chunk(2, -1)
            length = x.shape[-2]
            s, c = sin[:length].to(x.dtype), cos[:length].to(x.dtype)
            return torch.cat([a * c - b * s, a * s + b * c], -1)

    return declared(Reader(FromTable()), ("ids", "mask"), next_token, left=True)


@odd(notes="distances are put into buckets, from the left edge on, far ones into one, as in relative attention")
def declared_buckets_of_distances() -> TrainLoop:
    class Bucketed(Attention):
        def __init__(self):
            super().__init__()
            self.bias = nn.Embedding(7, 2)

        def scores(self, q, k, mask):
            place = torch.arange(q.shape[-2], device=q.device)
            apart = (place[None] - place[:, None]).clamp(-3, 3) + 3
            return without_padding(super().scores(q, k, mask) + self.bias(apart).permute(2, 0, 1), mask)

    return declared(Reader(Bucketed(), outputs=3), ("ids", "mask", "classes"), classes_of, left=True)


@odd(notes="the id of padding ends each text too, and is asked for once: the first padded position is real")
def declared_padding_ends_each_text() -> TrainLoop:
    def loss_of(model, batch):
        ids = batch["ids"]
        labels = ids[:, 1:].masked_fill((ids[:, 1:] == PAD) & (ids[:, :-1] == PAD), -100)
        return F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), labels)

    return declared(Reader(Causal(), position=nn.Embedding(LENGTH, 16)), ("ids",), loss_of)


@odd(notes="the declared id also stands inside texts, as a token: a mask says what is padding")
def declared_id_is_a_token_too() -> TrainLoop:
    class Masked(Attention):
        def scores(self, q, k, mask):
            return without_padding(super().scores(q, k, mask), mask)

    batch = some(texts(), "ids", "mask", "classes")
    batch["ids"][:, 1:3] = PAD
    return trained(Reader(Masked(), outputs=3), batch, classes_of, padding=DECLARED)


@odd(notes="histories padded on the left to one length, and as many positions: the last is always the same one")
def declared_history_of_one_length() -> TrainLoop:
    class Masked(Attention):
        def scores(self, q, k, mask):
            return causal(without_padding(super().scores(q, k, mask), mask))

    def batches(number):
        return [some(texts(left=True), "ids", "mask") for _ in range(number)]

    model = Reader(Masked(), position=nn.Embedding(LENGTH, 16))
    return declared(model, ("ids", "mask"), next_token, left=True, batches=batches)


@odd(notes="a packed net in both directions, unpacked to the length of the longest")
def declared_packed_in_both_directions() -> TrainLoop:
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 5)
            self.net = nn.GRU(16, 8, batch_first=True, bidirectional=True)

        def forward(self, ids):
            lengths = (ids != PAD).sum(1).cpu()
            packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
            return self.head(pad_packed_sequence(self.net(packed)[0], batch_first=True, total_length=ids.shape[1])[0])

    return declared(Packed(), ("ids",), tag_loss)


@odd(notes="a net that is not packed, in one direction: what runs over the padding is never used")
def declared_one_direction_not_packed() -> TrainLoop:
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.net, self.head = nn.Embedding(16, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 5)

        def forward(self, ids):
            return self.head(self.net(self.embed(ids))[0])

    return declared(Tagger(), ("ids",), tag_loss)


class Strided(nn.Module):
    """Convolutions with strides over frames, masked before each."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 16, 3, stride=2, padding=1), nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 3)

    def forward(self, x, lengths):
        kept = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
        x = self.first((x * kept.unsqueeze(-1)).transpose(1, 2))
        lengths = (lengths + 1) // 2
        kept = (torch.arange(x.shape[2], device=x.device)[None] < lengths[:, None]).unsqueeze(1)
        x = self.second(x.relu() * kept).relu() * kept
        return self.head(x.sum(2) / lengths[:, None])


@odd(notes="strided convolutions over declared padding, masked in between, and a sum over all divided by own lengths")
def declared_strides_with_masks() -> TrainLoop:
    def loss_of(model, batch):
        return F.cross_entropy(model(batch["x"], batch["lengths"]), batch["classes"])

    batch = texts()
    x = series(6, LENGTH, 3) * batch["mask"].unsqueeze(-1)
    return trained(Strided(), {"x": x, **some(batch, "lengths", "classes")}, loss_of, padding=Padding())


@odd(notes="dropout, whose masks depend on the length, behind declared padding")
def declared_dropout_by_length() -> TrainLoop:
    class Masked(Attention):
        def scores(self, q, k, mask):
            return without_padding(super().scores(q, k, mask), mask)

    model = Reader(Masked(), outputs=3)
    model.embed = nn.Sequential(model.embed, nn.Dropout(0.2))
    model.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 3))
    return declared(model, ("ids", "mask", "classes"), classes_of)


@odd(notes="noise is added to embeddings, padded ones included, and drawn by the length of the batch")
def declared_noise_by_length() -> TrainLoop:
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 5)

        def forward(self, ids):
            x = self.embed(ids)
            return self.head((x + 0.1 * torch.randn_like(x)).tanh())

    return declared(Noisy(), ("ids",), tag_loss)


@odd(notes="each text is cut to a window of four positions that is drawn within its padded length")
def declared_windows_of_padded_rows() -> TrainLoop:
    def loss_of(model, batch):
        start = int((1 - torch.rand(())) * (batch["ids"].shape[1] - 3))
        ids = batch["ids"][:, start : start + 4]
        each = F.cross_entropy(model(ids).transpose(1, 2), ids % 5, reduction="none")
        real = (ids != PAD).to(each.dtype)
        return (each * real).sum() / real.sum().clamp(min=1)

    model = nn.Sequential(nn.Embedding(16, 16), nn.Tanh(), nn.Linear(16, 5))
    return declared(model, ("ids",), loss_of)


@odd(notes="experts are balanced over the real tokens of the batch only, and padding is dispatched as well")
def declared_experts_balanced_over_real_tokens() -> TrainLoop:
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gate, self.head = nn.Embedding(16, 16), nn.Linear(16, 2), nn.Linear(16, 5)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, ids):
            x, kept = self.embed(ids), (ids != PAD).unsqueeze(-1)
            weights = self.gate(x).softmax(-1)
            mixed = sum(weights[..., n, None] * expert(x).tanh() for n, expert in enumerate(self.experts))
            return self.head(mixed), (weights * kept).sum((0, 1)) / kept.sum()

    def loss_of(model, batch):
        scores, used = model(batch["ids"])
        return F.cross_entropy(scores.transpose(1, 2), tags_of(batch["ids"])) + 0.1 * used.square().sum()

    return declared(Gated(), ("ids",), loss_of)


@odd(notes="the summed loss is divided by a constant: rows times the longest text that there can be; declared")
def declared_constant_divisor() -> TrainLoop:
    def loss_of(model, batch):
        each = F.cross_entropy(model(batch["ids"]).transpose(1, 2), tags_of(batch["ids"]), reduction="sum")
        return each / (len(batch["ids"]) * 16)

    return declared(nn.Sequential(nn.Embedding(16, 16), nn.Tanh(), nn.Linear(16, 5)), ("ids",), loss_of)


@odd(notes="log-likelihoods of texts, over a power of their own lengths")
def declared_scores_over_a_power_of_the_length() -> TrainLoop:
    def loss_of(model, batch):
        each = F.cross_entropy(model(batch["ids"]).transpose(1, 2), tags_of(batch["ids"]), reduction="none")
        return (each.sum(1) / (batch["ids"] != PAD).sum(1) ** 0.6).mean()

    return declared(nn.Sequential(nn.Embedding(16, 16), nn.Tanh(), nn.Linear(16, 5)), ("ids",), loss_of)


class Regions(nn.Module):
    """Texts with regions of a picture, of which some are empty: a maximum takes these for regions."""

    def __init__(self):
        super().__init__()
        self.embed, self.region = nn.Embedding(16, 16), nn.Linear(3, 16)
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(16, 3))

    def forward(self, ids, regions):
        kept = (ids != PAD).unsqueeze(-1)
        text = (self.embed(ids) * kept).sum(1) / kept.sum(1)
        return self.head(text + self.region(regions).amax(1))


@odd(notes="ids are declared to be padded; the empty regions beside them, which a maximum takes in, are not")
def declared_for_one_of_two_lengths() -> TrainLoop:
    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"], batch["regions"]), batch["classes"])

    seen = torch.arange(7)[None] < torch.tensor([7, 5, 3, 6, 2, 7])[:, None]
    batch = {**some(texts(), "ids", "classes"), "regions": series(6, 7, 3) * seen.unsqueeze(-1), "seen": seen}
    return trained(Regions(), batch, loss_of, padding=DECLARED)


@odd(notes="graphs of unequal size: degrees and pooling by the mask, padded nodes have no edges")
def declared_graphs_of_unequal_size() -> TrainLoop:
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, nodes, edges):
            x, degree = self.embed(nodes), edges.sum(-1, keepdim=True).clamp(min=1)
            x = self.body(x + edges @ x / degree).relu()
            kept = (nodes != PAD).unsqueeze(-1)
            return self.head((x * kept).sum(1) / kept.sum(1))

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"], batch["edges"]), batch["classes"])

    batch = some(texts(), "ids", "mask", "classes")
    kept = batch["mask"].to(torch.get_default_dtype())
    near = (torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]).abs() == 1
    edges = near * kept[:, None] * kept[:, :, None]
    return trained(Graph(), {**some(batch, "ids", "classes"), "edges": edges}, loss_of, padding=DECLARED)


@odd(notes="frames and texts of other lengths, both padded, aligned by a loss that is told both")
def declared_alignment_with_lengths() -> TrainLoop:
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 5)

        def forward(self, x):
            return self.head(self.net(x)[0]).log_softmax(-1)

    def loss_of(model, batch):
        scores = model(batch["frames"]).transpose(0, 1)
        return F.ctc_loss(scores, batch["words"], batch["lengths"], batch["word_lengths"])

    lengths = texts()["lengths"]
    kept = (torch.arange(LENGTH) < lengths[:, None]).unsqueeze(-1)
    words = torch.tensor([[1, 2], [2, 0], [3, 4], [4, 0], [1, 3], [2, 4]])
    batch = {"frames": series(6, LENGTH, 4) * kept, "lengths": lengths, "words": words}
    return trained(Frames(), {**batch, "word_lengths": (words != 0).sum(1)}, loss_of, padding=Padding(pad_id=0))


@odd(notes="a batch norm over real positions only, gathered from the padded batch, and its statistics are the batch's")
def declared_statistics_of_real_positions() -> TrainLoop:
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

        def forward(self, ids):
            return self.head(self.norm(self.embed(ids[ids != PAD])).tanh())

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]), batch["ids"][batch["ids"] != PAD] % 5)

    return declared(Normed(), ("ids",), loss_of)


@odd(notes="a batch norm of pooled texts in training: rows share statistics, and no padding is in them")
def declared_batch_norm_of_pooled_texts() -> TrainLoop:
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

        def forward(self, ids):
            kept = (ids != PAD).unsqueeze(-1)
            return self.head(self.norm((self.embed(ids) * kept).sum(1) / kept.sum(1)).tanh())

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]), batch["classes"])

    return declared(Pooled(), ("ids", "classes"), loss_of)


@odd(notes="rows are sorted by length, cut to chunks of four positions, and each chunk is a step of its own")
def declared_chunks_with_steps_of_their_own() -> TrainLoop:
    model = nn.Sequential(nn.Embedding(16, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for batch in batches:
            ids = batch["ids"][batch["ids"].ne(PAD).sum(1).argsort(descending=True, stable=True)]
            for chunk in ids.split(4, 1):
                tags = tags_of(chunk)
                if bool((tags != -100).any()):
                    optimizer.zero_grad()
                    F.cross_entropy(model(chunk).transpose(1, 2), tags).backward()
                    optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=some(texts(), "ids"), fit=fit, padding=DECLARED)


@odd(notes="padding is declared in texts of one length each, of which none is padded")
def declared_and_not_there() -> TrainLoop:
    model = Reader(Attention(), outputs=5, position=nn.Embedding(LENGTH, 16))

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"] % 5)

    return trained(model, {"ids": tokens(6, LENGTH)}, loss_of, padding=DECLARED)


@odd(notes="the capacity of experts is large enough for all real tokens, whatever padding comes with them")
def declared_experts_with_room_for_all() -> TrainLoop:
    return declared(Experts(), ("ids",), tag_loss)
