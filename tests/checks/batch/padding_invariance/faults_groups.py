"""Batches of several padded sequences: chosen and rejected answers, two sentences, a source and a target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.loops.pairs import pair
from tests.loops.plain import loop
from tests.loops.several_texts import VOCAB, CausalModel, answers, padded_text, trained


def answers_of_two_widths(seed):
    """Rejected answers are one position wider, as collators leave them that pad each side to its own longest."""
    batch = {}
    for number, (side, lengths) in enumerate((("chosen", (9, 6, 9, 4)), ("rejected", (6, 10, 9, 7)))):
        ids, mask = padded_text(lengths, seed=seed + number)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :2] = -100
        batch |= {f"{side}_input_ids": ids, f"{side}_attention_mask": mask, f"{side}_labels": labels}
    return batch


def averaged_preference(average, batches):
    def log_likelihood_of(model, batch, side):
        ids, attended, labels = (batch[f"{side}_{key}"] for key in ("input_ids", "attention_mask", "labels"))
        kept = labels[:, 1:] != -100
        logps = model(ids, attended)[:, :-1].log_softmax(-1)
        each = logps.gather(2, labels[:, 1:].clamp(min=0).unsqueeze(2)).squeeze(2)
        return average(each * kept, kept)

    def loss_of(model, batch):
        chosen, rejected = (log_likelihood_of(model, batch, side) for side in ("chosen", "rejected"))
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    def make():
        model = CausalModel()
        return loop(model, None, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-2), batches=batches())

    return make


def two_batches():
    narrow = {key: value[1:2, :6] for key, value in answers_of_two_widths(3).items()}
    return [answers_of_two_widths(1), {key: value.repeat(4, 1) for key, value in narrow.items()}]


def over_the_width(values, _kept):
    return values.mean(-1)


def over_real_tokens(values, kept):
    return values.sum(-1) / kept.sum(-1)


pair(
    "log_probabilities_are_averaged_over_the_width",
    "padding_invariance",
    "mean_over_padding",
    where="return values.mean(-1)",
    culprits=("mean",),
    faulty=averaged_preference(over_the_width, two_batches),
    fixed=averaged_preference(over_real_tokens, two_batches),
)


class Sentences(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16)

    def forward(self, ids, mask):
        kept = mask.unsqueeze(-1).to(self.head.weight.dtype)
        return self.head((self.embed(ids) * kept).sum(1) / kept.sum(1))


class MeansOfAll(Sentences):
    def forward(self, ids, mask):
        return self.head(self.embed(ids).mean(1))


def two_sentences():
    first, first_mask = padded_text((8, 4, 5, 6), seed=1)
    second, second_mask = padded_text((5, 8, 4, 4), seed=2)
    batch = {"ids_a": first, "mask_a": first_mask, "ids_b": second, "mask_b": second_mask}
    return {**batch, "similar": torch.tensor([0.0, 1.0, 1.0, 0.0])}


def similarity(mask_of_second):
    def loss_of(model, batch):
        first, second = model(batch["ids_a"], batch["mask_a"]), model(batch["ids_b"], batch[mask_of_second])
        return F.mse_loss(F.cosine_similarity(first, second), batch["similar"])

    return loss_of


pair(
    "second_sentence_under_the_first_ones_mask",
    "padding_invariance",
    "mask_of_another",
    where="kept).sum(1)",
    quick=True,
    faulty=lambda: trained(Sentences(), two_sentences(), similarity("mask_a")),
    fixed=lambda: trained(Sentences(), two_sentences(), similarity("mask_b")),
)
pair(
    "both_sentences_are_averaged_over_padding",
    "padding_invariance",
    "padding_pooled",
    where="self.embed(ids).mean(1)",
    faulty=lambda: trained(MeansOfAll(), two_sentences(), similarity("mask_b")),
    fixed=lambda: trained(Sentences(), two_sentences(), similarity("mask_b")),
)


def answers_of_one_mask(side):
    """The likelihood of the rejected answer, counted by the mask of ``side``."""

    def loss_of(model, batch):
        found = []
        for own, counted in (("chosen", "chosen"), ("rejected", side)):
            ids = batch[f"{own}_input_ids"]
            each = model(ids, batch[f"{own}_attention_mask"])[:, :-1].log_softmax(-1)
            each = each.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
            found.append((each * batch[f"{counted}_attention_mask"][:, 1:]).sum(1))
        return -F.logsigmoid(0.1 * (found[0] - found[1])).mean()

    def make() -> TrainLoop:
        batch = {key: value for key, value in answers().items() if "labels" not in key}
        return trained(CausalModel(), batch, loss_of)

    return make


pair(
    "rejected_answer_counted_by_the_chosen_ones_mask",
    "padding_invariance",
    "mask_of_another",
    where="found.append(",
    faulty=answers_of_one_mask("chosen"),
    fixed=answers_of_one_mask("rejected"),
)


class Translator(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, 16), nn.Embedding(VOCAB, 16)
        self.cross, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, VOCAB)
        self.masked = masked

    def forward(self, source, source_mask, target):
        memory, x = self.source(source), self.target(target)
        hidden = source_mask == 0 if self.masked else None
        return self.head(x + self.cross(x, memory, memory, key_padding_mask=hidden, need_weights=False)[0])


def translation_loss(model, batch):
    labels = batch["tgt"][:, 1:].masked_fill(batch["tgt_mask"][:, 1:] == 0, -100)
    return F.cross_entropy(model(batch["src"], batch["src_mask"], batch["tgt"][:, :-1]).transpose(1, 2), labels)


def translations():
    source, source_mask = padded_text((8, 4, 5, 6), seed=3)
    target, target_mask = padded_text((5, 8, 4, 4), seed=4)
    return {"src": source, "src_mask": source_mask, "tgt": target, "tgt_mask": target_mask}


BOTH = [Padding(pad_id=0, of=("src", "src_mask")), Padding(pad_id=0, of=("tgt", "tgt_mask"))]

pair(
    "padding_of_the_source_is_attended_and_both_are_declared",
    "padding_invariance",
    "padded_keys_attended",
    where="self.cross(",
    faulty=lambda: trained(Translator(masked=False), translations(), translation_loss, padding=BOTH),
    fixed=lambda: trained(Translator(masked=True), translations(), translation_loss, padding=BOTH),
)


class OneLength(nn.Module):
    """The mask of the source also meets the positions of the target, which must be as many."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis
        self.source, self.target = (nn.Embedding(VOCAB, 16, padding_idx=0) for _ in range(2))
        self.query, self.key, self.value, self.head = (nn.Linear(16, size) for size in (16, 16, 16, VOCAB))

    def attend(self, to, of, mask):
        scores = self.query(to) @ self.key(of).transpose(1, 2) / 4
        return to + scores.masked_fill(mask == 0, -1e4).softmax(-1) @ self.value(of)

    def forward(self, source, target):
        mask = (source != 0).unsqueeze(self.axis)
        memory = self.attend(self.source(source), self.source(source), mask)
        return self.head(self.attend(self.target(target), memory, mask))


def translation(axis):
    def loss_of(model, batch):
        source, target = batch
        return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

    def make():
        source, target = padded_text((11, 6, 4, 9), seed=1)[0], padded_text((7, 12, 5, 6), seed=2)[0]
        return trained(OneLength(axis), (source, target), loss_of)

    return make


pair(  # https://github.com/hyunwoongko/transformer/pull/40
    "mask_hides_queries_in_place_of_keys",
    "padding_invariance",
    "padded_keys_attended",
    level="advice",
    faulty=translation(2),
    fixed=translation(1),
)
