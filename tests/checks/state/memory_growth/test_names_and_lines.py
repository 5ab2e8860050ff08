"""Names of objects as the project's code reaches them, and lines that put something into a container."""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from pytest_trainloop.checks.state.memory_growth.lines import put_at
from pytest_trainloop.checks.state.memory_growth.names import Names
from pytest_trainloop.recording.watch import Watch

AT_MODULE_LEVEL = {"slot": [object()]}


@dataclass
class Trainer:
    history: dict = field(default_factory=lambda: {"losses": [object()]})
    recent: collections.deque = field(default_factory=lambda: collections.deque([object()], maxlen=3))

    def name_of_own(self, target):
        return name(target)


class Slotted:
    __slots__ = ("memory",)

    def __init__(self):
        self.memory = [object()]


def name(target):
    model = nn.Linear(2, 2)
    with Watch({"net": model}, []) as watch:
        return Names(watch).of(target)


def test_a_local_variable_has_its_own_name():
    losses = [object()]
    assert name(losses) in ("losses", "target")
    assert name(losses[0]).endswith("[0]") or name(losses[0]) == "target"


def outer_name(holder, take):
    """The name of a part of a local variable, which no local variable is itself."""
    with Watch({"net": nn.Linear(2, 2)}, []) as watch:
        return Names(watch).of(take())


@pytest.mark.parametrize(
    ("holder", "take", "expected"),
    [
        (t := Trainer(), functools.partial(lambda t: t.history["losses"], t), "holder.history['losses']"),
        (u := Trainer(), functools.partial(lambda t: t.recent, u), "holder.recent"),
        (s := Slotted(), functools.partial(lambda t: t.memory, s), "holder.memory"),
        (d := {"a": {"b": [object()]}}, functools.partial(lambda t: t["a"]["b"], d), "holder['a']['b']"),
    ],
)
def test_a_part_is_named_by_the_way_to_it(holder, take, expected):
    assert outer_name(holder, take) == expected


def test_a_variable_of_a_module_and_of_a_closure():
    def closure():
        kept = [object()]
        return (lambda: kept), kept

    function, kept = closure()
    with Watch({"net": nn.Linear(2, 2)}, []) as watch:
        found = Names(watch)
        assert found.of(AT_MODULE_LEVEL["slot"]) == "AT_MODULE_LEVEL['slot']"
        assert found.of(kept) == "kept"
    assert function() is kept


def test_a_module_has_its_path():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].memory = [torch.ones(1)]
    with Watch({"net": model}, []) as watch:
        names = Names(watch)
        assert names.of(model[0].memory) == "net.0.memory"


LINES = """
def train(self):
    self.losses.append(loss)
    history["loss"].append(loss)
    cache[step] = out
    totals += [loss]
    twice.append(1)
    twice.append(2)
    self.meter().update(loss)
"""


@pytest.mark.parametrize(
    ("container", "line"),
    [("Trainer.losses", 3), ("history['loss']", 4), ("cache", 5), ("totals", 6), ("twice", None), ("other", None)],
)
def test_the_line_that_puts_something_in(tmp_path, container, line):
    file = tmp_path / "train.py"
    file.write_text(LINES)
    place = put_at(container, [str(file)])
    assert (None if place is None else place.line) == line
