"""Loops that draw what they are built with, or skip batches after a resume, and are right."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.checks.state.resume_equivalence.built import WORDS, classifier
from tests.loops import data
from tests.loops.odd import odd


def held_out(train, valid, rows):
    """Trains on some rows, in random batches, and scores others."""

    def batches(n):
        for _ in range(n):
            chosen = train[torch.randint(len(train), (6,))]
            yield tuple(part[chosen] for part in rows)

    score = lambda model: F.cross_entropy(model(rows[0][valid]), rows[1][valid]).item()  # noqa: E731
    return classifier({}, batches=batches, evaluate=score)


@odd(notes="the rows that are trained on come in a drawn order; those that are held out are the last ones")
def rows_shuffled_at_build():
    return held_out(torch.randperm(36), torch.arange(36, 48), data.labelled(rows=48))


@odd(notes="the data are made for the test, under its seed; the split is the same in each run")
def data_drawn_at_build():
    rows = torch.randn(48, 6), torch.randint(3, (48,))
    return held_out(torch.arange(36), torch.arange(36, 48), rows)


@odd(notes="the project seeds before it splits")
def split_after_a_seed():
    torch.manual_seed(7)
    order = torch.randperm(48)
    return held_out(order[:36], order[36:], data.labelled(rows=48))


@odd(notes="evaluation scores a drawn part of the rows that are trained on as well")
def scored_on_a_part_of_the_training_rows():
    return held_out(torch.arange(48), torch.randperm(48)[:12], data.labelled(rows=48))


@odd(notes="the example inputs of a logger are drawn at build and never trained on")
def example_inputs_drawn_at_build():
    held, seen = {"example": torch.randn(4, 6)}, []

    def prepare(x):
        seen[:] = held["example"].shape
        return x

    return classifier(held, prepare=prepare, batch=data.labelled())


@odd(notes="noise is drawn for each batch, and each start draws other noise on purpose")
def inputs_with_noise_of_each_batch():
    noisy = lambda x: x + 0.01 * torch.randn_like(x)  # noqa: E731
    return classifier({}, prepare=noisy, batch=data.labelled(), renews=("rng",))


@odd(notes="fit trains on a pool of its own, made for the test, next to the batches that it is given")
def a_pool_made_for_the_test():
    pool = torch.randn(24, 6)

    def fit_of(step):
        def fit(batches):
            for x, y in batches:
                step(torch.cat([x, pool[:8].to(x.dtype)]), torch.cat([y, torch.arange(8) % 3]))

        return fit

    return classifier({}, fit_of=fit_of, batch=data.labelled())


@odd(notes="a run over one epoch skips what it has trained on, and ends")
def one_epoch_that_is_resumed():
    held = {"done": 0, "resume_step": 0}

    def fit_of(step):
        def fit(batches):
            for number, (x, y) in enumerate(batches):
                if number >= held["resume_step"]:
                    step(x, y)
            held["resume_step"] = 0

        return fit

    return classifier(held, ("done",), fit_of=fit_of, batch=data.labelled())


@odd(notes="words are numbered as they come, by length, and in the order of a set that the checkpoint holds")
def words_numbered_in_other_orders():
    first, by_length = dict.fromkeys(WORDS), sorted(set(WORDS), key=lambda word: (len(word), word))
    orders = {"first": first, "length": by_length, "saved": set(WORDS)}
    held = {name: {word: number for number, word in enumerate(order)} for name, order in orders.items()}
    return classifier(held, ("saved",), batch=data.labelled())


@odd(notes="a set gives the order of counts and of files, and no number follows from it")
def names_in_the_order_of_a_set():
    held = {"files": [f"{word}.txt" for word in set(WORDS)], "counts": {word: WORDS.count(word) for word in set(WORDS)}}
    return classifier(held, batch=data.labelled())
