"""What the tensors of a batch are, and what stands in them at padded positions."""

from __future__ import annotations

import re

import pytest
import torch

from pytest_trainloop import Padding
from pytest_trainloop.instruments.batches.roles import read
from tests.helpers.padded_batches import (
    CLASSES,
    FEATURES,
    IDS,
    LABELS,
    LENGTHS,
    PADDED,
    text,
    text_without_padding,
)


def roles_of(batch, padding=None):
    """Role, row axis and time axis by name."""
    return {part.name: (part.role, part.row, part.time) for part in read(batch, padding).parts}


def test_axes_may_differ_from_tensor_to_tensor():
    assert roles_of((FEATURES.transpose(0, 1), PADDED, CLASSES)) == {
        "batch[0]": ("features", 1, 0),
        "batch[1]": ("mask", 0, 1),
        "batch[2]": ("other", 0, None),
    }
    channels = {"x": FEATURES.transpose(1, 2), "lengths": LENGTHS}
    assert roles_of(channels, Padding(dim=2)) == {"x": ("features", 0, 2), "lengths": ("lengths", 0, None)}


@pytest.mark.parametrize(
    ("batch", "padding", "reason"),
    [
        ((IDS, LABELS), None, r"no mask and no lengths say where rows end; pass padding=Padding\(pad_id=, "),
        ((torch.randn(4, 3, 8, 8), torch.arange(4)), None, "no mask and no lengths say where rows end"),
        (
            text_without_padding(),
            None,
            "positions of input_ids is not known: pass padding=",
        ),
        (
            text_without_padding(),
            Padding(pad_id=0),
            r"padded positions of labels is not known: pass padding=Padding\(ignore_index=\)",
        ),
        (text(bias=torch.ones(3, 1, 5, 5).tril()), None, r"bias of shape \(3, 1, 5, 5\) has 5"),
        ({"ids": IDS, "n": torch.tensor([3, 6, 2])}, None, "n counts more positions than the 5 that are there"),
        (text(shifted=IDS[:, 1:]), None, r"shifted of shape \(3, 4\)"),
        (text(causal=torch.ones(5, 5).tril()), None, r"causal of shape \(5, 5\)"),
        ((IDS[:, [0, 3, 1, 2]], LABELS[:, :4]), Padding(pad_id=0), "pad_id 0 occurs between real tokens"),
        (
            text(decoder_attention_mask=torch.tensor([[1, 1, 1, 1, 0]] * 3)),
            None,
            "padded positions of decoder_attention_mask is not known",
        ),
    ],
)
def test_what_is_not_known_says_what_to_give(batch, padding, reason):
    roles = read(batch, padding)
    assert re.search(reason, roles.undecided)


def test_a_batch_without_tensors_of_rows_is_read_as_well():
    assert read({"n": 3, "w": torch.tensor(1.0)}).rows == 0
    assert read([]).parts == ()
    assert read(torch.zeros(0, 3)).undecided
