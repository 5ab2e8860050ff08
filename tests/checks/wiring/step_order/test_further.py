"""Calls of step() that stand in a loop's source and were not made."""

from __future__ import annotations

import linecache

import pytest

from pytest_trainloop.checks.wiring.step_order.further import may_step_later
from pytest_trainloop.recording.events import Arrival, Backward, Place, Read, Root, Step
from pytest_trainloop.recording.record import Optimizer, Record
from tests.helpers.records import ONE, parameter

FILE = "/somewhere/loop.py"


def record(source, backward, *steps):
    """A run in which backward and steps were called from these lines."""
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    root = Root(requires_grad=True, shape=(), value=1.0)
    events = [
        Backward(
            at=1,
            place=Place(FILE, backward),
            site=((FILE, backward),),
            kind="backward",
            roots=[root],
            arrivals={0: [Arrival(1, ONE, None, 0)]},
        )
    ]
    for optimizer, line in steps:
        read = Read(2, {0: ONE})
        events.append(
            Step(at=2, place=Place(FILE, line), site=((FILE, line),), optimizer=optimizer, reads=[read], asked=True)
        )
    held = [Optimizer(i, "SGD", declared=True, parameters=(0,), groups=(0,), steps=1) for i in range(2)]
    return Record(parameters=[parameter(0, "weight")], optimizers=held, events=events)


ONE_STEP = """\
def train(a, b, batches):
    for x in batches:
        loss(x).backward()
        a.step()
"""
WAITS = ONE_STEP + "        if x.late:\n            b.step()\n"
HELPER = ONE_STEP + "        if x.late:\n            turn(b)\n\n\ndef turn(optimizer):\n    optimizer.step()\n"
ELSEWHERE = ONE_STEP + "\n\ndef other(optimizer):\n    optimizer.step()\n"
ONE_LINE = "def train(a, b, x):\n    loss(x).backward(); a.step(); x.late and b.step()\n"


@pytest.mark.parametrize(
    ("source", "backward", "steps", "later"),
    [
        (ONE_STEP, 3, [(0, 4)], False),
        (WAITS, 3, [(0, 4)], True),
        (WAITS, 3, [(0, 4), (1, 6)], False),
        (HELPER, 3, [(0, 4)], True),
        (ELSEWHERE, 3, [(0, 4)], False),
        (ONE_LINE, 2, [(0, 2)], True),
        ("", 1, [(0, 1)], True),
        ("loss.backward()\na.step()\n", 1, [(0, 2)], False),
        ("def f(:", 1, [(0, 1)], True),
    ],
    ids=[
        "every call was made",
        "a call waits",
        "it came",
        "a helper waits",
        "another function",
        "two on a line",
        "no source",
        "a script",
        "no python",
    ],
)
def test_calls_that_were_not_made(source, backward, steps, later):
    assert may_step_later(record(source, backward, *steps)) is later
