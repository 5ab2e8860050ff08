"""Labels against the ids that a causal model is given."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.loops import data, plain
from tests.loops.nets import GPT
from tests.loops.pairs import pair


def loop(model, batch, loss_of, batches=None, **fields):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    return plain.loop(model, batch, loss_of, optimizer, batches=batches, **fields)


class ForCausalLM(nn.Module):
    def __init__(self, shifts):
        super().__init__()
        self.lm = GPT(length=16)
        self.shifts = shifts

    def forward(self, input_ids, labels):
        scores = self.lm(input_ids)
        if self.shifts:
            scores, labels = scores[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return {"loss": F.cross_entropy(scores.view(-1, scores.size(-1)), labels.view(-1)), "logits": scores}


def causal(shifts, shifted):
    def make():
        inputs, following = data.tokens(rows=6, length=16)
        labels = following if shifted else inputs.clone()
        batch = {"input_ids": inputs, "labels": labels}
        return loop(ForCausalLM(shifts), batch, lambda model, batch: model(**batch)["loss"])

    return make


pair(
    "labels_shifted_by_the_data_and_by_the_model",
    "loss_contract",
    "shifted_twice",
    culprits=("labels",),
    where='return {"loss": F.cross_entropy(',
    faulty=causal(shifts=True, shifted=True),
    fixed=causal(shifts=True, shifted=False),
)
pair(
    "labels_shifted_by_nobody",
    "loss_contract",
    "not_shifted",
    faulty=causal(shifts=False, shifted=False),
    fixed=causal(shifts=False, shifted=True),
)


# Supervised fine-tuning: only the answer is labelled, and the data set has shifted the labels already.


def answers(prompt, rows=4, length=12, seed=0):
    """Ids, and as labels the ids one position ahead, those of the prompt ignored."""
    ids, following = data.tokens(rows=rows, length=length, vocab=32, seed=seed)
    labels = following.clone()
    labels[:, :prompt] = labels[:, -1:] = -100
    return ids, labels


def given(model, batch):
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)


def moved_on_again(model, batch):
    ids, labels = batch
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def tuned(loss_of, prompt=6, model=lambda: GPT(vocab=32), one_batch=True, rows=4):
    def make():
        batches = None if one_batch else lambda n: [answers(prompt, rows, seed=i) for i in range(n)]
        return loop(model(), answers(prompt, rows), loss_of, batches)

    return make


class Adapted(nn.Module):
    """A frozen language model whose blocks train low-rank terms (the embeddings do not train)."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.lm = GPT(vocab=32).requires_grad_(False)
        width = self.lm.head.in_features
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        nn.init.zeros_(self.up.weight)
        self.reentrant = reentrant

    def forward(self, ids):
        x = self.lm.token(ids) + self.lm.position(torch.arange(ids.shape[1]))
        if self.reentrant:
            x = x.requires_grad_()
        for block in self.lm.blocks:
            x = x + self.up(self.down(x))
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.lm.head(self.lm.norm(x))


for title, options in {
    "of_half_the_row": {},
    "of_adapters": {"model": Adapted, "prompt": 0},
    "of_adapters_under_a_reentrant_checkpoint": {"model": lambda: Adapted(reentrant=True)},
}.items():
    pair(
        f"labels_shifted_twice_{title}",
        "loss_contract",
        "shifted_twice",
        culprits=("labels",),
        mentions=("2 positions ahead",),
        where="labels[:, 1:].flatten()",
        faulty=tuned(moved_on_again, **options),
        fixed=tuned(given, **options),
    )


# A decoder is given the words themselves in place of the words before, or loses one more in the loss.


class Seq2Seq(nn.Module):
    def __init__(self, vocab=16, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocab + 1, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, source, words):
        _, state = self.encoder(self.embed(source))
        hidden, _ = self.decoder(self.embed(words), state)
        return self.head(hidden)


def translated(loss_of):
    def make():
        source, words = data.tokens(rows=6)
        return loop(Seq2Seq(), {"source": source, "labels": words.flip(1)}, loss_of)

    return make


def shift_right(words):
    return torch.cat([torch.full((len(words), 1), 16), words[:, :-1]], 1)


def teacher_forced(model, batch):
    scores = model(batch["source"], shift_right(batch["labels"]))
    return F.cross_entropy(scores.transpose(1, 2), batch["labels"])


def given_the_answer(model, batch):
    scores = model(batch["source"], batch["labels"])
    return F.cross_entropy(scores.transpose(1, 2), batch["labels"])


def shifted_on_both_sides(model, batch):
    scores = model(batch["source"], shift_right(batch["labels"]))
    return F.cross_entropy(scores[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


pair(
    "decoder_is_given_the_answer",
    "loss_contract",
    "not_shifted",
    faulty=translated(given_the_answer),
    fixed=translated(teacher_forced),
)
pair(
    "decoder_inputs_shifted_and_labels_too",
    "loss_contract",
    "shifted_twice",
    faulty=translated(shifted_on_both_sides),
    fixed=translated(teacher_forced),
)
