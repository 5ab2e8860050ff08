"""Pictures as data: thinned, finite, and of the fields that their kind has."""

from __future__ import annotations

import json
import math

import pytest

from pytest_trainloop.views.pictures.picture import FIELDS, POINTS, Picture, curve, gaps, scale_of


def test_a_long_curve_keeps_its_ends_and_its_peaks():
    values = [math.sin(n / 50) for n in range(10_000)]
    values[4321] = 9.0
    drawn = curve("loss", range(10_000), values)
    assert len(drawn.x) == len(drawn.y) <= POINTS
    assert (drawn.x[0], drawn.x[-1]) == (0, 9_999)
    assert max(y for y in drawn.y if y is not None) == 9.0
    assert list(drawn.x) == sorted(drawn.x)


def test_what_is_not_finite_is_a_gap_with_a_mark():
    drawn = curve("loss", [1, 2, 3], [1.0, math.nan, math.inf])
    assert drawn.y == (1.0, None, None)
    (mark,) = gaps([drawn])
    assert (mark.axis, mark.at, mark.text) == ("x", 2, "loss: not finite from here")
    assert not list(gaps([curve("loss", [1], [1.0])]))


@pytest.mark.parametrize(
    ("values", "scale"), [([1.0, 100.0], "log"), ([1.0, 2.0], "linear"), ([0.0, 100.0], "linear"), ([], "linear")]
)
def test_an_axis_is_logarithmic_only_for_what_spans_powers_of_ten(values, scale):
    assert scale_of([curve("loss", range(len(values)), values)]) == scale


@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_a_picture_carries_the_fields_of_its_kind_alone(kind):
    data = Picture(key="k", kind=kind, title="t", look="l", of="o").to_json()
    own = FIELDS[kind]
    others = frozenset().union(*FIELDS.values()) - own
    assert own <= data.keys()
    assert not others & data.keys()
    assert json.loads(json.dumps(data))["kind"] == kind
