"""Rows by digest."""

from dataclasses import dataclass

import numpy as np
import torch

from pytest_trainloop.checks.state.data_order.rows import PADS, rows_of


@dataclass
class Example:
    ids: torch.Tensor
    label: int


def test_a_row_has_the_same_digest_in_another_batch():
    x, y = torch.randn(8, 3), torch.arange(8)
    first, second = rows_of((x, y)), rows_of((x[[3, 1]], y[[3, 1]]))
    assert second["batch[0]"].digests == (first["batch[0]"].digests[3], first["batch[0]"].digests[1])
    assert second["batch[1]"].digests == (first["batch[1]"].digests[3], first["batch[1]"].digests[1])


def test_padding_at_the_ends_of_ids_is_left_out():
    narrow, wide = torch.tensor([[5, 7, 9]]), torch.tensor([[0, 5, 7, 9, 0, 0]])
    assert rows_of([narrow], pads=PADS)["batch[0]"].digests == rows_of([wide], pads=PADS)["batch[0]"].digests


def test_other_dtypes_than_numpys():
    x = torch.randn(4, 2).to(torch.bfloat16)
    leaf = rows_of({"x": x})["x"]
    assert len(set(leaf.digests)) == 4
    assert leaf.nbytes == 4


def test_lists_of_examples_are_read_by_their_fields():
    batch = [Example(torch.tensor([1, 2]), 0), Example(torch.tensor([3, 4]), 1)]
    leaves = rows_of(batch)
    assert set(leaves) == {"ids", "label"}
    assert leaves["label"].is_label
    assert not leaves["ids"].is_label


def test_words_arrays_and_dicts():
    leaves = rows_of({"text": ["one", "two", "one"], "score": np.array([0.5, 1.0, 0.5])})
    assert [len(set(leaf.digests)) for leaf in leaves.values()] == [2, 2]
    assert leaves["score"].floating


def test_what_has_another_length_is_no_leaf():
    assert set(rows_of((torch.randn(4, 2), torch.arange(4), torch.tensor([0.1, 0.2])))) == {"batch[0]", "batch[1]"}
