"""Realistic correct projects, each with the loop that its user would hand over, and loops that the docs show as cards.

By default the cheapest meets the whole battery, and another one every fourth check; ``-m corpus`` judges all by all.
"""

from __future__ import annotations

import importlib

import pytest

from pytest_trainloop import check_loop
from pytest_trainloop.core import registry

CHEAPEST = "projects.graphs"

CHEAP = "projects.sft_packing"

OWN = (CHEAP, "projects.timm_style", "card.loops.contrastive", "card.loops.diffusion", "card.loops.ppo")

OF_LIBRARIES = {
    "projects.accelerate_accumulation": "accelerate",
    "card.loops.lightning_gan": "lightning",
    "card.loops.lora": "peft",
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


def test_it_is_accused_of_nothing_by_every_fourth_check():
    assert_silent(CHEAP, list(registry.of("loop"))[::4])


def assert_silent(name, only):
    report = check_loop(importlib.import_module(f"tests.{name}").make, only=only, raises=False)
    told = {r.check: (r.outcome, r.reason, [f.summary for f in r.faults]) for r in report.results}
    assert {check: one for check, one in told.items() if one[0] not in ("passed", "skipped")} == {}
