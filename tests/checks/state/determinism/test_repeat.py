"""Where two runs first differ, and by what."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn

from pytest_trainloop.checks.state.determinism import repeat
from pytest_trainloop.checks.state.determinism.repeat import first_difference, repetition
from pytest_trainloop.core.errors import TimeRanOut
from pytest_trainloop.recording.events import Backward, Step, TensorSample
from pytest_trainloop.runs.evidence import Evidence
from tests.helpers.record_builder import RecordBuilder
from tests.loops.plain import loop


def record_of(change=lambda build: None, steps=3):
    build = RecordBuilder([0, 1])
    for _ in range(steps):
        build.zero()
        build.backward()
        build.step().lrs = (0.1,)
    change(build)
    return build.record()


def nth(build, kind, n=1):
    return [e for e in build.events if isinstance(e, kind)][n]


def test_what_comes_after_the_last_common_step_is_not_compared():
    assert first_difference(record_of(steps=2), record_of(steps=3)) is None


def other_loss(build):
    nth(build, Backward).roots[0].value = 2.0


def other_gradient(build):
    nth(build, Backward).arrivals[1][0].incoming = TensorSample(9.0, b"other")


def other_order(build):
    a, b = (i for i, e in enumerate(build.events) if isinstance(e, (Backward, Step)) and i > 2)
    build.events[a], build.events[b] = build.events[b], build.events[a]


def other_start(build):
    build.parameters[1].start = TensorSample(1.0, b"other")


def other_rate(build):
    nth(build, Step).lrs = (0.2,)


@pytest.mark.parametrize(
    ("change", "culprit", "step"),
    [
        (other_loss, "loss", 1),
        (other_gradient, "p1", 1),
        (other_order, "fit", 1),
        (other_start, "p1", 0),
        (other_rate, "lr", 1),
    ],
    ids=["loss", "gradient", "order", "start", "rate"],
)
def test_the_first_difference_is_named(change, culprit, step):
    found = first_difference(record_of(steps=2), record_of(change, steps=2))
    assert found is not None
    assert (found.culprit, found.step) == (culprit, step)


COUNT = itertools.count()


def unordered():
    return 0.0 if torch.are_deterministic_algorithms_enabled() else next(COUNT) * 1e-7


def evidence(draw):
    def loss(model, x):
        return model(x + draw()).square().mean()

    return Evidence(lambda: loop(nn.Linear(3, 1), torch.randn(4, 3), loss))


def test_the_settings_of_torch_are_restored():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    evidence(unordered).shared(repetition)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def out_of_time():
    raise TimeRanOut(3, 1.0)


@pytest.mark.parametrize(("work", "seconds"), [(out_of_time, 60.0), (lambda: time.sleep(60), 0.1)])
def test_a_child_whose_time_runs_out_leaves_the_source_undecided(monkeypatch, work, seconds):
    in_child = repeat._in_child
    monkeypatch.setattr(repeat, "_in_child", lambda _work, _seconds: in_child(work, seconds))
    with pytest.raises(TimeRanOut, match="of a run in a process of its own"):
        repetition(evidence(itertools.count().__next__))
