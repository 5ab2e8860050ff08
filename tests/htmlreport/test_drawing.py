"""Drawings: well-formed, small, the same every time, in the colours of the page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib as mpl
import pytest

from pytest_trainloop.views.htmlreport.drawing import COLOURS, draw, in_words, keys
from pytest_trainloop.views.htmlreport.ramps import span, zeros
from pytest_trainloop.views.pictures.picture import widened
from tests.htmlreport.documents import ONE_BATCH, PICTURES, RATES, UNITS, UPDATES

DRAWN = [picture for picture in PICTURES if picture.kind != "calls"]


def drawing(picture, name="name"):
    return str(draw(json.loads(json.dumps(picture.to_json())), name))


def parsed(svg):
    return ElementTree.fromstring(svg.replace("<svg", '<svg xmlns:xlink="x"', 1))


def texts(svg):
    return ["".join(node.itertext()) for node in parsed(svg).iter("text")]


@pytest.mark.parametrize("picture", DRAWN, ids=lambda picture: picture.key)
def test_it_is_well_formed_and_brings_no_style_of_its_own(picture):
    svg = drawing(picture)
    parsed(svg)
    assert not re.search(r"<style|<metadata|<!--|xmlns|font-family|<script| on\w+=", svg)
    assert not any(colour in svg for colour in COLOURS.values()), "each is a variable of the page"
    assert "var(--muted)" in svg
    assert len(svg) < 12_000


def test_it_is_the_same_every_time_and_names_of_places_differ_between_drawings():
    assert drawing(ONE_BATCH) == drawing(ONE_BATCH)
    ids = [set(re.findall(r'\bid="([^"]*)"', drawing(ONE_BATCH, name))) for name in ("one", "other")]
    assert all(ids)
    assert not ids[0] & ids[1]
    for name in re.findall(r"url\(#([^)]*)\)|href=\"#([^\"]*)\"", drawing(ONE_BATCH, "one")):
        assert "".join(name) in ids[0]


def test_settings_of_the_user_for_matplotlib_neither_count_nor_change():
    plain = drawing(RATES)
    with mpl.rc_context({"font.size": 30, "axes.grid": True, "lines.linewidth": 9, "text.usetex": True}):
        assert drawing(RATES) == plain
        assert mpl.rcParams["font.size"] == 30


@pytest.mark.parametrize("name", ["a_$x^{", "$\\frac", "<b>&amp;</b>", "層.重み", "#0a0001", "-->", "{{ x }}"])
def test_names_are_shown_as_they_are(name):
    svg = drawing(replace(UNITS, labels=(name, "relu", "gelu")))
    assert name in texts(svg)


def test_a_long_name_ends_as_it_does_and_has_the_whole_as_its_title():
    svg = drawing(UNITS)
    assert any("…s.feed_forward.activation" in text or "feed_forward.activation" in text for text in texts(svg))
    assert [node.text for node in parsed(svg).iter("title")] == ["encoder.layers.0.feed_forward.activation"]


def test_ticks_have_the_digits_that_tell_them_apart():
    close = replace(ONE_BATCH, curves=(replace(ONE_BATCH.curves[0], y=(2302.61, 2302.62, 2302.63)),), marks=())
    ticks = [text for text in texts(drawing(close)) if re.fullmatch(r"2,?[234]\d\d", text)]
    assert len(ticks) == len(set(ticks)) > 1
    assert {"1", "2", "3"} <= set(texts(drawing(close)))
    assert "1e-5" not in texts(drawing(close))


@pytest.mark.parametrize("values", [(2.855, 2.85, 2.84), (1e-3, 1e-3, 1e-3), (-4.0, -4.001, -4.0)])
def test_a_small_change_is_drawn_as_a_small_one(values):
    low, high = widened(values)
    assert high - low == pytest.approx(0.1 * max(map(abs, values)))
    assert (low + high) / 2 == pytest.approx((min(values) + max(values)) / 2)
    flat = replace(ONE_BATCH, curves=(replace(ONE_BATCH.curves[0], y=values),), marks=())
    assert drawing(flat) != drawing(replace(flat, curves=(replace(flat.curves[0], y=(0.0, values[1], values[2])),)))


def test_a_map_spans_two_powers_of_ten_and_marks_what_is_0():
    near = replace(UPDATES, cells=((0.0025, 0.0069, 0.004), (0.0, 0.0, 0.003)))
    assert span(near.to_json()) == ("6.9e-5", "0.0069")
    assert "<pattern" not in drawing(near), "a 0 means nothing of its own here"
    marked = replace(near, colour=replace(near.colour, zero="did not move"))
    assert drawing(marked).count("<pattern") == 1
    assert zeros(marked.cells[1], marked.to_json()["colour"]) == [(-0.5, 2.0)]
    assert span(replace(near, cells=((1e-6, 1.0, None),)).to_json()) == ("1e-6", "1")


def test_gaps_nothing_at_all_and_a_single_value():
    gaps = replace(ONE_BATCH.curves[0], y=(None, None, None))
    parsed(drawing(replace(ONE_BATCH, curves=(gaps,))))
    parsed(drawing(replace(ONE_BATCH, curves=())))
    single = replace(ONE_BATCH.curves[0], y=(None, 1.0, None))
    assert "<use" in drawing(replace(ONE_BATCH, curves=(single,)))
    parsed(drawing(replace(UPDATES, cells=((None,) * 3, (None,) * 3))))
    parsed(drawing(replace(UPDATES, cells=((0.5,) * 3, (0.5,) * 3))))
    parsed(drawing(replace(RATES, curves=(replace(RATES.curves[0], y=(None, None, None)),))))


def test_the_legend_tells_what_each_line_is_and_one_line_has_none():
    assert [(key.name, key.colour, key.dash) for key in keys(ONE_BATCH.to_json())] == [
        ("the loop", "own", "solid"),
        ("plain Adam", "reference", "dashed"),
        ("each step", "muted", "faint"),
        ("not finite", "bad", "points"),
    ]
    many = replace(RATES, curves=tuple(replace(RATES.curves[0], name=f"group {i}") for i in range(17)))
    assert len({(key.colour, key.dash) for key in keys(many.to_json())}) == 17
    assert keys(replace(RATES, curves=RATES.curves[:1]).to_json()) == []


def test_it_is_told_in_words():
    assert in_words(ONE_BATCH.to_json()).startswith(
        "Loss on one fixed batch; the loop: 2.3 to 2.25; plain Adam: 2.3 to"
    )
    assert "relu: 12.5" in in_words(UNITS.to_json())
