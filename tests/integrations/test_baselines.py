"""Trajectories of loops that a library runs: wholly in float64, the same when made again, and small as files."""

from __future__ import annotations

import importlib

import pytest

from pytest_trainloop.instruments.baselines.as_json import text_of
from pytest_trainloop.instruments.baselines.capture import captured
from pytest_trainloop.instruments.baselines.trajectory import thinned
from pytest_trainloop.runs.evidence import Evidence

pytestmark = pytest.mark.integration


def of_library(file, name, **given):
    return lambda: getattr(importlib.import_module(f"tests.integrations.{file}"), name)("out", **given)


@pytest.mark.parametrize(
    ("library", "make"),
    [
        ("transformers", of_library("test_transformers", "classifier")),
        ("lightning", of_library("resuming_loops", "lightning")),
        ("accelerate", of_library("resuming_loops", "with_accelerate", accumulate=2)),
    ],
)
def test_a_library_has_a_trajectory(library, make, tmp_path, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    evidence = Evidence(make)
    found = captured(evidence)
    assert found.double is not None
    assert not found.double.lower
    assert len(found.double.steps) == len(found.own.steps) >= 11
    assert all(step.gradients and step.events for step in found.own.steps[:11])
    assert captured(evidence, found.made) == found
    assert len(text_of(thinned(found))) < 160_000
