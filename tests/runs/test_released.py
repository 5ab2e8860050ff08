"""Memory of earlier runs is returned before the next one begins."""

import gc
import weakref

import pytest
import torch
from torch import nn

from pytest_trainloop.runs import released
from pytest_trainloop.runs.evidence import Evidence
from tests.loops import plain


def loop_in_a_cycle(made):
    """A loop whose model knows its trainer, which knows its model."""

    def make():
        model = nn.Linear(6, 3)
        model.trainer = {"model": model}
        made.append(weakref.ref(model))
        batch = (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
        return plain.loop(model, batch, plain.cross_entropy)

    return make


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive_after_three_runs():
    made = []
    evidence = Evidence(loop_in_a_cycle(made))
    evidence.run()
    evidence.rerun()
    evidence.rerun()
    evidence.release()
    return sum(model() is not None for model in made)


def test_a_big_loop_in_a_cycle_is_freed_before_the_next_run(no_collector, monkeypatch):
    monkeypatch.setattr(released, "LEAST_BYTES", 1)
    monkeypatch.setattr(released, "in_use", lambda: (0, 0))  # of a platform that does not tell
    assert alive_after_three_runs() == 0


def test_a_small_loop_is_left_to_the_collector(no_collector):
    assert alive_after_three_runs() > 0


@pytest.mark.parametrize(
    ("left", "collected"), [((99, 0), 0), ((150, 0), 1), ((0, 150), 1)], ids=["less", "process", "cuda"]
)
def test_the_collector_is_called_where_as_much_as_the_weights_is_left(monkeypatch, left, collected):
    calls = []
    levels = [(1000, 1000)]
    monkeypatch.setattr(released, "LEAST_BYTES", 100)
    monkeypatch.setattr(released, "in_use", lambda: levels[0])
    monkeypatch.setattr(released, "return_free_pages", lambda: None)
    memory = released.Memory()
    memory._weights = 100
    memory.release()  # the first one sees what is in use
    monkeypatch.setattr(released.gc, "collect", lambda: calls.append(1))
    levels[0] = (1000 + left[0], 1000 + left[1])
    memory.release()
    assert len(calls) == collected * released.PASSES
    calls.clear()
    memory.release()  # what a collection does not free is not asked for again
    assert not calls


def test_weights_are_counted_in_bytes():
    evidence = Evidence(loop_in_a_cycle([]))
    assert released.weight_bytes(evidence.run()) == 4 * (6 * 3 + 3)


def test_without_malloc_trim_nothing_happens(monkeypatch):
    monkeypatch.setattr(released, "_trim", lambda: None)
    released.return_free_pages()
