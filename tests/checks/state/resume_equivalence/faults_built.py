"""Checkpoints without what was drawn when the loop was built, and positions in an epoch that are kept for too long."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from tests.checks.state.resume_equivalence.built import WORDS, classifier
from tests.loops import data
from tests.loops.pairs import pair

CHECK = "resume_equivalence"

# A split that is drawn again: training reads what the first run held out. https://github.com/aiqm/torchani/issues/443


def halved(generator):
    def make():
        parts = random_split(TensorDataset(*data.labelled(rows=48)), [36, 12], generator=generator())
        batches, held_out = DataLoader(parts[0], 6, shuffle=True), DataLoader(parts[1], 12)
        score = lambda model: sum(F.cross_entropy(model(x), y).item() for x, y in held_out)  # noqa: E731
        return classifier({}, batches=batches, evaluate=score)

    return make


def by_index(keys):
    def make():
        x, y = data.labelled(rows=48)
        order = list(range(48))
        random.shuffle(order)
        held = {"train": order[:36], "valid": order[36:]}

        def batches(n):
            for _ in range(n):
                rows = random.sample(held["train"], 6)
                yield x[rows], y[rows]

        score = lambda model: F.cross_entropy(model(x[held["valid"]]), y[held["valid"]]).item()  # noqa: E731
        return classifier(held, keys, batches=batches, evaluate=score)

    return make


pair(
    "split_without_a_generator",
    CHECK,
    "split_drawn_again",
    level="advice",
    change="random_split(",
    quick=True,
    faulty=halved(lambda: torch.default_generator),
    fixed=halved(lambda: torch.Generator().manual_seed(0)),
)

pair(
    "indices_of_a_split_not_saved",
    CHECK,
    "split_drawn_again",
    level="advice",
    change="random.shuffle(order)",
    faulty=by_index(()),
    fixed=by_index(("train", "valid")),
)


# A projection and the order of classes, drawn outside of the model.


def projected(keys):
    def make():
        held = {"projection": torch.randn(6, 6) / 6**0.5}
        return classifier(held, keys, prepare=lambda x: x @ held["projection"].to(x.dtype), batch=data.labelled())

    return make


class Flips:
    def __init__(self, drawn):
        self.signs = torch.randint(0, 2, (6,)) * 2 - 1 if drawn else torch.tensor([1, -1, 1, 1, -1, -1])


def flipped(drawn):
    def make():
        flips = Flips(drawn)
        return classifier({}, prepare=lambda x: x * flips.signs, batch=data.labelled())

    return make


pair(
    "projection_of_the_features_not_saved",
    CHECK,
    "drawn_from_seed",
    level="advice",
    culprits=("held['projection']",),
    mentions=("in load",),
    faulty=projected(()),
    fixed=projected(("projection",)),
)

pair(
    "signs_of_the_features_not_saved",
    CHECK,
    "drawn_from_seed",
    level="advice",
    culprits=("flips.signs",),
    change="self.signs =",
    faulty=flipped(drawn=True),
    fixed=flipped(drawn=False),
)


# The batch to begin at after a resume, for all epochs. https://github.com/allenai/open-instruct/pull/681


def skipping(first_epoch_only):
    def make():
        held = {"resume_step": 0, "step": 0}
        x, y = data.labelled(rows=48)

        def fit_of(step):
            def fit(batches):
                for epoch in range(3):
                    for number, (inputs, labels) in enumerate(batches):
                        if number < held["resume_step"] and not (first_epoch_only and epoch):
                            continue
                        step(inputs, labels)
                        held["step"] = number + 1

            return fit

        batches, loaded = list(zip(x.split(6), y.split(6), strict=True)), lambda: held.update(resume_step=held["step"])
        return classifier(held, ("step",), fit_of=fit_of, loaded=loaded, batches=batches)

    return make


class Positioned:
    """Batches in an order for each epoch, from the position on that was loaded."""

    def __init__(self, sets_back):
        self.sets_back, self.held, self.rows = sets_back, {"epoch": 0, "first": 0}, data.labelled(rows=48)

    def take(self, n):
        while True:
            order = torch.randperm(48, generator=torch.Generator().manual_seed(self.held["epoch"])).split(6)
            for number in range(self.held["first"], 8):
                if self.sets_back:
                    self.held["first"] = (number + 1) % 8
                self.held["next"] = number + 1
                yield tuple(part[order[number]] for part in self.rows)
            self.held["epoch"] += 1


def positioned(sets_back):
    def make():
        source = Positioned(sets_back)
        loaded = lambda: source.held.update(first=source.held["next"])  # noqa: E731
        return classifier(source.held, ("epoch", "next"), loaded=loaded, batches=source.take)

    return make


pair(
    "batches_skipped_in_every_epoch",
    CHECK,
    "later_epochs_cut_short",
    culprits=("held['resume_step']",),
    change='number < held["resume_step"]',
    faulty=skipping(first_epoch_only=False),
    fixed=skipping(first_epoch_only=True),
)

pair(
    "every_epoch_begins_where_training_resumed",
    CHECK,
    "later_epochs_cut_short",
    culprits=("held['first']",),
    change='range(self.held["first"], 8)',
    quick=True,
    faulty=positioned(sets_back=False),
    fixed=positioned(sets_back=True),
)


# Words and classes that are numbered in the order of a set: the hash of a string is another in each process.


def worded(order, keys=()):
    def make():
        held = {"numbers": {word: number for number, word in enumerate(order(WORDS))}}
        rows = torch.randn(len(WORDS), 6, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(12) % 3
        numbers = [held["numbers"][word] for word in WORDS[:12]]
        return classifier(held, keys, prepare=lambda x: x + rows[numbers].to(x.dtype), batch=(rows[:12], labels))

    return make


class Vocabulary:
    def __init__(self, order):
        self.numbers = {word: number for number, word in enumerate(["<pad>", "<unk>", *order(WORDS)])}


def encoded(order):
    def make():
        vocabulary = Vocabulary(order)
        made = classifier({}, batch=data.labelled())
        made.model.vocabulary = vocabulary
        return made

    return make


for order_of, culprit, build in (
    ("words_in_a_dict", "held['numbers']", worded),
    ("words_of_a_vocabulary", "model.vocabulary.numbers", encoded),
):
    pair(
        f"{order_of}_in_the_order_of_a_set",
        CHECK,
        "numbered_by_a_set",
        level="advice",
        culprits=(culprit,),
        mentions=("sorted(set(",),
        quick=build is encoded,
        faulty=build(set),
        fixed=build(lambda words: sorted(set(words))),
    )
