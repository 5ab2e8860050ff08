"""Soft targets that are no distribution on purpose, or become one in an odd way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import points


def loop(model, batch, loss_of, **others):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for item in batches:
            optimizer.zero_grad()
            loss_of(model, item).backward()
            optimizer.step()

    return TrainLoop(model={"model": model, **others}, optimizer=optimizer, batch=batch, fit=fit)


def hot(labels, like):
    return F.one_hot(labels, 4).to(like.dtype)


@odd(notes="mixup: labels of two rows mixed in random shares")
def mixed_labels() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        share, other = torch.rand(len(x), 1, dtype=x.dtype), torch.randperm(len(x))
        mixed = share * hot(y, x) + (1 - share) * hot(y[other], x)
        return F.cross_entropy(model(share * x + (1 - share) * x[other]), mixed)

    return loop(relu_mlp(8, 24, 4), points(), loss_of)


@odd(notes="a teacher's probabilities are sharpened by a softmax of themselves at a low temperature")
def sharpened_probabilities_of_a_teacher() -> TrainLoop:
    teacher = relu_mlp(8, 8, 4)

    def loss_of(model, batch):
        with torch.no_grad():
            sharp = (teacher(batch[0]).softmax(-1) / 0.05).softmax(-1)
        return F.cross_entropy(model(batch[0]), sharp) + F.cross_entropy(model(batch[0]), batch[1])

    return loop(relu_mlp(8, 24, 4), points(), loss_of, teacher=teacher)


@odd(notes="targets balanced over the batch by Sinkhorn steps, as in SwAV: rows sum to 1, columns nearly alike")
def targets_balanced_over_the_batch() -> TrainLoop:
    heads = nn.Linear(8, 4, bias=False)

    def balanced(scores):
        q = torch.exp(scores / 0.5)
        for _ in range(3):
            q = q / q.sum(0, keepdim=True)
            q = q / q.sum(1, keepdim=True)
        return q

    def loss_of(model, batch):
        x, y = batch
        with torch.no_grad():
            wanted = balanced(heads(x))
        return F.cross_entropy(model(x), wanted) + F.cross_entropy(model(x), y)

    return loop(relu_mlp(8, 24, 4), points(), loss_of, heads=heads)


@odd(notes="odds of two classes: a sigmoid and what is left of 1")
def sigmoid_and_its_complement() -> TrainLoop:
    teacher = relu_mlp(8, 8, 1)

    def loss_of(model, batch):
        with torch.no_grad():
            p = torch.sigmoid(2 * teacher(batch[0]))
        return F.cross_entropy(model(batch[0]), torch.cat([p, 1 - p], 1))

    return loop(relu_mlp(8, 24, 2), points(), loss_of, teacher=teacher)


@odd(notes="gated labels: a sigmoid of the row's quality times a one-hot label weighs the row")
def labels_times_a_gate() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), hot(y, x) * torch.sigmoid(x.sum(1, keepdim=True)))

    return loop(relu_mlp(8, 24, 4), points(), loss_of)


@odd(notes="targets are the inputs shifted by one: behind the last token comes padding, which ignore_index leaves out")
def shifted_targets_end_in_padding() -> TrainLoop:
    pad, end = 1, 3
    model = nn.Sequential(nn.Embedding(20, 16, padding_idx=pad), nn.Linear(16, 20))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for ids in batches:
            inputs, gold = ids[:, :-1], ids[:, 1:].contiguous().view(-1)
            optimizer.zero_grad()
            scores = model(inputs).view(-1, 20)
            F.cross_entropy(scores, gold, ignore_index=pad, reduction="sum").backward()
            optimizer.step()

    ids = torch.randint(4, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate((6, 5, 4, 6)):
        ids[row, length - 1], ids[row, length:] = end, pad
    return TrainLoop(model=model, optimizer=optimizer, batch=ids, fit=fit)


@odd(notes="masked words: positions that are not asked for have the padding token as label, which is ignored (BERT)")
def words_that_are_not_masked_have_the_label_of_padding() -> TrainLoop:
    embed, words = nn.Embedding(20, 16, padding_idx=0), nn.Linear(32, 20)
    context = nn.GRU(16, 16, batch_first=True, bidirectional=True)
    model = nn.ModuleDict({"embed": embed, "context": context, "words": words})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.NLLLoss(ignore_index=0)

    def fit(batches):
        for ids, labels in batches:
            optimizer.zero_grad()
            scores = words(context(embed(ids))[0])
            criterion(scores.log_softmax(-1).transpose(1, 2), labels).backward()
            optimizer.step()

    ids = torch.randint(5, 20, (4, 8), generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(4, 8).long()
    labels[:, 1:3], ids[:, 1:3] = ids[:, 1:3], 4
    ids[1, 6:] = 0
    return TrainLoop(model=model, optimizer=optimizer, batch=(ids, labels), fit=fit)
