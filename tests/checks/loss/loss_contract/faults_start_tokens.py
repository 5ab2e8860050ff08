"""Sequences that begin with their start token twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops.nets import CharLSTM
from tests.loops.pairs import pair

START, END = 1, 2


def text(rows=6, length=9, vocab=16):
    return torch.randint(3, vocab, (rows, length))


def rendered(ids):
    """A chat template writes the start token itself."""
    return torch.cat([torch.full((len(ids), 1), START), ids, torch.full((len(ids), 1), END)], 1)


def tokenized(ids, add_special_tokens):
    return torch.cat([torch.full((len(ids), 1), START), ids], 1) if add_special_tokens else ids


def fine_tuning(add_special_tokens):
    def make():
        model = CharLSTM()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                ids = batch["input_ids"]
                F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
                optimizer.step()

        def batch():
            return {"input_ids": tokenized(rendered(text()), add_special_tokens)}

        return TrainLoop(
            model=model, optimizer=optimizer, batch=batch(), batches=lambda n: (batch() for _ in range(n)), fit=fit
        )

    return make


def captioning(strip):
    """The decoder shifts labels right and puts the start token first; the transcripts begin with it as well."""

    def make():
        model = CharLSTM()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                labels = batch["labels"]
                inputs = torch.cat([torch.full((len(labels), 1), START), labels[:, :-1]], 1)
                F.cross_entropy(model(inputs).transpose(1, 2), labels).backward()
                optimizer.step()

        def batch():
            labels = rendered(text())
            return {"labels": labels[:, 1:] if strip else labels}

        return TrainLoop(
            model=model, optimizer=optimizer, batch=batch(), batches=lambda n: (batch() for _ in range(n)), fit=fit
        )

    return make


pair(
    "chat_template_and_tokenizer_add_the_start_token",
    "loss_contract",
    "start_token_twice",
    level="advice",
    faulty=fine_tuning(add_special_tokens=True),
    fixed=fine_tuning(add_special_tokens=False),
    quick=True,
)
pair(
    "start_token_left_in_labels_that_are_shifted_right",
    "loss_contract",
    "start_token_twice",
    level="advice",
    faulty=captioning(strip=False),
    fixed=captioning(strip=True),
)
