"""The base of modes that look at a watched run: when they look, and that they let go of the run."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.watch import Watch
from tests.helpers.watched_runs import batches, net_and_sgd


class Names(WatchingMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, name, func, args, kwargs):
        self.seen.append(name)
        return super().call(name, func, args, kwargs)


class NamesInBackward(Names):
    def active(self):
        return not self.watch.is_suspended


class Doubling(FunctionMode):
    def call(self, name, func, args, kwargs):
        out = func(*args, **kwargs)
        return out * 2 if name == "ones" else out


class Both(Names, Doubling):
    pass


@contextlib.contextmanager
def run(mode):
    model, optimizer = net_and_sgd()
    with Watch({"": model}, [optimizer]) as watch, contextlib.ExitStack() as stack:
        for context in mode.contexts(watch):
            stack.enter_context(context)
        yield model, optimizer, watch


def train(mode):
    with run(mode) as (model, optimizer, _):
        x, _ = batches(1)[0]
        checkpoint(lambda x: model(x).square(), x, use_reentrant=False).mean().backward()
        optimizer.step()
    return mode.seen


def test_calls_of_the_forward_pass_are_seen_and_those_of_the_optimizer_are_not():
    seen = train(Names())
    assert seen.count("square") == 1
    assert "backward" in seen
    assert not [name for name in seen if name.startswith("_foreach")]


def test_calls_inside_a_backward_pass_are_seen_where_a_mode_wants_them():
    mode = NamesInBackward()
    with run(mode) as (_, _, watch):
        watch.backward = object()
        torch.ones(1)
        watch.backward = None
    assert mode.seen == ["ones"]


def test_what_is_our_own_is_not_seen():
    mode = Names()
    with run(mode) as (_, _, watch), watch.suspended():
        torch.ones(1)
    assert mode.seen == []


def test_a_mode_over_another_leaves_to_it_what_it_does_not_look_at():
    mode = Both()
    with run(mode) as (_, _, watch):
        seen = torch.ones(1)
        watch.backward = object()
        unseen = torch.ones(1)
        watch.backward = None
    assert mode.seen == ["ones"]
    assert seen == unseen == 2


def test_the_watch_is_let_go():
    mode = Names()
    with run(mode) as (_, _, watch):
        assert mode.watch is watch
    with pytest.raises(RuntimeError, match="Names is used outside of its run"):
        _ = mode.watch
    with mode:  # left on by a loop that swallowed the stop
        torch.ones(1)
    assert mode.seen == []
