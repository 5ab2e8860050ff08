"""Ordinary loops in unusual surroundings: threads, event loops, global flags, patched methods, caught exceptions."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def adam_loop(run, batches=None):
    """``run(model, optimizer, batches)`` is the project's entry point."""
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=batches,
        fit=lambda given: run(model, optimizer, given),
    )


def train_in_worker(model, optimizer, batches):
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(train, model, optimizer, batches).result()


@odd(notes="the whole loop runs in a worker thread, as under a server or a user interface")
def loop_in_a_worker_thread() -> TrainLoop:
    return adam_loop(train_in_worker, batches=fresh(points))


async def train_async(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        await asyncio.sleep(0)
        loss.backward()
        optimizer.step()


@odd(notes="the loop is a coroutine that gives control back between forward and backward")
def loop_as_a_coroutine() -> TrainLoop:
    return adam_loop(lambda *given: asyncio.run(train_async(*given)))


def train_seeded(model, optimizer, batches, seed=1234):
    random.seed(seed)
    torch.manual_seed(seed)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()
        optimizer.step()


@odd(notes="the loop seeds everything itself, so whatever seed was set before does not count")
def loop_seeds_everything_itself() -> TrainLoop:
    return adam_loop(train_seeded)


def train_with_flags(model, optimizer, batches):
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("high")
    torch.set_printoptions(precision=3)
    train(model, optimizer, batches)


@odd(notes="global flags are set by the loop and never put back")
def global_flags_set_and_left() -> TrainLoop:
    return adam_loop(train_with_flags)


def timed(function, spent):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        spent.append(time.perf_counter() - start)
        return result

    return wrapper


def train_timed(model, optimizer, batches):
    spent = []
    optimizer.step, model.forward = timed(optimizer.step, spent), timed(model.forward, spent)
    train(model, optimizer, batches)


@odd(notes="step() and forward() are replaced on the instances by wrappers that measure them")
def patched_step_and_forward() -> TrainLoop:
    return adam_loop(train_timed, batches=fresh(points))


def train_with_step_hooks(model, optimizer, batches):
    norms = []

    def before(opt, args, kwargs):
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    def after(opt, args, kwargs):
        opt.zero_grad()

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for handle in handles:
        handle.remove()


@odd(notes="clipping and zeroing are step hooks of the project's own; the loop itself has neither")
def clip_and_zero_in_step_hooks() -> TrainLoop:
    return adam_loop(train_with_step_hooks, batches=fresh(points))


class Restarting:
    """Runs the loop again from the last good state when it raises, as cluster runners do."""

    def __init__(self, model, optimizer, fail_at=6):
        self.model, self.optimizer, self.fail_at, self.failed = model, optimizer, fail_at, False

    def attempt(self, iterator, first):
        for step, (x, y) in enumerate(iterator, first):
            if step == self.fail_at and not self.failed:
                self.failed = True
                raise ConnectionError("the data server went away")
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def fit(self, batches):
        iterator = iter(batches)
        try:
            self.attempt(iterator, 0)
        except ConnectionError:
            self.attempt(iterator, self.fail_at)


@odd(notes="an exception is raised in mid-loop and caught by the project, which goes on with the rest of the data")
def exception_caught_and_training_resumed() -> TrainLoop:
    return adam_loop(lambda model, optimizer, batches: Restarting(model, optimizer).fit(batches))
