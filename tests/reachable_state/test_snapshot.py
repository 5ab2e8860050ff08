"""Snapshots: what differs, and that put back restores the slot and the value in place."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pytest_trainloop.runs.reachable_state.copies import same_bits
from pytest_trainloop.runs.reachable_state.stored import LARGE
from tests.reachable_state.reached import changes, function_with, loop_with, snapshot_of, train

Pair = namedtuple("Pair", ["hidden", "cell"])


def restored(loop, change, *paths):
    """Change something, see that it is told, put it back, see that nothing is left; returns the snapshot."""
    before = snapshot_of(loop)
    change()
    assert set(paths) <= set(changes(before, loop))
    assert before.put_back() == []
    assert changes(before, loop) == {}
    return before


def test_training_is_undone_bit_for_bit_and_goes_the_same_way_again():
    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    averaged = AveragedModel(model)
    step = 0

    def fit(batches):
        nonlocal step
        train(model, optimizer, batches)
        scheduler.step()
        averaged.update_parameters(model)
        step += 1

    loop = loop_with(model, optimizer, scheduler=scheduler, fit=fit)
    batches = [torch.randn(4, 3) for _ in range(3)]
    start = snapshot_of(loop)
    ends = []
    for _ in range(2):
        torch.manual_seed(1)
        fit(batches)
        ends.append(snapshot_of(loop))
        start.put_back()
        assert step == 0
    assert set(ends[0].leaves) == set(ends[1].leaves)
    assert all(same_bits(a, ends[1].value(p)) for p in ends[0].leaves if torch.is_tensor(a := ends[0].value(p)))
    assert not optimizer.state


class Holder:
    def __init__(self):
        self.hidden = (torch.zeros(2), torch.zeros(2))
        self.pair = Pair(torch.zeros(1), 3)
        self.scores = [1.0, 2.0]
        self.queue = deque([torch.zeros(1), torch.ones(1)], maxlen=2)
        self.table = OrderedDict(a=1, b=torch.zeros(1))
        self.seen = {1, 2}
        self.array = np.zeros(3)
        self.best = None
        self.long = list(range(100))
        self.count = np.float64(1.0)


def shifted(holder):
    holder.queue.append(torch.full((1,), 2.0))


@pytest.mark.parametrize(
    ("change", "paths"),
    [
        (lambda h: setattr(h, "hidden", (torch.ones(2), torch.ones(2))), ["h.hidden[0]"]),
        (lambda h: h.hidden[1].add_(1), ["h.hidden[1]"]),
        (lambda h: setattr(h, "hidden", None), ["h.hidden[0]"]),
        (lambda h: setattr(h, "pair", h.pair._replace(cell=4)), ["h.pair.cell"]),
        (lambda h: h.scores.append(3.0), ["len(h.scores)", "h.scores[2]"]),
        (lambda h: h.scores.clear(), ["len(h.scores)", "h.scores[0]"]),
        (lambda h: setattr(h, "scores", [5.0, 2.0]), ["h.scores[0]"]),
        (shifted, ["h.queue[0]", "h.queue[1]"]),
        (lambda h: h.table.pop("b"), ["h.table['b']"]),
        (lambda h: h.table.move_to_end("a"), []),
        (lambda h: h.table.update(c=torch.ones(1)), ["h.table['c']"]),
        (lambda h: h.seen.add(3), ["h.seen[:]"]),
        (lambda h: h.array.__setitem__(1, 5), ["h.array"]),
        (lambda h: setattr(h, "array", np.ones(3)), ["h.array"]),
        (lambda h: setattr(h, "best", {"w": torch.ones(1)}), ["h.best['w']"]),
        (lambda h: setattr(h, "best", nn.Linear(1, 1)), ["h.best.weight"]),
        (lambda h: setattr(h, "new", 3), ["h.new"]),
        (lambda h: delattr(h, "count"), ["h.count"]),
        (lambda h: setattr(h, "count", np.float64(2.0)), ["h.count"]),
        (lambda h: h.long.__setitem__(3, 9), ["h.long[:]"]),
        (lambda h: h.long.extend([1, 2]), ["len(h.long)"]),
    ],
)
def test_whatever_a_plain_object_holds(change, paths):
    h = Holder()
    kept = dict(vars(h))
    restored(loop_with(fit=function_with(h=h)), lambda: change(h), *paths)
    assert set(vars(h)) == set(kept)
    assert all(getattr(h, name) is value for name, value in kept.items())


def test_slots_cells_globals_and_class_attributes():
    class Slotted:
        __slots__ = ("at", "tensor")

        def __init__(self):
            self.at, self.tensor = 0, torch.zeros(1)

    class Counted:
        total = 0
        log: list = []  # noqa: RUF012

    slotted, counted, step, unset = Slotted(), Counted(), 0, None
    del unset

    def fit(batches):
        nonlocal step, unset
        slotted.at += 1
        Counted.total += 1
        counted.log.append(torch.ones(1))
        step += 1
        unset = torch.ones(1)

    paths = ("slotted.at", "step", "unset", "Counted.total", "len(Counted.log)")
    restored(loop_with(fit=fit), lambda: fit([]), *paths)
    assert (slotted.at, step, Counted.total, counted.log) == (0, 0, 0, [])


@pytest.mark.parametrize(
    ("stream", "draw"),
    [
        (torch.Generator(), lambda g: torch.rand(1, generator=g)),
        (np.random.default_rng(1), lambda g: g.normal()),
        (np.random.RandomState(1), lambda g: g.normal()),
        (random.Random(1), lambda g: g.gauss(0, 1)),
        (iter([1, 2, 3]), next),
        (iter(range(5)), next),
    ],
)
def test_a_stream_goes_on_where_it_was(stream, draw):
    loop = loop_with(fit=function_with(stream=stream))
    draw(stream)
    before = snapshot_of(loop)
    first = draw(stream)
    assert set(changes(before, loop)) == {"stream"}
    assert before.put_back() == []
    assert draw(stream) == first


def counting():
    at = 0
    while True:
        at += 1
        yield at


@pytest.mark.parametrize("stream", [itertools.count(2), counting(), enumerate([1, 2])])
def test_a_stream_that_cannot_be_set_back_is_named(stream):
    loop = loop_with(fit=function_with(stream=stream))
    next(stream)
    before = snapshot_of(loop)
    next(stream)
    assert "stream" in changes(before, loop)
    assert "stream" in before.put_back()


def test_a_block_of_autocast_that_was_never_left():
    loop = loop_with()
    x = torch.ones(1, 3)
    before = snapshot_of(loop)
    try:
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        loop.model(x)
        assert set(changes(before, loop)) == {"torch.is_autocast_enabled('cpu')"}
    finally:
        before.put_back()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = loop.model(x)
    with torch.no_grad():
        loop.model.weight.add_(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal(loop.model(x), first), "the cast of the old weight is used"


def test_a_live_result_with_a_history_is_not_written_to_while_it_holds_its_bits():
    loop = loop_with()
    x = torch.ones(2, requires_grad=True)
    kept = {"loss": (x.exp() ** 2).sum()}
    loop = loop_with(fit=function_with(kept=kept, x=x))
    before = snapshot_of(loop)
    before.put_back()
    kept["loss"].backward()
    assert x.grad is not None


def test_inference_tensors_integer_parameters_and_other_layouts():
    with torch.inference_mode():
        cached = torch.ones(2)
    whole = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(2, device="meta")
    loop = loop_with(
        fit=function_with(cached=cached, whole=whole, sparse=sparse, meta=meta, nan=torch.tensor(float("nan")))
    )
    before = snapshot_of(loop)
    assert not changes(before, loop)
    with torch.inference_mode():
        cached.zero_()
    whole.data.zero_()
    assert set(changes(before, loop)) == {"cached", "whole"}
    before.put_back(["cached", "whole"])
    assert cached.sum() == 2
    assert whole.sum() == 2


def test_what_takes_another_name_in_a_later_walk_is_no_difference():
    kept = {"a": torch.zeros(1)}
    holder = SimpleNamespace(first=None, inner=SimpleNamespace(kept=kept))
    loop = loop_with(fit=function_with(holder=holder))
    before = snapshot_of(loop)
    holder.first = kept  # nearer: the dict is named by this from now on
    found = changes(before, loop)
    assert set(found) == {"holder.first"}
    before.put_back()
    assert holder.first is None
    assert not changes(before, loop)


def test_a_large_data_set_is_stored_once_for_all_snapshots():
    rows = torch.randn(LARGE)
    loop = loop_with(fit=function_with(rows=rows))
    first, second = snapshot_of(loop), snapshot_of(loop)
    assert first.copies["rows"].raw.is_same(second.copies["rows"].raw)
    rows[0] += 1
    third = snapshot_of(loop)
    assert set(changes(first, loop)) == {"rows"}
    assert third.value("rows")[0] == first.value("rows")[0] + 1
    first.put_back()
    assert not changes(second, loop)


def test_hooks_left_behind():
    loop = loop_with()
    handle = None

    def change():
        nonlocal handle
        handle = loop.model.register_forward_hook(lambda *given: None)
        loop.model.weight.register_hook(lambda gradient: gradient)

    restored(loop, change, "model._forward_hooks", "model.weight._backward_hooks")
    assert not loop.model._forward_hooks
    handle.remove()
