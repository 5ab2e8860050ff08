"""Labels to be ignored that count all the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.loops.pairs import pair
from tests.loops.plain import loop


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Tags of words, -100 at padding and inside words: a focal loss written by hand.


def tagged(rows=6, length=9, vocab=20, tags=4):
    ids = torch.randint(1, vocab, (rows, length), generator=generator())
    labels = ids % tags
    lengths = torch.tensor([length, 5, 7, 4, 8, 6])[:rows]
    outside = torch.arange(length) >= lengths[:, None]
    labels[outside | (ids % 5 == 0)] = -100
    return {"input_ids": ids.masked_fill(outside, 0), "labels": labels}


class Tagger(nn.Module):
    def __init__(self, vocab=20, tags=4, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, tags))

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, ignore_index=-100):
        super().__init__()
        self.gamma, self.ignore_index = gamma, ignore_index

    def terms(self, logits, labels):
        log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -((1 - log_p.exp()) ** self.gamma) * log_p

    def forward(self, logits, labels):
        keep = labels != self.ignore_index
        return (self.terms(logits, labels) * keep).sum() / keep.sum()


class FocalLossOfAllPlaces(FocalLoss):
    def forward(self, logits, labels):
        return self.terms(logits, labels).mean()


def tagging(criterion):
    def make():
        model, loss = Tagger(), criterion()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        return loop(model, tagged(), lambda model, batch: loss(model(batch["input_ids"]), batch["labels"]), optimizer)

    return make


pair(
    "focal_loss_of_clamped_labels",
    "ignored_labels_do_not_count",
    "ignored_labels_count",
    where="labels.clamp(min=0).unsqueeze(-1)",
    faulty=tagging(FocalLossOfAllPlaces),
    fixed=tagging(FocalLoss),
    quick=True,
)


# Segmentation with a border of uncertain pixels: the cross entropy leaves them out, the overlap does not.

UNCERTAIN = 2


class SoftDice(nn.Module):
    def forward(self, probability, mask):
        keep = (mask != UNCERTAIN).to(probability.dtype)
        return self.overlap(probability * keep, mask * keep)

    def overlap(self, probability, mask):
        both, all_of_it = (probability * mask).sum((1, 2)), (probability + mask).sum((1, 2))
        return 1 - ((2 * both + 1) / (all_of_it + 1)).mean()


class SoftDiceOfTheBorder(SoftDice):
    def forward(self, probability, mask):
        return self.overlap(probability, mask.to(probability.dtype))


def scans(rows=5, side=10):
    ys, xs = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    centres = 3 + 4 * torch.rand(rows, 2, generator=generator())
    distance = ((ys - centres[:, 0, None, None]) ** 2 + (xs - centres[:, 1, None, None]) ** 2).sqrt()
    mask = (distance < 3).long()
    image = mask + 0.3 * torch.randn(mask.shape, generator=generator(1))
    mask[(distance - 3).abs() < 0.6] = UNCERTAIN
    return image[:, None], mask


def segmenting(dice):
    def make():
        model = nn.Sequential(nn.Conv2d(1, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 1, 3, padding=1))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        overlap = dice()

        def fit(batches):
            for image, mask in batches:
                optimizer.zero_grad()
                scores = model(image)[:, 0]
                keep = mask != UNCERTAIN
                crossed = F.binary_cross_entropy_with_logits(scores[keep], mask[keep].float())
                (crossed + overlap(scores.sigmoid(), mask)).backward()
                optimizer.step()

        padding = Padding(ignore_index=UNCERTAIN)
        return TrainLoop(model=model, optimizer=optimizer, batch=scans(), fit=fit, padding=padding)

    return make


pair(
    "dice_of_uncertain_pixels",
    "ignored_labels_do_not_count",
    "ignored_labels_count",
    where="both, all_of_it =",
    faulty=segmenting(SoftDiceOfTheBorder),
    fixed=segmenting(SoftDice),
)


# The log-probability of answers, -1 where the question stands: the mask is taken for its opposite.


class Answers:
    IGNORED = -1

    def __init__(self):
        self.model = Tagger(tags=20)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def counted(self, labels):
        return labels != self.IGNORED

    def log_probability(self, ids, labels):
        places = labels.masked_fill(labels == self.IGNORED, 0)
        each = self.model(ids).log_softmax(-1).gather(-1, places[..., None])[..., 0]
        counted = self.counted(labels)
        return (each * counted).sum(-1) / counted.sum(-1)

    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            good = self.log_probability(batch["good"], batch["good_labels"])
            bad = self.log_probability(batch["bad"], batch["bad_labels"])
            (-F.logsigmoid(good - bad).mean()).backward()
            self.optimizer.step()


class AnswersByTheQuestion(Answers):
    def counted(self, labels):
        return labels == self.IGNORED


def preferences(rows=6, length=8, question=3):
    made = {}
    for seed, name in enumerate(("good", "bad")):
        ids = torch.randint(1, 20, (rows, length), generator=generator(seed))
        labels = (ids + 1 + seed) % 20
        labels[:, :question] = Answers.IGNORED
        made |= {name: ids, f"{name}_labels": labels}
    return made


def preferring(trainer):
    def make():
        made = trainer()
        return TrainLoop(model=made.model, optimizer=made.optimizer, batch=preferences(), fit=made.fit)

    return make


pair(
    "answers_by_an_inverted_mask",
    "ignored_labels_do_not_count",
    "only_ignored_labels_count",
    where="each = self.model(ids)",
    faulty=preferring(AnswersByTheQuestion),
    fixed=preferring(Answers),
)


class TaggerByTheRest:
    """A weight for each place, 0 where nothing is known."""

    def __init__(self):
        self.model = Tagger()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)

    def weights(self, labels):
        return (labels >= 0).float()

    def fit(self, batches):
        for batch in batches:
            labels = batch["labels"]
            weights = self.weights(labels)
            known = F.one_hot(torch.where(labels < 0, torch.zeros_like(labels), labels), 4)
            self.optimizer.zero_grad()
            each = -(known * self.model(batch["input_ids"]).log_softmax(-1)).sum(-1)
            ((each * weights).sum() / weights.sum()).backward()
            self.optimizer.step()


class TaggerByTheUnknown(TaggerByTheRest):
    def weights(self, labels):
        return (labels < 0).float()


def weighing(trainer):
    def make():
        made = trainer()
        return TrainLoop(model=made.model, optimizer=made.optimizer, batch=tagged(), fit=made.fit)

    return make


pair(
    "weights_of_the_unknown",
    "ignored_labels_do_not_count",
    "only_ignored_labels_count",
    where="known = F.one_hot",
    faulty=weighing(TaggerByTheUnknown),
    fixed=weighing(TaggerByTheRest),
)


# https://github.com/QwenAudio/CosyVoice/issues/1449: rejected answers under the mask of the chosen ones. No answer has
# the label 0, which the gather gets where there is none.


def preferred(own_mask):
    def make():
        model = Tagger(tags=6)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        answers = {"chosen": tagged(tags=5), "rejected": tagged(tags=5)}
        batch = {name: answer["input_ids"].roll(i) for i, (name, answer) in enumerate(answers.items())}
        for i, (name, answer) in enumerate(answers.items()):
            labels = answer["labels"].flip(i)
            batch[f"{name}_labels"] = torch.where(labels == -100, labels, labels + 1)

        def log_p(given, name, kept):
            labels = given[f"{name}_labels"]
            known = labels.masked_fill(labels == -100, 0).unsqueeze(-1)
            return (model(given[name]).log_softmax(-1).gather(-1, known).squeeze(-1) * kept).sum(-1)

        def fit(batches):
            for given in batches:
                keep = {name: given[f"{name}_labels"] != -100 for name in ("chosen", "rejected")}
                optimizer.zero_grad()
                rejected = log_p(given, "rejected", keep["rejected" if own_mask else "chosen"])
                better = log_p(given, "chosen", keep["chosen"]) - rejected
                (-F.logsigmoid(0.1 * better).mean()).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "rejected_answers_under_the_mask_of_the_chosen",
    "ignored_labels_do_not_count",
    "ignored_labels_count",
    culprits=("rejected_labels",),
    faulty=preferred(own_mask=False),
    fixed=preferred(own_mask=True),
)
