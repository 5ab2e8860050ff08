"""Attention over padded keys: masks that are forgotten, not handed on, or the wrong way round."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.padded_texts import PAD, Encoder, class_loss, loop, texts
from tests.loops.pairs import pair

MASKED = ("input_ids", "attention_mask", "labels")


def encoder(mask_of):
    return lambda: loop(Encoder(mask_of), MASKED, class_loss)


pair(
    "key_padding_mask_forgotten",
    "padding_invariance",
    "padded_keys_attended",
    culprits=("multi_head_attention_forward",),
    mentions=("attention looks at padded positions", "these positions are padding: attention_mask is 0 there"),
    where="x = self.norm(x + self.attention(",
    faulty=encoder(lambda mask: None),
    fixed=encoder(lambda mask: mask == 0),
)


pair(
    "key_padding_mask_inverted",
    "padding_invariance",
    "padded_keys_attended",
    culprits=("multi_head_attention_forward",),
    mentions=("inverted",),
    faulty=encoder(lambda mask: mask == 1),
    fixed=encoder(lambda mask: mask == 0),
)


# The mask is added to the scores, and it is zero where it should be large.


class Additive(Encoder):
    def __init__(self, masked):
        super().__init__(None)
        self.qkv = nn.Linear(16, 48)
        self.attention = nn.Linear(16, 16)
        self.masked = masked

    def forward(self, ids, mask):
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        scores = scores.masked_fill(self.masked(mask)[:, None, :], -1e9)
        x = self.norm(x + self.attention(scores.softmax(-1) @ v))
        kept = mask.unsqueeze(-1).to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1))


def additive(masked):
    return lambda: loop(Additive(masked), MASKED, class_loss)


pair(
    "additive_mask_inverted",
    "padding_invariance",
    "padded_keys_attended",
    culprits=("softmax",),
    mentions=("inverted",),
    where="scores.softmax(-1)",
    faulty=additive(lambda mask: mask == 1),
    fixed=additive(lambda mask: mask == 0),
)


# A model in the style of Hugging Face: the mask is optional, and a batch of ids alone is taken without a word.


class ForTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.classifier = nn.Linear(16, 5)

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.embed(input_ids)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        logits = self.classifier(x + self.proj(mixed.transpose(1, 2).flatten(2)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def with_mask(model, batch):
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["tags"])["loss"]


def without_mask(model, batch):
    return model(input_ids=batch["input_ids"], labels=batch["tags"])["loss"]


def tagging(loss_of):
    return lambda: loop(ForTokens(), ("input_ids", "attention_mask", "tags"), loss_of)


pair(
    "attention_mask_not_handed_on",
    "padding_invariance",
    "padded_keys_attended",
    culprits=("scaled_dot_product_attention",),
    where="mixed = F.scaled_dot_product_attention(",
    faulty=tagging(without_mask),
    fixed=tagging(with_mask),
)


# Left padding: a causal mask alone lets every token look at the padding before it.


class Causal(nn.Module):
    """A causal model; ``positions`` says where its positions are counted from."""

    def __init__(self, masked, positions):
        super().__init__()
        self.token, self.position = nn.Embedding(16, 16), nn.Embedding(12, 16)
        self.qkv, self.proj, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)
        self.masked, self.positions = masked, positions

    def forward(self, ids, mask):
        length = ids.shape[1]
        x = self.token(ids) + self.position(self.positions(mask))
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]
        if self.masked:
            itself = torch.eye(length, dtype=torch.bool, device=ids.device)
            seen = seen & (mask[:, None, None, :].bool() | itself)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.head(x + self.proj(mixed.transpose(1, 2).flatten(2)))


def from_the_edge(mask):
    return torch.arange(mask.shape[1], device=mask.device)


def from_the_first(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def next_token(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids[:, 1:].masked_fill((mask[:, 1:] == 0) | (mask[:, :-1] == 0), -100)
    return F.cross_entropy(model(ids, mask)[:, :-1].transpose(1, 2), labels)


def causal(masked, positions, *, varying=True):
    return lambda: loop(
        Causal(masked, positions), ("input_ids", "attention_mask"), next_token, varying=varying, left=True
    )


pair(
    "left_padding_under_a_causal_mask_alone",
    "padding_invariance",
    "padded_keys_attended",
    culprits=("scaled_dot_product_attention",),
    faulty=causal(False, from_the_first),
    fixed=causal(True, from_the_first),
)
pair(
    "left_padding_without_mask_and_positions",
    "padding_invariance",
    "padded_keys_attended",
    mentions=("positions are counted from the left edge",),
    faulty=causal(False, from_the_edge),
    fixed=causal(True, from_the_first),
)
pair(
    "left_padding_without_position_ids",
    "padding_invariance",
    "positions_shifted",
    culprits=("embedding",),
    where="x = self.token(ids) + self.position(",
    faulty=causal(True, from_the_edge),
    fixed=causal(True, from_the_first),
)
pair(
    "left_padding_without_position_ids_in_windows_of_one_length",
    "padding_invariance",
    "positions_shifted",
    faulty=causal(True, from_the_edge, varying=False),
    fixed=causal(True, from_the_first, varying=False),
)


# A table of positions that is cut to length, as buffers of sines are.


class Sines(nn.Module):
    def __init__(self, cut):
        super().__init__()
        place = torch.arange(12)[:, None] / 10 ** (torch.arange(16)[None] / 8)
        self.register_buffer("table", place.sin())
        self.cut = cut

    def forward(self, positions):
        return self.table[: positions.shape[1]] if self.cut else self.table[positions]


def with_sines(cut):
    def make():
        model = Causal(True, from_the_first)
        model.position = Sines(cut)
        return loop(model, ("input_ids", "attention_mask"), next_token, varying=True, left=True)

    return make


pair(
    "sines_cut_from_the_left_edge",
    "padding_invariance",
    "positions_shifted",
    culprits=("__getitem__",),
    where="return self.table[: positions.shape[1]]",
    faulty=with_sines(cut=True),
    fixed=with_sines(cut=False),
)


# The source of a translation is padded, and the target looks at all of it.


class Translator(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)
        self.masked = masked

    def forward(self, ids, mask, target):
        memory, x = self.embed(ids), self.embed(target)
        out = (mask == 0) if self.masked else None
        return self.head(x + self.cross(x, memory, memory, key_padding_mask=out)[0])


def translation(masked):
    def loss_of(model, batch):
        labels = ((batch["target"] + 1) % 16).masked_fill(batch["target"] == 0, -100)
        scores = model(batch["input_ids"], batch["attention_mask"], batch["target"])
        return F.cross_entropy(scores.transpose(1, 2), labels)

    def make():
        made = loop(Translator(masked), ("input_ids", "attention_mask"), loss_of)
        made.batch = {**made.batch, "target": texts(length=7)["input_ids"]}
        return made

    return make


pair(
    "source_of_a_translation_without_its_mask",
    "padding_invariance",
    "padded_keys_attended",
    culprits=("multi_head_attention_forward",),
    where="return self.head(x + self.cross(",
    faulty=translation(masked=False),
    fixed=translation(masked=True),
)


# A text is the sum of its tokens, weighed by a softmax.


class Weighed(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.score, self.masked = nn.Linear(16, 1), masked

    def forward(self, ids, mask):
        x = self.body(self.embed(ids)).tanh()
        scores = self.score(x)
        if self.masked:
            scores = scores.masked_fill(mask.unsqueeze(-1) == 0, -1e9)
        return self.head((scores.softmax(dim=1) * x).sum(1))


pair(
    "tokens_weighed_by_a_softmax_over_padding",
    "padding_invariance",
    "padded_keys_attended",
    culprits=("softmax",),
    where="return self.head((scores.softmax(dim=1) * x).sum(1))",
    faulty=lambda: loop(Weighed(masked=False), MASKED, class_loss),
    fixed=lambda: loop(Weighed(masked=True), MASKED, class_loss),
)


# The id of padding stands in the model's configuration, and the mask of the batch, made elsewhere, has ones only.


class Configured(Weighed):
    def __init__(self, masked):
        super().__init__(masked)
        self.config = SimpleNamespace(pad_token_id=PAD)
        self.embed = nn.Embedding(16, 16, padding_idx=self.config.pad_token_id)


def with_mask_of(mask_of):
    def make():
        made = loop(Configured(masked=True), MASKED, class_loss)
        made.batch["attention_mask"] = mask_of(made.batch["input_ids"])
        return made

    return make


pair(
    "mask_of_ones_over_a_configured_padding_id",
    "padding_invariance",
    "padded_keys_attended",
    mentions=("the padding_idx 0 stands there",),
    faulty=with_mask_of(torch.ones_like),
    fixed=with_mask_of(lambda ids: (ids != PAD).long()),
)
