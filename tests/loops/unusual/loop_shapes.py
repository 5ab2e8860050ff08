"""The shape of the loop itself: where zeroing stands, how batches are fetched, when it stops."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def classifier(train, *, lr=0.1, batches=None, momentum=0.0):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=batches,
        fit=lambda given: train(model, optimizer, given),
    )


def zero_after_step(model, optimizer, batches):
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@odd(notes="gradients are zeroed after the step: the first backward meets none, the last leaves none")
def zero_grad_after_the_step() -> TrainLoop:
    return classifier(zero_after_step, batches=fresh(points))


def zero_before_backward(model, optimizer, batches):
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        model.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()


@odd(notes="the model zeroes, not the optimizer, between forward and backward, and fills with zeros in place of None")
def model_zero_grad_between_forward_and_backward() -> TrainLoop:
    return classifier(zero_before_backward, momentum=0.9)


def zero_everywhere(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()


@odd(notes="gradients are zeroed five times where once would do")
def zero_grad_everywhere() -> TrainLoop:
    return classifier(zero_everywhere, batches=fresh(points))


def step_at_top(model, optimizer, batches):
    pending = False
    for x, y in batches:
        if pending:
            optimizer.step()
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        pending = True
    if pending:
        optimizer.step()
        optimizer.zero_grad()


@odd(
    notes="step() stands before backward() in the text: it takes the gradient of the batch before, and one "
    "comes after the loop"
)
def step_at_the_top_of_the_next_iteration() -> TrainLoop:
    return classifier(step_at_top, batches=fresh(points))


def while_true(model, optimizer, batches):
    iterator = iter(batches)
    while True:
        try:
            x, y = next(iterator)
        except StopIteration:
            break
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@odd(notes="while True around next(), ended by StopIteration")
def while_true_until_stop_iteration() -> TrainLoop:
    return classifier(while_true)


def restarting(model, optimizer, batches, epochs=2):
    iterator = iter(batches)
    for _ in range(epochs * len(batches)):
        try:
            x, y = next(iterator)
        except StopIteration:
            iterator = iter(batches)
            x, y = next(iterator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@odd(notes="counts steps and starts the data over when it ends: data that stays empty would make next() raise")
def restarts_its_iterator_until_enough_steps() -> TrainLoop:
    return classifier(restarting, batches=fresh(points))


def read_ahead(model, optimizer, batches):
    data = list(batches)
    for i in torch.randperm(len(data)).tolist():
        x, y = data[i]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@odd(notes="all batches are read before the first step, and taken in random order")
def reads_everything_before_the_first_step() -> TrainLoop:
    return classifier(read_ahead, batches=fresh(points))


def cycled(model, optimizer, batches):
    for x, y in itertools.islice(itertools.cycle(batches), len(batches) + 5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@odd(notes="cycle() keeps the batches and gives them again when the data has ended")
def cycles_for_a_fixed_number_of_steps() -> TrainLoop:
    return classifier(cycled)


def loader_thread(batches, size=2):
    ready, end = queue.Queue(size), object()

    def work():
        for batch in batches:
            ready.put(batch)
        ready.put(end)

    threading.Thread(target=work, daemon=True).start()
    while (batch := ready.get()) is not end:
        yield batch


def train_threaded(model, optimizer, batches):
    for x, y in loader_thread(batches):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@odd(notes="another thread reads the batches, several ahead")
def prefetch_thread() -> TrainLoop:
    return classifier(train_threaded)


def sometimes_broken(n):
    batches = [curves() for _ in range(n)]
    for x, _ in batches[3::6]:
        x[0, 0] = math.nan
    return batches


def skip_bad_gradients(model, optimizer, batches, limit=100.0):
    skipped = 0
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not norm < limit:
            skipped += 1
            continue
        optimizer.step()
    return skipped


@odd(notes="the step is left out where the gradient's norm is not finite or too large: that backward is lost, openly")
def step_skipped_for_bad_gradients() -> TrainLoop:
    model = relu_mlp(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        batches=sometimes_broken,
        fit=lambda batches: skip_bad_gradients(model, optimizer, batches),
    )


def mean_over_epochs(model, optimizer, batches, epochs=2):
    history = []
    for _ in range(epochs):
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        history.append(sum(losses) / len(losses))
    return history


@odd(
    notes="divides by the number of batches of each epoch: an empty epoch is a ZeroDivisionError, and real "
    "data has none"
)
def epoch_mean_divides_by_batch_count() -> TrainLoop:
    return classifier(mean_over_epochs)


def early_stop(model, optimizer, batches, patience=4):
    best, bad = math.inf, 0
    for _ in range(20):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            bad = 0 if loss.item() < best else bad + 1
            best = min(best, loss.item())
            if bad > patience or best < 0.2:
                return


@odd(notes="ends by itself, in the middle of an epoch, when the loss is low or has not fallen for a while")
def early_stopping_inside_an_epoch() -> TrainLoop:
    return classifier(early_stop, batches=fresh(points))


def log_norm_after_step(model, optimizer, batches):
    norms = []
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
    return norms


@odd(notes="clip_grad_norm_ comes after the step, with an infinite bound: it only measures")
def gradient_norm_logged_after_the_step() -> TrainLoop:
    return classifier(log_norm_after_step, batches=fresh(points))


@torch.no_grad()
def whole_loop_without_grad(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@odd(notes="the whole function runs under no_grad; only the forward pass turns gradients on")
def enable_grad_inside_no_grad() -> TrainLoop:
    return classifier(whole_loop_without_grad)


def under_contexts(model, optimizer, batches):
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.set_detect_anomaly(True))
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@odd(notes="anomaly detection is left on for the whole loop")
def anomaly_detection_left_on() -> TrainLoop:
    return classifier(under_contexts)
