"""The schema of the JSON report: valid, complete, and what reports are held to."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import get_args, get_type_hints

import jsonschema
import pytest

from pytest_trainloop.core.finding import Finding, Result, SmallestBatch
from pytest_trainloop.core.report.entry import entries_of
from pytest_trainloop.core.report.json import text
from pytest_trainloop.core.report.schema import NAME, lacking, schema
from pytest_trainloop.views.loop_facts import page
from pytest_trainloop.views.pictures import picture
from tests.helpers.report_data import raised, report, result, stale
from tests.helpers.reports import of_reports, strict


def full():
    return report(
        {"t::a": [result(stale(composition=SmallestBatch((0, 1), (1, 1)))), raised(), result(check="causality")]}
    )


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$id"] == NAME == full()["$schema"]


def test_a_report_conforms_and_reads_back():
    data = strict(text(full()))
    of_reports().validate(data)
    first, second, third = entries_of(data)
    assert first.result.findings == (stale(composition=SmallestBatch((0, 1), (1, 1))),)
    assert second.result.error.summary == "ValueError: no data"
    assert third.nodeid == "t::a[causality]"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.update(version=2),
        lambda data: data["loops"][0].pop("checks"),
        lambda data: data["loops"][0]["checks"][0].update(outcome="ok"),
        lambda data: data["loops"][0]["checks"][0]["findings"][0].pop("repair"),
        lambda data: data["loops"][0]["checks"][0]["findings"][0].update(new=1),
        lambda data: data["environment"].pop("torch"),
    ],
)
def test_what_does_not_conform_is_refused(spoil):
    data = copy.deepcopy(full())
    spoil(data)
    with pytest.raises(jsonschema.ValidationError):
        of_reports().validate(data)


def test_every_field_has_its_key():
    known = schema()["$defs"]
    assert set(known["finding"]["properties"]) == {field.name for field in fields(Finding)}
    assert set(known["check"]["properties"]) == {field.name for field in fields(Result)} - {"learning_rates"} | {
        "nodeid"
    }
    assert set(known["picture"]["properties"]) == {field.name for field in fields(picture.Picture)}


@pytest.mark.parametrize(
    ("part", "key"),
    [
        (picture.Axis, "x"),
        (picture.Curve, "curves"),
        (picture.Bar, "bars"),
        (picture.Call, "calls"),
        (picture.Mark, "marks"),
    ],
)
def test_every_part_of_a_picture_is_known(part, key):
    about = schema()["$defs"]["picture"]["properties"][key]
    known = schema()["$defs"]["axis"] if key == "x" else about["items"]
    assert set(known["properties"]) == {field.name for field in fields(part)}
    hints = get_type_hints(part)
    for name, values in known["properties"].items():
        if "enum" in values:
            assert set(values["enum"]) == set(get_args(hints[name]))


def test_a_line_of_a_card_is_known():
    known = schema()["$defs"]["card"]["properties"]["lines"]["items"]["properties"]
    assert set(known) == {field.name for field in fields(page.Line)}


def test_every_key_says_what_it_is():
    known = schema()
    places = [known["properties"]["loops"]["items"], known["$defs"]["finding"], known["$defs"]["check"]]
    for place in places:
        for name, about in place["properties"].items():
            assert "$ref" in about or name in ("findings", "error") or about.get("description"), name


def test_numbers_that_are_not_finite_are_null():
    data = full()
    data["loops"][0]["learning_rates"] = [{"optimizer": "SGD", "groups": [{"lr": [0.1, float("inf")], "moved_by": []}]}]
    read = strict(text(data))
    assert read["loops"][0]["learning_rates"][0]["groups"][0]["lr"] == [0.1, None]
    of_reports().validate(read)


def test_what_a_report_lacks_is_named():
    data = strict(text(full()))
    assert lacking(data) == ""
    assert lacking([]) == "it is no object"
    lines = data["loops"][0]["checks"]
    del lines[0]["needs"]
    lines[1]["findings"] = None
    assert lacking(data) == "loops[0].checks[0] lacks 'needs'"
    lines[0]["needs"] = ""
    assert lacking(data) == "loops[0].checks[1].findings is no array"
