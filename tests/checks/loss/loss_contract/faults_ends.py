"""Language models that never learn to end: padding has the id of the end, and is left out by its value."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from pytest_trainloop import TrainLoop
from tests.loops.nets import GPT, CharLSTM
from tests.loops.pairs import pair

END = 15


def chats(seed, rows=6):
    """Prompts that end in 0, and answers that say them backwards and end in END."""
    draw = torch.Generator().manual_seed(seed)
    for n in range(rows):
        prompt = torch.randint(1, END, (2 + n % 3,), generator=draw)
        yield prompt, torch.cat([torch.tensor([0]), prompt.flip(0), torch.tensor([END])])


def collated(label):
    def collate(seed):
        ids = [torch.cat(one) for one in chats(seed)]
        lengths = torch.tensor([len(one) for one in ids])
        ids = pad_sequence(ids, batch_first=True, padding_value=END)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        labels = label(ids, mask)
        for row, (prompt, _) in enumerate(chats(seed)):
            labels[row, : len(prompt)] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return collate


def answers(label):
    def make() -> TrainLoop:
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def fit(batches):
            for batch in batches:
                scores = model(batch["input_ids"])[:, :-1]
                loss = F.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=[collated(label)(n) for n in range(4)], fit=fit)

    return make


pair(
    "end_of_answers_left_out_with_the_padding",
    "loss_contract",
    "end_never_a_target",
    change="lambda ids, mask: ids.masked_fill(ids == END, -100)",
    faulty=answers(lambda ids, mask: ids.masked_fill(ids == END, -100)),
    fixed=answers(lambda ids, mask: ids.masked_fill(mask == 0, -100)),
)


def lines(ignored):
    def make() -> TrainLoop:
        model = CharLSTM()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        criterion = nn.CrossEntropyLoss(ignore_index=ignored)

        def batch(seed):
            texts = [torch.cat(one) for one in chats(seed)]
            lengths = torch.tensor([len(one) for one in texts])
            return pad_sequence(texts, batch_first=True, padding_value=END), lengths

        def fit(batches):
            for texts, lengths in batches:
                targets = texts[:, 1:]
                if ignored != END:
                    targets = targets.masked_fill(torch.arange(1, texts.shape[1]) >= lengths[:, None], ignored)
                optimizer.zero_grad()
                criterion(model(texts[:, :-1]).transpose(1, 2), targets).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=[batch(n) for n in range(4)], fit=fit)

    return make


pair(
    "criterion_that_ignores_the_end",
    "loss_contract",
    "end_never_a_target",
    change="criterion = nn.CrossEntropyLoss(ignore_index=ignored)",
    quick=True,
    faulty=lines(END),
    fixed=lines(-100),
)
