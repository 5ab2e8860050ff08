"""``fit`` always comes back, and the process is as it was."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time

import pytest

from pytest_trainloop.core.errors import TimeRanOut
from pytest_trainloop.runs import guard as guards
from pytest_trainloop.runs.guard import SWALLOWED, Guard


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = [os._exit, signal.getsignal(signal.SIGALRM), sys.gettrace()]
    yield
    assert sys.exc_info() == (None, None, None)
    assert [os._exit, signal.getsignal(signal.SIGALRM), sys.gettrace()] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(guards, "GRACE", 0.05)


def call(fit, seconds=60.0, guard=None, **more):
    return (guard or Guard(seconds)).call(fit, lambda: 2, **more)


def test_a_base_exception_of_the_users_own_is_given_back():
    class Done(BaseException):
        pass

    def fit():
        raise Done

    assert isinstance(call(fit), Done)


def test_an_except_clause_for_exceptions_lets_a_stop_pass():
    guard = Guard(60)

    def fit():
        while True:
            try:
                guard.stop()
            except Exception:
                continue

    assert call(fit, guard=guard) is None


@pytest.mark.parametrize("leave", [lambda: sys.exit(2), lambda: os._exit(2)], ids=["exit", "hard-exit"])
def test_an_exit_that_a_stop_brought_about_is_not_held_against_the_loop(leave):
    guard = Guard(60)

    def fit():
        try:
            guard.stop()
        except BaseException:
            leave()

    assert call(fit, guard=guard) is None
    assert guard.stopped


def bare(step):
    while True:
        try:  # noqa: SIM105
            step()
        except:  # noqa: E722
            pass


def suppressing(step):
    while True:
        with contextlib.suppress(BaseException):
            step()


def continuing(step):
    while True:
        try:
            step()
        except BaseException:
            continue
        finally:
            time.sleep(0)


def counting(step):
    failures, running = 0, True
    while running:
        try:
            for _ in range(10):
                step()
        except BaseException as error:
            failures += 1
            reason = repr(error)
            running = bool(reason)


def in_a_function(step):
    def safely():
        try:
            step()
        except BaseException:
            return False
        return True

    while True:
        safely()


SWALLOWING = [bare, suppressing, continuing, counting, in_a_function]


@pytest.mark.parametrize("loop", SWALLOWING)
def test_a_loop_that_swallows_every_stop_is_ended_all_the_same(loop):
    guard = Guard(60)
    asked = []

    def step():
        asked.append(1)
        guard.stop()

    began = time.monotonic()
    assert call(lambda: loop(step), guard=guard) is None
    assert time.monotonic() - began < 10
    assert len(asked) > SWALLOWED
    assert guard.stopped


def spin():
    while True:
        sum(range(100))


def nap():
    time.sleep(0.05)


@pytest.mark.parametrize("step", [spin, nap])
@pytest.mark.parametrize("loop", SWALLOWING)
def test_the_time_ends_a_loop_that_swallows_everything(loop, step):
    with pytest.raises(TimeRanOut, match=r"^time ran out after 2 steps: give --trainloop-timeout=0\.1 or more "):
        call(lambda: loop(step), seconds=0.05)


def test_one_that_asks_for_batches_still_is_only_out_of_time():
    requests = itertools.count()
    with pytest.raises(TimeRanOut):
        call(spin, seconds=0.05, at_end=lambda: next(requests))


def test_a_fit_that_ends_by_itself_once_its_time_is_over_was_in_time(monkeypatch):
    monkeypatch.setattr("pytest_trainloop.runs.guard.GRACE", 60.0)  # a busy machine wakes up late

    def fit():
        time.sleep(0.1)

    assert call(fit, seconds=0.05) is None


def test_a_fit_that_was_cut_short_since_its_time_was_over_gives_no_record():
    guard = Guard(0.05)

    def fit():
        while not guard.out_of_time():
            pass

    with pytest.raises(TimeRanOut):
        call(fit, guard=guard)


def test_a_fit_that_is_stopped_since_its_time_is_over_gives_no_record():
    guard = Guard(0.05)

    def fit():
        while True:
            if guard.out_of_time():
                guard.stop()

    with pytest.raises(TimeRanOut):
        call(fit, guard=guard)


def test_the_time_is_not_over_for_a_loop_that_was_stopped_before():
    guard = Guard(0.05)

    def fit():
        try:
            guard.stop()
        except BaseException:
            spin()

    assert call(fit, guard=guard) is None


@pytest.mark.parametrize("how", [lambda: 1 / 0, lambda: sys.exit(3)], ids=["raises", "exits"])
def test_what_a_loop_makes_of_its_time_being_over_does_not_count(how):
    def fit():
        try:
            spin()
        finally:
            how()

    with pytest.raises(TimeRanOut):
        call(fit, seconds=0.05)


def test_an_alarm_that_comes_too_late_harms_nobody():
    guard = Guard(60)
    assert call(lambda: None, guard=guard) is None
    guard._alarm(signal.SIGALRM, sys._getframe())
    assert not guard.stopped


def test_another_timer_is_left_alone():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        assert call(lambda: time.sleep(0.1), seconds=0.01) is None
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rung == [1]


def test_outside_the_main_thread_there_is_no_deadline():
    came_back = []
    thread = threading.Thread(target=lambda: came_back.append(call(lambda: time.sleep(0.05), seconds=0.01)))
    thread.start()
    thread.join()
    assert came_back == [None]


class Finalized:
    """Waits in its finalizer, where Python swallows what is raised."""

    def __init__(self, until):
        self.until = until

    def __del__(self):
        wait(self.until)


def wait(until):
    while time.perf_counter() < until:
        pass


def in_a_finalizer():
    Finalized(time.perf_counter() + 0.3)


def in_a_callback_of_the_collector():
    until = time.perf_counter() + 0.3

    def collecting(phase, info):
        wait(until)

    gc.callbacks.append(collecting)
    try:
        gc.collect(0)
    finally:
        gc.callbacks.remove(collecting)


@pytest.mark.parametrize("swallowing", [in_a_finalizer, in_a_callback_of_the_collector])
def test_no_stop_is_raised_where_python_would_swallow_it(swallowing, monkeypatch):
    swallowed = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)

    def fit():
        swallowing()
        while True:
            pass

    with pytest.raises(TimeRanOut):
        call(fit, seconds=0.05)
    assert swallowed == []
