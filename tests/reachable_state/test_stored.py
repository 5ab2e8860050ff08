"""Copies whose values lie in a file."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import nn

from pytest_trainloop.runs.reachable_state import stored as module
from pytest_trainloop.runs.reachable_state.copies import same_bits
from pytest_trainloop.runs.reachable_state.snapshot import Reach, empty_loop
from pytest_trainloop.runs.reachable_state.stored import Stored, StoredTensors, stored, value_of
from tests.reachable_state.reached import loop_with, snapshot_of
from tests.test_memory_layout import LAID_OUT


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch):
    monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(module, "PIECE", 7)
    monkeypatch.setattr(module, "MOST_OF_A_FILE", 100)


MORE = {
    "half": lambda: torch.tensor([0.0, -0.0, torch.nan, torch.inf], dtype=torch.bfloat16),
    "truth": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("make", [*LAID_OUT.values(), *MORE.values()], ids=[*LAID_OUT, *MORE])
def test_a_copy_has_the_bits_and_the_layout_of_a_clone(make):
    tensor = make()
    copies = StoredTensors.of({"a": tensor, "b": make()})
    clone = tensor.detach().clone()
    with torch.inference_mode(), torch.device("meta"):
        read = copies["a"]
    assert same_bits(read.resolve_conj(), clone.resolve_conj())
    assert read.stride() == clone.stride()
    assert not read.is_inference()


def test_the_same_values_are_written_once_and_gone_with_their_last_copy():
    one, other = stored(torch.arange(5.0)), stored(torch.arange(5.0))
    assert one.is_same(other)
    assert not one.is_same(stored(torch.arange(5)))
    known = len(module._known)
    del one
    assert value_of(other).tolist() == [0, 1, 2, 3, 4]
    del other
    assert len(module._known) == known - 1


def test_without_room_for_files_a_copy_is_a_clone(monkeypatch):
    monkeypatch.setattr(module, "_files", [])
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert torch.equal(stored(torch.full((3,), 0.25)), torch.full((3,), 0.25))


def test_an_emptied_loop_is_carried_over_as_it_was():
    model, other = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)) for _ in range(2))
    model[1].weight.data = model[0].weight.data
    loop, fresh = loop_with(model), loop_with(other)
    loop.fit([loop.batch])
    before = snapshot_of(loop)
    loop.fit([loop.batch])
    taken = snapshot_of(loop)
    assert isinstance(taken.copies["model.0.weight"].raw, Stored)
    weight, moment = model[0].weight.detach().clone(), loop.optimizer.state[model[0].weight]["exp_avg"].clone()
    empty_loop([before, taken])
    assert not model[0].weight.any()
    assert not loop.optimizer.state[model[0].weight]["exp_avg"].any()
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    taken.carry_over(Reach.of(fresh))
    assert torch.equal(other[0].weight, weight)
    assert torch.equal(fresh.optimizer.state[other[0].weight]["exp_avg"], moment)
