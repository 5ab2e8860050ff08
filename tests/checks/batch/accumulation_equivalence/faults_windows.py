"""Windows of micro-batches that lose some, keep some of the last window, or end too early."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, CharLSTM, lm_loss, mlp
from tests.loops.pairs import pair


def project(train, build, batch, learning_rate=3e-3):
    """A loop with the knob around one of the functions below."""

    def make(accumulate=1):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=batch(),
            fit=lambda batches: train(model, optimizer, batches, accumulate),
        )

    return make


def classifier(train):
    return project(train, lambda: mlp(6, 24, 3), data.labelled)


# Backward stands within the `if` of the step: only the last micro-batch's loss is ever backpropagated.


def train_backward_in_the_if(model, optimizer, batches, accumulate):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y) / accumulate
        if (i + 1) % accumulate == 0:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def train(model, optimizer, batches, accumulate):
    optimizer.zero_grad()
    whole = len(batches) // accumulate * accumulate
    for i, (x, y) in enumerate(batches):
        if i == whole:
            break
        loss = F.cross_entropy(model(x), y) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


pair(
    "backward_within_the_if",
    "accumulation_equivalence",
    "only_last_counts",
    culprits=("loss.backward()",),
    where="loss.backward()",
    faulty=classifier(train_backward_in_the_if),
    fixed=classifier(train),
)


# Gradients set to None by hand before each backward.


class Trainer:
    def __init__(self, model, accumulate, fresh_each):
        self.model, self.accumulate, self.fresh_each = model, accumulate, fresh_each
        self.optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def clear(self):
        for p in self.model.parameters():
            p.grad = None

    def window(self, batches):
        self.clear()
        for batch in batches:
            if self.fresh_each:
                self.clear()
            (lm_loss(self.model, batch) / len(batches)).backward()
        self.optimizer.step()

    def fit(self, batches):
        held = []
        for batch in batches:
            held.append(batch)
            if len(held) == self.accumulate:
                self.window(held)
                held = []


def trainer(build, fresh_each):
    def make(accumulate=1):
        made = Trainer(build(), accumulate, fresh_each)
        return TrainLoop(model=made.model, optimizer=made.optimizer, batch=data.tokens(rows=6), fit=made.fit)

    return make


pair(
    "gradients_set_to_none_each_micro_batch",
    "step_order",
    "zeroed_inside_window",
    faulty=trainer(GPT, fresh_each=True),
    fixed=trainer(GPT, fresh_each=False),
)


# The window's end is tested with `i`, which starts at 0: the first step comes after one micro-batch.


def train_stepping_on_the_first(model, optimizer, batches, accumulate):
    for i, (x, y) in enumerate(batches):
        (F.cross_entropy(model(x), y) / accumulate).backward()
        if i % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


pair(
    "step_when_the_index_divides",
    "accumulation_equivalence",
    "stepped_inside_window",
    culprits=("optimizer.step()",),
    where="optimizer.step()",
    faulty=classifier(train_stepping_on_the_first),
    fixed=classifier(train),
    quick=True,
)


# The step was indented to the loop's level; only zeroing waits for the window.


def train_step_outside_the_if(model, optimizer, batches, accumulate):
    for i, batch in enumerate(batches, start=1):
        loss = lm_loss(model, batch) / accumulate
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if i % accumulate == 0:
            optimizer.zero_grad()


def train_step_in_the_if(model, optimizer, batches, accumulate):
    count = 0
    for batch in batches:
        count += 1
        loss = lm_loss(model, batch) / accumulate
        loss.backward()
        if count == accumulate:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            count = 0
    if count:
        for p in model.parameters():
            p.grad.mul_(accumulate / count)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


pair(
    "step_outside_the_if",
    "accumulation_equivalence",
    "stepped_inside_window",
    where="optimizer.step()",
    faulty=project(train_step_outside_the_if, CharLSTM, data.tokens),
    fixed=project(train_step_in_the_if, CharLSTM, data.tokens),
)


# Zeroing waits for a sync point that only a window of one always hits.


def train_zeroed_every_other_window(model, optimizer, batches, accumulate):
    steps = 0
    for i, (x, y) in enumerate(batches, start=1):
        (F.mse_loss(model(x), y) / accumulate).backward()
        if i % accumulate == 0:
            optimizer.step()
            steps += 1
            if steps % accumulate == 0:
                optimizer.zero_grad()


def train_zeroed_each_window(model, optimizer, batches, accumulate):
    with contextlib.suppress(StopIteration):
        source = iter(batches)
        while True:
            window = [next(source) for _ in range(accumulate)]
            optimizer.zero_grad()
            for x, y in window:
                (F.mse_loss(model(x), y) / accumulate).backward()
            optimizer.step()


def regression(train):
    return project(train, lambda: mlp(6, 24, 1), data.table)


pair(
    "zeroed_when_steps_divide",
    "accumulation_equivalence",
    "carried_over",
    culprits=("optimizer.step()",),
    where="optimizer.step()",
    faulty=regression(train_zeroed_every_other_window),
    fixed=regression(train_zeroed_each_window),
)


# The last window is not full, and nobody steps for it.


def train_tail_dropped_silently(model, optimizer, batches, accumulate):
    pending = 0
    for x, y in batches:
        (F.mse_loss(model(x), y) / accumulate).backward()
        pending += 1
        if pending == accumulate:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            pending = 0


pair(
    "tail_dropped_silently",
    "accumulation_equivalence",
    "last_window_lost",
    level="advice",
    culprits=("optimizer.step()",),
    faulty=regression(train_tail_dropped_silently),
    fixed=regression(train_zeroed_each_window),
    quick=True,
)


# The schedule advances with each micro-batch, so that it ends k times too early.


def scheduled(each_micro_batch):
    def make(accumulate=1):
        model = mlp(6, 24, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)

        def fit(batches):
            for i, (x, y) in enumerate(batches, start=1):
                (F.cross_entropy(model(x), y) / accumulate).backward()
                due = i % accumulate == 0 or i == len(batches)
                if due:
                    optimizer.step()
                    optimizer.zero_grad()
                if due or each_micro_batch:
                    scheduler.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "schedule_by_micro_batch",
    "accumulation_equivalence",
    "scheduled_inside_window",
    where="scheduler.step()",
    culprits=("scheduler.step()",),
    faulty=scheduled(each_micro_batch=True),
    fixed=scheduled(each_micro_batch=False),
    quick=True,
)
