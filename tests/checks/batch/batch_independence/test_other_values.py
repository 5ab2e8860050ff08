"""Batches with other values in some rows."""

import torch

from pytest_trainloop.checks.batch.batch_independence.other_values import OtherValues


def test_masks_lengths_ignored_labels_and_padding_stay():
    batch = {
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]),
        "lengths": torch.tensor([3, 2, 1]),
        "labels": torch.tensor([[4, 5, -100], [6, -100, 7], [8, 9, 3]]),
        "ids": torch.tensor([[5, 6, 7, 8, 9], [4, 3, 2, 0, 0], [1, 2, 3, 4, 5]]),
    }
    made = OtherValues((1,)).apply(batch, 3)
    assert torch.equal(made["attention_mask"], batch["attention_mask"])
    assert torch.equal(made["lengths"], batch["lengths"])
    assert made["labels"][1].tolist() == [8, -100, 3]
    assert made["ids"][1].tolist() == [1, 2, 3, 0, 0]


def test_one_entry_of_a_row_changes():
    made = OtherValues((0,), position=2).apply(torch.arange(12.0).view(3, 2, 2), 3)
    assert made[0].tolist() == [[0.0, 1.0], [6.0, 3.0]]
