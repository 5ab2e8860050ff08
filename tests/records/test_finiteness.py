"""Values that are not finite, on hand-written records."""

from __future__ import annotations

import math

import pytest

from pytest_trainloop.instruments.records.finiteness import (
    became_nonfinite,
    cleaned_gradients,
    explosion,
    nonfinite_from_the_start,
    stepped_nonfinite_losses,
)
from pytest_trainloop.recording.events import Move, TensorSample
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import ONE, TWO, parameter, record

NAN = TensorSample(math.nan, b"nan", nonfinite="nan")
INF = TensorSample(math.inf, b"inf", nonfinite="inf")


def weights(start: TensorSample, end: TensorSample, **fields):
    made = record([parameter(0, "weight", **fields)], held=[0], gradients={0: ONE})
    made.parameters[0].start, made.end[0] = start, end
    return made


@pytest.mark.parametrize(("start", "end", "found"), [(NAN, NAN, 1), (INF, INF, 1), (NAN, ONE, 0), (ONE, NAN, 0)])
def test_weights_that_are_never_initialised(start, end, found):
    assert len(nonfinite_from_the_start(weights(start, end))) == found


def test_an_infinity_in_a_weight_that_does_not_train_is_meant():
    assert nonfinite_from_the_start(weights(INF, INF, requires_grad=False)) == []
    assert nonfinite_from_the_start(weights(NAN, NAN, requires_grad=False)) != []


@pytest.mark.parametrize(
    ("end", "written", "found"), [(NAN, False, 1), (INF, False, 1), (INF, True, 0), (NAN, True, 1)]
)
def test_an_infinity_that_user_code_writes_is_meant(end, written, found):
    made = weights(ONE, end)
    made.moves = [Move(1, 5, (0,), None)] if written else []
    assert len(became_nonfinite(made)) == found


def test_steps_after_losses_that_are_not_finite():
    build = RecordBuilder([0])
    for _ in range(3):
        build.zero()
        build.backward().roots[0].value = math.nan
        build.step()
    made = build.record()
    for p in made.parameters:
        p.start, made.end[p.index] = ONE, TWO
    assert stepped_nonfinite_losses(made) == 3
    made.backwards()[0].arrivals[0][0].incoming = NAN
    assert stepped_nonfinite_losses(made) == 2


def test_gradients_that_user_code_cleans():
    build = RecordBuilder([0])
    build.backward().arrivals[0][0].incoming = NAN
    clean = build.assign(0)
    build.step()
    assert cleaned_gradients(build.record()) is clean


def test_gradients_that_grow_until_nothing_is_finite():
    build = RecordBuilder([0])
    for peak in (1.0, 20.0, 400.0, math.inf):
        build.backward().arrivals[0][0].incoming = TensorSample(peak, b"")
        build.step()
    found = explosion(build.record())
    assert found is not None
    assert (found.name, found.since, found.peaks) == ("p0", 1, (1.0, 20.0, 400.0))
