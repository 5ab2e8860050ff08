"""What is backpropagated against the losses that were computed, and heads and lengths that do not fit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import AutoEncoder, CharLSTM, mlp
from tests.loops.pairs import pair


def train(optimizer, batches, loss_of):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


def loop(model, batch, loss_of, rate=5e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return TrainLoop(
        model=model, optimizer=optimizer, batch=batch, fit=lambda b: train(optimizer, b, lambda x: loss_of(model, x))
    )


# Two tasks on one trunk.


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.kind, self.values = nn.Linear(32, 3), nn.Linear(32, 6)

    def forward(self, features):
        hidden = self.trunk(features)
        return self.kind(hidden), self.values(hidden)


def tasks(total_of):
    def make():
        def loss_of(model, batch):
            features, labels = batch
            kind, values = model(features)
            return total_of(F.cross_entropy(kind, labels), F.mse_loss(values, features))

        return loop(TwoHeads(), data.labelled(), loss_of)

    return make


pair(
    "part_of_the_loss_subtracted",
    "loss_contract",
    "sign_flipped",
    level="advice",
    culprits=("mse_loss",),
    faulty=tasks(lambda kind, values: kind - 0.1 * values),
    fixed=tasks(lambda kind, values: kind + 0.1 * values),
)


def reconstruction(total_of):
    def make():
        def loss_of(model, batch):
            features, _labels = batch
            output = model(features)
            return total_of(F.mse_loss(output, features), F.l1_loss(output, features))

        return loop(AutoEncoder(), data.labelled(), loss_of)

    return make


pair(
    "part_of_the_loss_detached",
    "loss_contract",
    "part_detached",
    culprits=("l1_loss",),
    where="return total_of(F.mse_loss(output, features), F.l1_loss(output, features))",
    faulty=reconstruction(lambda squares, sizes: squares + 0.5 * sizes.detach()),
    fixed=reconstruction(lambda squares, sizes: squares + 0.5 * sizes),
)
pair(
    "part_of_the_loss_left_out",
    "loss_contract",
    "part_left_out",
    level="advice",
    culprits=("l1_loss",),
    faulty=reconstruction(lambda squares, sizes: squares),
    fixed=reconstruction(lambda squares, sizes: squares + sizes),
)


# Terms of the loss that are computed and then lost.


def fit_losing_a_term(model, batches, optimizer):
    for features, _labels in batches:
        output = model(features)
        squares = F.mse_loss(output, features)
        sizes = F.l1_loss(output, features)  # noqa: F841
        optimizer.zero_grad()
        squares.backward()
        optimizer.step()


def fit_replacing_a_term(model, batches, optimizer):
    for features, _labels in batches:
        output = model(features)
        loss = F.mse_loss(output, features)
        loss = 0.5 * F.l1_loss(output, features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fit_with_both_terms(model, batches, optimizer):
    for features, _labels in batches:
        output = model(features)
        loss = F.mse_loss(output, features)
        loss = loss + 0.5 * F.l1_loss(output, features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def two_terms(fit):
    def make():
        model = AutoEncoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model, optimizer=optimizer, batch=data.labelled(), fit=lambda b: fit(model, b, optimizer)
        )

    return make


for title, fit, culprit, line, words in (
    ("no_name_reads_a_part_of_the_loss", fit_losing_a_term, "l1_loss", "sizes = F.l1_loss", "reads sizes"),
    ("a_part_of_the_loss_is_replaced_by_the_next", fit_replacing_a_term, "mse_loss", "loss = F.mse", "replaces loss"),
):
    pair(
        title,
        "loss_contract",
        "part_left_out",
        culprits=(culprit,),
        where=line,
        mentions=(words,),
        faulty=two_terms(fit),
        fixed=two_terms(fit_with_both_terms),
    )


# A head of one output, and cross_entropy.


def one_or_two(outputs, loss):
    def make():
        return loop(mlp(6, 32, outputs), data.labelled(classes=2), lambda model, batch: loss(model(batch[0]), batch[1]))

    return make


pair(
    "one_output_under_cross_entropy",
    "loss_contract",
    "single_class",
    culprits=("cross_entropy",),
    faulty=one_or_two(1, lambda scores, labels: F.cross_entropy(scores, labels[:, None].to(scores.dtype))),
    fixed=one_or_two(2, F.cross_entropy),
)


# Frames are pooled, and their lengths are not.


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = nn.AvgPool1d(2)
        self.rnn, self.head = nn.GRU(4, 32, batch_first=True), nn.Linear(32, 6)

    def forward(self, frames):
        frames = self.pool(frames.transpose(1, 2)).transpose(1, 2)
        return self.head(self.rnn(frames)[0]).log_softmax(-1).transpose(0, 1)


def pooled(lengths_of):
    def make():
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(1, 6, (6, 4), generator=generator)
        frames = torch.randn(6, 4, generator=generator)[labels].repeat_interleave(5, 1)

        def loss_of(model, batch):
            frames, labels = batch
            counts = torch.full((len(frames),), frames.shape[1])
            return F.ctc_loss(model(frames), labels, lengths_of(counts), torch.full((len(labels),), 4))

        return loop(Pooled(), (frames, labels), loss_of)

    return make


pair(
    "lengths_of_frames_before_pooling",
    "loss_contract",
    "lengths_refused",
    raises="input_lengths",
    culprits=("lengths",),
    faulty=pooled(lambda counts: counts),
    fixed=pooled(lambda counts: counts // 2),
)


# The padding's label is that of a real tag.


def tags(label):
    def make():
        ids = data.tokens(rows=6, vocab=15)[0] + 1
        lengths = torch.tensor([12 - 2 * (n % 4) for n in range(6)])
        mask = torch.arange(12)[None] < lengths[:, None]
        labels = torch.where(mask, ids % 5, label)

        def loss_of(model, batch):
            scores = model(batch["ids"])[..., :5]
            return F.cross_entropy(scores.transpose(1, 2), batch["labels"], ignore_index=label)

        return loop(CharLSTM(), {"ids": ids * mask, "mask": mask, "labels": labels}, loss_of)

    return make


pair(
    "padding_and_a_tag_share_a_label",
    "loss_contract",
    "real_class_ignored",
    level="advice",
    culprits=("ignore_index=0",),
    faulty=tags(0),
    fixed=tags(-100),
)


# The criterion for masked words, which leaves out label 0, also judges whether a sentence follows: "no" is label 0.


def following(ignored):
    def make():
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(1, 20, (12, 6), generator=generator)
        of_pairs = nn.NLLLoss(ignore_index=ignored)

        class Pairs(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Embedding(20, 16, padding_idx=0), nn.Linear(16, 2)

            def forward(self, ids):
                return self.head(torch.tanh(self.embed(ids)).mean(1)).log_softmax(-1)

        return loop(Pairs(), (ids, (ids[:, 0] > ids[:, 3]).long()), lambda model, b: of_pairs(model(b[0]), b[1]))

    return make


pair(
    "criterion_of_masked_words_for_flags",
    "loss_contract",
    "real_class_ignored",
    culprits=("ignore_index=0",),
    faulty=following(0),
    fixed=following(-100),
)
