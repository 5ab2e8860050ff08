"""What is taken for padding, and what is not."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.batches.padding import Proof, read_paddings
from pytest_trainloop.loop import Padding

IDS = torch.tensor([[5, 6, 7, 8, 9], [3, 4, 0, 0, 0], [8, 2, 6, 0, 0]])
MASK = (IDS != 0).long()
LENGTHS = torch.tensor([5, 2, 3])
DECLARED = Padding(pad_id=0)


def known(batch, declared=None, pads=(), rows=0):
    found = read_paddings(batch, at_least=Proof.EMPTY, batch_dim=rows, declared=declared, pad_ids=pads)
    assert len(found) < 2
    return found[0] if found else None


@pytest.mark.parametrize(
    ("batch", "declared", "pads", "source"),
    [
        ({"ids": IDS, "mask": MASK}, None, (), "mask"),
        ({"ids": IDS, "mask": MASK.bool()}, None, (), "mask"),
        ({"ids": IDS, "mask": 1 - MASK}, None, (), "mask"),
        ((IDS, LENGTHS), None, (), "lengths"),
        (IDS, DECLARED, (), "id"),
        ({"ids": IDS, "tags": IDS.masked_fill(MASK == 0, -100)}, DECLARED, (), "id"),
        (IDS, None, (0,), "id"),
        ({"x": torch.randn(3, 5, 4) * MASK[..., None], "mask": MASK.double()}, None, (), "mask"),
        ({"x": torch.randn(3, 4, 5) * MASK[:, None], "lengths": LENGTHS}, None, (), "lengths"),
        ({"ids": IDS, "mask": MASK, "places": torch.arange(5).expand(3, 5)}, None, (), "mask"),
        ({"ids": IDS, "mask": MASK, "places": MASK.cumsum(1) - 1}, None, (), "mask"),
        ({"ids": IDS, "mask": MASK, "pairs": MASK[:, None] * MASK[:, :, None]}, None, (), "mask"),
    ],
)
def test_padding_is_known(batch, declared, pads, source):
    found = known(batch, declared, pads)
    assert found is not None
    assert found.source == source
    assert found.lengths == (5, 2, 3)
    assert found.side == "right"


def test_on_the_left():
    found = known({"ids": IDS.flip(1), "mask": MASK.flip(1)})
    assert found is not None
    assert found.side == "left"
    assert found.lengths == (5, 2, 3)


def test_rows_along_the_second_axis():
    found = known({"ids": IDS.T, "mask": MASK.T}, rows=1)
    assert found is not None
    assert found.mask.shape == (3, 5)


@pytest.mark.parametrize(
    ("batch", "declared"),
    [
        (IDS, None),
        ((IDS, torch.tensor([1, 2, 0])), None),
        ({"ids": IDS + 1, "mask": torch.tensor([[1, 0, 1, 1, 1]] * 3)}, DECLARED),
        # something stands where the mask is off: prompts, segments, what is to be guessed
        ({"ids": torch.arange(15).view(3, 5), "mask": MASK}, None),
        ({"ids": IDS, "mask": MASK, "tags": torch.arange(15).view(3, 5)}, None),
        # as much in every row: the first or the last token, always the same
        ({"ids": torch.tensor([[1, 5, 6], [1, 7, 8]]), "mask": torch.tensor([[0, 1, 1]] * 2)}, None),
        ({"ids": torch.tensor([[5, 6], [7, 0]]), "mask": torch.tensor([[1, 1], [1, 0]])}, None),
        # a row of nothing but zeros
        (torch.tensor([[1, 2], [0, 0]]) * 0, DECLARED),
        ({"mask": MASK}, None),
        ("text", None),
    ],
)
def test_nothing_is_known(batch, declared):
    assert known(batch, declared) is None


def test_a_mask_goes_before_the_pad_id_since_the_first_may_end_a_text():
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    found = known({"ids": IDS, "mask": mask}, DECLARED)
    assert found is not None
    assert found.lengths == (5, 3, 4)


def test_features_are_told_from_ids():
    assert known({"ids": IDS, "mask": MASK}).of_ids
    assert not known({"x": torch.randn(3, 5, 4) * MASK[..., None], "mask": MASK, "tags": IDS}).of_ids


def test_source_and_target_are_padded_to_lengths_of_their_own():
    target = torch.tensor([[5, 6, 7], [3, 0, 0], [8, 2, 0]])
    found = read_paddings((IDS, target), at_least=Proof.EMPTY, declared=DECLARED)
    assert [p.grid.length for p in found] == [5, 3]
