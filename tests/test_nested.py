"""Rows of a batch, whatever the batch is made of."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pytest_trainloop.nested import mapped, rows, take

Pair = namedtuple("Pair", "left right")


@dataclass
class Sample:
    image: torch.Tensor
    weights: torch.Tensor
    names: list[str]


class Encoding(dict):
    """A mapping with attributes, as tokenizers return."""

    def __init__(self, **entries):
        super().__init__(**entries)
        self.source = "here"


def test_rows_are_what_most_tensors_share():
    assert rows({"x": torch.zeros(6, 2), "y": torch.zeros(6), "class_weights": torch.zeros(3)}) == 6
    assert rows([torch.zeros(5, 7), torch.zeros(5, 7)], axis=1) == 7
    assert rows(torch.zeros(5, 7), axis=-1) == 7
    assert rows(torch.tensor(1.0)) == 0


def test_rows_are_taken_in_their_order():
    x, y = take((torch.arange(4.0).view(4, 1), torch.arange(4)), [2, 0])
    assert x.tolist() == [[2.0], [0.0]]
    assert y.tolist() == [2, 0]


def test_what_has_no_row_for_each_is_kept_whole():
    batch = {"x": torch.zeros(6, 2), "y": torch.zeros(6), "class_weights": torch.ones(3), "step": 7, "mask": None}
    taken = take(batch, [1, 2])
    assert taken["x"].shape == (2, 2)
    assert taken["class_weights"].shape == (3,)
    assert (taken["step"], taken["mask"]) == (7, None)


@pytest.mark.parametrize("axis", [1, -2])
def test_rows_along_another_axis(axis):
    sequence_first = torch.arange(24).view(3, 4, 2)
    assert torch.equal(take([sequence_first], [3, 1], axis=axis)[0], sequence_first[:, [3, 1]])


def test_types_stay():
    sample = Sample(torch.zeros(3, 2), torch.ones(5), ["a", "b", "c"])
    taken = take(sample, [2, 1])
    assert isinstance(taken, Sample)
    assert taken.names == ["c", "b"]
    assert taken.weights.shape == (5,)
    assert isinstance(take(Pair(torch.zeros(3), torch.zeros(3)), [0]), Pair)
    encoding = take(Encoding(ids=torch.zeros(3, 4), mask=torch.ones(3, 4, dtype=torch.bool)), [0, 1])
    assert (type(encoding), encoding.source, encoding["mask"].dtype) == (Encoding, "here", torch.bool)


def test_arrays_are_taken_from_as_well():
    taken = take({"x": torch.zeros(4, 2), "ids": np.arange(4)}, [3, 0])
    assert taken["ids"].tolist() == [3, 0]


def test_a_list_of_columns_is_no_list_of_rows():
    columns = [torch.arange(2), torch.arange(2) + 10]
    taken = take({"x": torch.zeros(2, 2), "columns": columns}, [1])
    assert [c.tolist() for c in taken["columns"]] == [[1], [11]]


def test_the_batch_itself_is_left_alone():
    batch = {"x": torch.arange(4.0).requires_grad_(True)}
    taken = take(batch, [0, 1])
    taken["x"].data.fill_(9.0)
    assert batch["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert taken["x"].requires_grad
    assert taken["x"].is_leaf


def test_one_tensor_in_two_places_stays_one():
    x = torch.arange(4)
    taken = take({"x": x, "again": x}, [1, 2])
    assert taken["x"] is taken["again"]


class Wrapped:
    """Keeps its entries in ``data`` and is no mapping, as some tokenizers' encodings."""

    def __init__(self, data):
        self.data = data


def test_leaves_are_changed_and_what_holds_none_is_shared():
    kept, sample = [3.0], Sample(torch.ones(1), torch.ones(1), ["a"])
    batch = {"n": 2, "kept": kept, "pair": Pair(1, sample), "wrapped": Wrapped({"n": 5}), "set": {7}}
    batch["self"] = batch
    paths = []

    def change(path, value):
        paths.append(path)
        return value + 1

    made = mapped(batch, change, lambda value: isinstance(value, int))
    assert (made["n"], made["pair"].left, made["wrapped"].data) == (3, 2, {"n": 6})
    assert made["kept"] is kept
    assert made["pair"].right is sample
    assert made["set"] == {7}
    assert (batch["n"], batch["pair"].left, batch["wrapped"].data) == (2, 1, {"n": 5})
    assert paths == [("n",), ("pair", "left"), ("wrapped", "n")]
    assert mapped(batch, lambda path, value: value, lambda value: isinstance(value, int)) is batch
