"""Rates of groups, who moves them, and how often schedulers are called."""

from __future__ import annotations

import math

import pytest

from pytest_trainloop.instruments.records.learning_rates import cadence, lrs, table
from pytest_trainloop.recording.record import Scheduler
from tests.helpers.record_builder import RecordBuilder


class Loop(RecordBuilder):
    """One optimizer of two groups, whose rates are kept and moved here."""

    def __init__(self):
        super().__init__([0, 1])
        self.lrs = [0.1, 0.2]

    def stepped(self):
        self.backward()
        return self.step(lrs=tuple(self.lrs))

    def scheduled(self, factor=0.5, number=0):
        call = self.scheduler()
        call.number, call.before = number, tuple(self.lrs)
        self.lrs = [rate * factor for rate in self.lrs]
        call.after, call.until = tuple(self.lrs), call.at
        return call

    def made(self):
        record = self.record()
        record.schedulers = [Scheduler(0, "StepLR", 0), Scheduler(1, "LinearLR", 0)]
        return record


def test_a_rate_is_moved_by_the_scheduler_that_was_called_last():
    loop = Loop()
    loop.stepped()
    loop.scheduled()
    loop.stepped()
    loop.scheduled(number=0)
    loop.scheduled(number=1)
    loop.stepped()
    first, second = lrs(loop.made())
    assert first.values == (0.1, 0.05, 0.0125)
    assert first.moved_by == (None, 0, 1)
    assert second.values == (0.2, 0.1, 0.025)
    assert (first.moves, first.constant, first.movers) == (True, False, {0, 1})


def test_a_rate_that_no_scheduler_left_was_written_by_hand():
    loop = Loop()
    loop.stepped()
    loop.scheduled()
    loop.lrs[0] = 0.1
    loop.stepped()
    first, second = lrs(loop.made())
    assert (first.values, first.moved_by) == ((0.1, 0.1), (None, "hand"))
    assert first.constant
    assert second.moved_by == (None, 0)


def test_a_group_that_is_added_late_has_no_rate_before():
    loop = Loop()
    loop.lrs = [0.1]
    loop.stepped()
    loop.lrs = [0.1, 0.3]
    loop.stepped()
    _, second = lrs(loop.made())
    assert math.isnan(second.values[0])
    assert second.known == (0.3,)
    assert second.constant


def test_the_table_is_plain_and_names_what_moved_each_rate():
    loop = Loop()
    loop.stepped()
    loop.scheduled()
    loop.lrs[1] = 0.7
    loop.stepped()
    assert table(loop.made()) == [
        {
            "optimizer": "SGD",
            "groups": [{"lr": [0.1, 0.05], "moved_by": ["StepLR"]}, {"lr": [0.2, 0.7], "moved_by": ["hand"]}],
        }
    ]


@pytest.mark.parametrize(("windows", "calls_each", "per"), [(1, 1, "step"), (4, 4, "micro-batch"), (4, 1, "step")])
def test_the_cadence_of_a_scheduler(windows, calls_each, per):
    loop = Loop()
    for _ in range(3):
        for micro in range(windows):
            loop.backward()
            if calls_each == windows > 1 and micro < windows - 1:
                loop.scheduled(0.9)
        loop.step(lrs=tuple(loop.lrs))
        loop.scheduled(0.9)
    found = cadence(loop.made())[0]
    assert (found.per, found.calls, found.steps) == (per, 3 * calls_each, 3)


def test_a_scheduler_that_is_called_at_the_end_of_each_pass():
    loop = Loop()
    for _ in range(2):
        for _ in range(3):
            loop.stepped()
        loop.scheduled()
    record = loop.made()
    record.passes = (3, 3)
    found = cadence(record)[0]
    assert (found.per, str(found)) == ("epoch", "1 call per epoch")
