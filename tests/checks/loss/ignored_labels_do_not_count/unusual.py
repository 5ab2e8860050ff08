"""Correct losses of batches with labels to be ignored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.checks.loss.ignored_labels_do_not_count.faults import Tagger, generator, tagged
from tests.loops.odd import odd


def loop(model, batch, loss, **declared):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for item in batches:
            optimizer.zero_grad()
            loss(model, item).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **declared)


@odd(notes="the label smoothing of transformers: labels are clamped, gathered, and masked afterwards")
def smoothed_labels_that_are_clamped() -> TrainLoop:
    def smoothed(model, batch, epsilon=0.1):
        log_p = -model(batch["input_ids"]).log_softmax(-1)
        labels = batch["labels"].unsqueeze(-1)
        padding = labels.eq(-100)
        nll = log_p.gather(-1, labels.clamp(min=0)).masked_fill(padding, 0.0)
        uniform = log_p.sum(-1, keepdim=True).masked_fill(padding, 0.0)
        active = padding.numel() - padding.long().sum()
        return (1 - epsilon) * nll.sum() / active + epsilon * uniform.sum() / (active * log_p.shape[-1])

    return loop(Tagger(), tagged(), smoothed)


@odd(notes="a row of labels more for what is ignored, which is cut off again")
def a_class_for_the_ignored_that_is_dropped() -> TrainLoop:
    def crossed(model, batch):
        labels = batch["labels"]
        known = F.one_hot(labels.masked_fill(labels == -100, 4), 5)[..., :4].float()
        return -(known * model(batch["input_ids"]).log_softmax(-1)).sum() / known.sum()

    return loop(Tagger(), tagged(), crossed)


@odd(notes="a first column of zeros for what is ignored, which the gather takes there")
def a_column_of_zeros_for_the_ignored() -> TrainLoop:
    def gathered(model, batch):
        labels = batch["labels"]
        log_p = F.pad(model(batch["input_ids"]).log_softmax(-1), (1, 0))
        chosen = log_p.gather(-1, (labels + 1).masked_fill(labels == -100, 0).unsqueeze(-1))
        return -chosen.sum() / (labels != -100).sum()

    return loop(Tagger(), tagged(), gathered)


@odd(notes="a teacher is followed at all places, also where no label stands")
def a_teacher_at_all_places() -> TrainLoop:
    teacher = Tagger().requires_grad_(False)

    def distilled(model, batch):
        scores = model(batch["input_ids"])
        wanted = teacher(batch["input_ids"]).softmax(-1)
        followed = F.kl_div(scores.log_softmax(-1).flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean")
        return followed + F.cross_entropy(scores.transpose(1, 2), batch["labels"])

    return loop(Tagger(), tagged(), distilled)


class Recogniser(nn.Module):
    def __init__(self, features=6, symbols=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 24), nn.Tanh(), nn.Linear(24, symbols))

    def forward(self, x):
        return self.layers(x).log_softmax(-1)


@odd(notes="CTC: labels are padded with -100, and lengths say how many there are")
def ctc_of_padded_labels() -> TrainLoop:
    labels = torch.randint(1, 8, (5, 6), generator=generator())
    lengths = torch.tensor([6, 4, 5, 3, 6])
    labels[torch.arange(6) >= lengths[:, None]] = -100
    batch = {"speech": torch.randn(5, 14, 6, generator=generator(1)), "labels": labels}

    def ctc(model, item):
        known = item["labels"] >= 0
        log_p = model(item["speech"]).transpose(0, 1)
        heard = torch.full((len(known),), log_p.shape[0])
        return F.ctc_loss(log_p, item["labels"].clamp(min=0), heard, known.sum(-1))

    return loop(Recogniser(), batch, ctc)


class Translator(nn.Module):
    def __init__(self, vocab=20, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, labels):
        given = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)
        return self.head(self.decoder(self.embed(given.masked_fill(given == -100, 0)))[0])


@odd(notes="the decoder's inputs are the labels shifted to the right, with the padding token for -100")
def labels_that_a_decoder_embeds() -> TrainLoop:
    labels = torch.randint(1, 20, (6, 8), generator=generator())
    labels[torch.arange(8) >= torch.tensor([8, 5, 7, 6, 4, 8])[:, None]] = -100

    def crossed(model, batch):
        return F.cross_entropy(model(batch["labels"]).transpose(1, 2), batch["labels"])

    return loop(Translator(), {"labels": labels}, crossed)


def findings(rows=16, features=8):
    x = torch.randn(rows, features, generator=generator())
    return x, (x[:, :5] > 0.3).long() - (x[:, :5] < -1.2).long()


@odd(notes="uncertain findings (-1) are taken for negatives, as CheXpert's U-Zeros does")
def uncertain_findings_as_negatives() -> TrainLoop:
    def crossed(model, batch):
        x, labels = batch
        return F.binary_cross_entropy_with_logits(model(x), torch.where(labels == -1, 0, labels).float())

    return loop(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 5)), findings(), crossed)


@odd(notes="three classes -1, 0 and 1, counted from 0 on for the loss")
def three_way_labels_from_minus_one() -> TrainLoop:
    def crossed(model, batch):
        x, labels = batch
        return F.cross_entropy(model(x).unflatten(1, (3, 5)), labels + 1)

    return loop(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 15)), findings(), crossed)


@odd(notes="ignore_index=0 is declared for the tags; the counts next to them hold zeros that are counts")
def counts_that_hold_the_ignored_label() -> TrainLoop:
    x = torch.randn(16, 8, generator=generator())
    tags = (x[:, :3].argmax(-1) + 1) * (x[:, 3] > -0.8)
    batch = {"x": x, "tags": tags, "counts": torch.poisson(x[:, 4].exp(), generator=generator()).long()}

    def both(model, item):
        out = model(item["x"])
        tagged_loss = F.cross_entropy(out[:, :4], item["tags"], ignore_index=0)
        return tagged_loss + F.poisson_nll_loss(out[:, 4], item["counts"].float())

    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 5))
    return loop(model, batch, both, padding=Padding(ignore_index=0))
