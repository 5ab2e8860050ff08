"""Realistic correct projects, each with the loop that its user would hand over.

By default the cheapest meets the whole battery, and two others every fourth check; ``-m corpus`` judges all by all.
"""

from __future__ import annotations

import importlib

import pytest

from pytest_trainloop import check_loop, registry

CHEAPEST = "graphs"

CHEAP = ("sentence_pairs", "sft_packing")

OWN = (*CHEAP, "diffusers_style", "ppo", "timm_style")

OF_LIBRARIES = {
    "accelerate_accumulation": "accelerate",
    "hf_dynamic_padding": "transformers",
    "hf_peft": "peft",
    "lightning_manual": "lightning",
}


def projects():
    yield CHEAPEST
    yield from (pytest.param(name, marks=pytest.mark.corpus) for name in OWN)
    for name in OF_LIBRARIES:
        yield pytest.param(name, marks=[pytest.mark.corpus, pytest.mark.integration])


@pytest.mark.parametrize("name", list(projects()))
def test_a_correct_project_is_accused_of_nothing(name):
    if name in OF_LIBRARIES:
        pytest.importorskip(OF_LIBRARIES[name])
    assert_silent(name, None)


@pytest.mark.parametrize("name", CHEAP)
def test_it_is_accused_of_nothing_by_every_fourth_check(name):
    assert_silent(name, list(registry.of("loop"))[CHEAP.index(name) :: 4])


def assert_silent(name, only):
    report = check_loop(importlib.import_module(f"tests.projects.{name}").make, only=only, raises=False)
    told = {r.check: (r.outcome, r.reason, [f.summary for f in r.faults]) for r in report.results}
    assert {check: one for check, one in told.items() if one[0] not in ("passed", "skipped")} == {}
