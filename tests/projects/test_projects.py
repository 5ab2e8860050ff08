"""Realistic correct projects, each with the loop that its user would hand over, under the whole battery."""

from __future__ import annotations

import importlib

import pytest

from pytest_trainloop import check_loop

CHEAPEST = ("graphs", "sentence_pairs", "sft_packing")
"""Judged by default; the others nightly."""

OWN = ("diffusers_style", "ppo", "timm_style")

OF_LIBRARIES = {
    "accelerate_accumulation": "accelerate",
    "hf_dynamic_padding": "transformers",
    "hf_peft": "peft",
    "lightning_manual": "lightning",
}


def projects():
    yield from CHEAPEST
    yield from (pytest.param(name, marks=pytest.mark.corpus) for name in OWN)
    for name in OF_LIBRARIES:
        yield pytest.param(name, marks=[pytest.mark.corpus, pytest.mark.integration])


@pytest.mark.parametrize("name", list(projects()))
def test_a_correct_project_is_accused_of_nothing(name):
    if name in OF_LIBRARIES:
        pytest.importorskip(OF_LIBRARIES[name])
    report = check_loop(importlib.import_module(f"tests.projects.{name}").make, raises=False)
    told = {r.check: (r.outcome, r.reason, [f.summary for f in r.faults]) for r in report.results}
    assert {check: one for check, one in told.items() if one[0] not in ("passed", "skipped")} == {}
