"""A check that needs more memory than is free says so, and takes none of it."""

import contextlib
import tempfile

import pytest
import torch
from torch import nn

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.judging.battery import Settings, Subject
from pytest_trainloop.runs import memory_budget
from pytest_trainloop.runs.evidence import Evidence
from tests.loops import plain

ENTRIES = 6 * 3 + 3


def make():
    return plain.loop(nn.Linear(6, 3), torch.randn(4, 6), lambda model, x: model(x).square().mean())


@pytest.fixture(scope="module")
def evidence():
    return Evidence(make)


@pytest.mark.parametrize("free", [10 * 8 * ENTRIES, None], ids=["enough", "not known"])
def test_a_check_goes_on_where_there_is_room(evidence, monkeypatch, free):
    monkeypatch.setattr(memory_budget, "LEAST_BYTES", 0)
    monkeypatch.setattr(memory_budget, "free_bytes", lambda record: free)
    memory_budget.require_room(evidence, 10, "it keeps copies", stored=5)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with contextlib.nullcontext() if free is None else pytest.raises(CannotDecide, match="about 0"):
        memory_budget.require_room(evidence, 10, "it keeps copies", stored=5)


def test_the_reason_says_what_is_needed_and_what_is_free(evidence, monkeypatch):
    monkeypatch.setattr(memory_budget, "LEAST_BYTES", 0)
    monkeypatch.setattr(memory_budget, "free_bytes", lambda record: 12_340_000_000)
    with pytest.raises(CannotDecide) as reason:
        memory_budget.require_room(evidence, 20e9 / (8 * ENTRIES), "it keeps copies")
    assert str(reason.value) == (
        "it keeps copies: about 20.0 GB of memory for 2.1e-05 million parameters, and 12.3 GB are free; mark a loop "
        "with a smaller configuration for it (docs/big-models.md)"
    )


def test_small_loops_are_judged_whatever_is_free(evidence, monkeypatch):
    monkeypatch.setattr(memory_budget, "free_bytes", lambda record: 0)
    memory_budget.require_room(evidence, 42, "it keeps copies")


def test_the_limit_of_a_container_counts(evidence, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_budget, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory_budget, "_of_the_machine", lambda: 9000)
    assert memory_budget.free_bytes(evidence.run()) == 9000
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 500\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_budget.free_bytes(evidence.run()) == 9000
    (tmp_path / "memory.max").write_text("4000\n")
    assert memory_budget.free_bytes(evidence.run()) == 1500


def test_the_checks_of_the_training_state_ask_first(monkeypatch):
    def stateful():
        loop = make()
        loop.evaluate = lambda: None
        loop.save = lambda: loop.model.state_dict()
        loop.load = lambda state: loop.model.load_state_dict(state)
        return loop

    monkeypatch.setattr(memory_budget, "LEAST_BYTES", 0)
    monkeypatch.setattr(memory_budget, "free_bytes", lambda record: 1)
    subject = Subject("loop", stateful, settings=Settings())
    for check in ("evaluation_is_pure", "resume_equivalence"):
        result = subject.run_check(check)
        assert result.outcome == "skipped"
        assert result.reason.startswith("it keeps copies of the whole training state: about 0.0 GB")
