"""The walk: what it reaches, under which path, and what it leaves alone."""

from __future__ import annotations

import functools
import itertools
import random
import types
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.runs.reachable_state.snapshot import Reach, differences
from tests.reachable_state.reached import changes, function_with, loop_with, reach_of, snapshot_of, train

COUNT = 3
"""A global that is no variable: its name says that it is constant."""

seen_so_far = {"batches": 0}


class Recursing:
    """Every attribute that is missing is looked up for ever."""

    def __init__(self):
        self.value = 1

    def __getattr__(self, name):
        return getattr(self, name + "_")


class Raising:
    def __init__(self):
        self.kept = 2.0

    @property
    def broken(self):
        raise RuntimeError("read by the walk")

    def __eq__(self, other):
        raise RuntimeError("compared by the walk")

    __hash__ = None

    def __len__(self):
        raise RuntimeError("measured by the walk")

    def __bool__(self):
        raise RuntimeError("asked by the walk")

    def __iter__(self):
        raise RuntimeError("iterated by the walk")


class Observed(dict):
    """A dict that counts how often its own methods are called."""

    calls = 0

    def __getitem__(self, key):
        type(self).calls += 1
        return super().__getitem__(key)

    def items(self):
        type(self).calls += 1
        return super().items()


class Slotted:
    __slots__ = ("__weakref__", "count", "mean", "unset")

    def __init__(self):
        self.count, self.mean = 0, torch.zeros(2)


@dataclass(frozen=True)
class Frozen:
    scale: float = 2.0
    tensors: list = field(default_factory=lambda: [torch.ones(1)])


Pair = namedtuple("Pair", ["hidden", "cell"])


class Trainer:
    """A hand-written trainer."""

    history: list = []  # noqa: RUF012
    runs = 0

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.step = 0
        self.ema = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.itself = self

    def fit(self, batches):
        train(self.model, self.optimizer, batches)
        seen_so_far["batches"] += COUNT


def trainer_loop():
    trainer = Trainer()
    return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=torch.ones(4, 3), fit=trainer.fit)


def test_what_a_class_keeps_and_the_globals_of_its_methods_are_reached():
    leaves = Reach.of(trainer_loop()).leaves
    assert leaves["len(Trainer.history)"].kind == "length"
    assert "Trainer.runs" in leaves
    assert leaves["seen_so_far['batches']"].reached_from == {"fit"}
    assert not any("COUNT" in path for path in leaves)


def test_several_optimizers_and_wrappers_without_the_class_of_one():
    class Lookahead:
        def __init__(self, inner):
            self.inner, self.count = inner, 0
            self.param_groups, self.state = inner.param_groups, defaultdict(dict)
            self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

        def step(self):
            self.inner.step()

    model = nn.Linear(3, 2)
    wrapped = Lookahead(torch.optim.SGD([model.weight], lr=0.1))
    leaves = Reach.of(loop_with(model, [wrapped, torch.optim.SGD([model.bias], lr=0.2)])).leaves
    assert leaves["optimizer[0].slow[0]"].kind == "tensor"
    assert leaves["optimizer[0].count"].kind == "scalar"
    assert leaves["optimizer[0].param_groups[0]['lr']"].kind == "group_value"
    assert leaves["optimizer[1].param_groups[0]['lr']"].component == "optimizer[1].param_groups"


def test_variables_of_closures_of_nested_functions_partials_and_arguments():
    total, step = torch.zeros(1), 0

    def inner():
        nonlocal step
        step += 1
        return total

    def body(model, queue, batches, *, seen={"n": 0}):  # noqa: B006
        return inner(), model, queue

    fit = functools.partial(body, nn.Linear(1, 1), queue=[torch.ones(1)])
    leaves = Reach.of(loop_with(fit=functools.wraps(body)(lambda batches: fit(batches)))).leaves
    assert {"step", "total", "queue[0]", "seen['n']"} <= set(leaves)
    assert leaves["step"].reached_from == {"fit"}


def test_two_variables_of_one_name_have_two_paths():
    loop = loop_with(fit=function_with(state=[1]), evaluate=function_with(state=[2]))
    leaves = Reach.of(loop).leaves
    assert {"state[0]", "held:state[0]"} <= set(leaves)


def test_containers_of_every_sort():
    reach = reach_of(
        slotted=Slotted(),
        frozen=Frozen(),
        pair=Pair(torch.ones(1), 2),
        queue=deque([torch.zeros(1), 2], maxlen=3),
        ordered=OrderedDict(a=torch.ones(1)),
        default=defaultdict(list, a=[1]),
        counts=Counter("ab"),
        user=UserDict(a=torch.ones(1)),
        names={"a", "b"},
        plain=types.SimpleNamespace(at=3),
        nested={"a": [{"b": (torch.ones(1), [5])}]},
        many=list(range(1000)),
    )
    leaves = reach.leaves
    assert {"slotted.count", "slotted.mean", "frozen.scale", "frozen.tensors[0]"} <= set(leaves)
    assert {"pair.hidden", "pair.cell", "queue[0]", "queue[1]", "ordered['a']", "default['a'][0]"} <= set(leaves)
    assert {"counts['a']", "user.data['a']", "names[:]", "plain.at", "nested['a'][0]['b'][1][0]"} <= set(leaves)
    assert leaves["many[:]"].kind == "array"
    assert reach.value("len(queue)") == 2
    assert reach.cut == ""


def test_generators_arrays_and_iterators():
    stream = (x for x in [torch.ones(1)])
    leaves = reach_of(
        torch_own=torch.Generator(),
        numpy_own=np.random.default_rng(0),
        numpy_old=np.random.RandomState(0),
        python_own=random.Random(0),
        table=np.zeros(3),
        count=itertools.count(3),
        rows=iter([1, 2]),
        stream=stream,
    ).leaves
    streams = ("torch_own", "numpy_own", "numpy_old", "python_own", "count", "rows", "stream")
    assert {leaves[name].kind for name in streams} == {"generator"}
    assert leaves["table"].kind == "array"


def test_no_code_of_the_project_runs():
    observed = Observed(a=1)
    objects = {"recursing": Recursing(), "raising": Raising(), "observed": observed, "inside": [Raising()]}
    objects["alive"] = weakref.proxy(objects["recursing"])
    loop = loop_with(fit=function_with(**objects))
    before = snapshot_of(loop)
    assert {"recursing.value", "raising.kept", "observed['a']", "inside[0].kept"} <= set(before.leaves)
    assert not differences(before, snapshot_of(loop))
    objects["raising"].kept, objects["inside"][0].kept = 3.0, 4.0
    assert set(changes(before, loop)) == {"raising.kept", "inside[0].kept"}
    assert before.put_back() == []
    assert objects["raising"].kept == objects["inside"][0].kept == 2.0
    assert Observed.calls == 0


def test_an_object_that_holds_itself_and_a_long_chain():
    ring = {}
    ring["ring"] = ring
    chain = []
    for _ in range(5000):
        chain = [chain]
    reach = reach_of(ring=ring, chain=chain)
    assert reach.value("ring['ring']") == "ring"
    assert reach.cut == ""


def test_large_containers_are_cut_by_number_and_it_is_said():
    reach = reach_of(rows=[torch.zeros(1) for _ in range(3000)])
    assert "rows[1999]" in reach.leaves
    assert "rows[2000]" not in reach.leaves
    assert reach.cut == "of the 3000 entries of rows the first 2000 were looked at"
    reach = Reach.of(loop_with(fit=function_with(lists=[[i] for i in range(300)])), most=100)
    assert "only the nearest 100 objects were looked at" in reach.cut
    assert "model.weight" in reach.leaves


def test_nothing_is_kept_alive():
    loop = trainer_loop()
    alive = weakref.ref(loop.model)
    snapshot = snapshot_of(loop)
    assert snapshot.leaves
    del loop, snapshot
    import gc

    gc.collect()
    assert alive() is None


def test_modules_whose_attributes_lie_elsewhere():
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.ones(2, 3))
    lazy = nn.LazyLinear(2)
    meta = nn.Linear(2, 2, device="meta")
    loop = loop_with(fit=function_with(scripted=scripted, lazy=lazy, meta=meta))
    before = snapshot_of(loop)
    assert not changes(before, loop)
    assert before.leaves["scripted.0.weight"].component == "weights of scripted"
    assert before.leaves["scripted.1.running_mean"].kind == "buffer"
    scripted.eval()
    with torch.no_grad():
        scripted.get_parameter("0.weight").zero_()
    assert {"scripted.0.weight", "scripted.training", "scripted.1.training"} <= set(changes(before, loop))
    assert before.put_back() == []
    assert not changes(before, loop)
