"""Rows and stretches of a batch."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.batches.padding import Proof, read_paddings
from pytest_trainloop.checks.batch.padding_invariance.slices import BatchSlice, Span, cut, slices
from pytest_trainloop.loop import Padding

LENGTHS = torch.tensor([7, 4, 3, 3, 6])
MASK = torch.arange(7)[None] < LENGTHS[:, None]
IDS = torch.arange(1, 36).view(5, 7) * MASK


def batch(**more):
    return {"ids": IDS, "mask": MASK, "lengths": LENGTHS, "classes": torch.arange(5), **more}


def padded(given, left=False):
    (found,) = read_paddings(given, at_least=Proof.EMPTY, declared=Padding(pad_id=0))
    assert (found.side == "left") == left
    return found


def test_the_shortest_and_the_longest_rows_that_are_padded_by_two_or_more():
    assert slices(padded(batch())) == [BatchSlice((2, 3), 0, 7, 0, 3), BatchSlice((1,), 0, 7, 0, 4)]


def test_one_padded_position_is_taken_where_there_is_no_more():
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    assert slices(padded(ids)) == [BatchSlice((1,), 0, 3, 0, 2)]


def test_on_the_left_the_last_positions_are_real():
    assert slices(padded({"ids": IDS.flip(1)}, left=True))[0] == BatchSlice((2, 3), 0, 7, 4, 7)


def test_what_has_positions_is_cut():
    given = batch(
        tags=IDS.masked_fill(~MASK, -100),
        features=torch.randn(5, 7, 2) * MASK[..., None],
        channels=torch.randn(5, 2, 7) * MASK[:, None],
        pairs=MASK[:, None, None] & MASK[:, None, :, None],
        places=torch.arange(7),
        row=torch.arange(7)[None],
        causal=torch.ones(7, 7).tril(),
        shifted=torch.cat([IDS, torch.zeros(5, 1, dtype=torch.long)], 1),
        number=3,
    )
    known = padded(given)
    got = cut(given, known, slices(known)[0].trimmed())
    shapes = {k: tuple(v.shape) for k, v in got.items() if isinstance(v, torch.Tensor)}
    assert shapes == {
        "ids": (2, 3), "mask": (2, 3), "lengths": (2,), "classes": (2,), "tags": (2, 3), "features": (2, 3, 2),
        "channels": (2, 2, 3), "pairs": (2, 1, 3, 3), "places": (3,), "row": (1, 3), "causal": (3, 3),
        "shifted": (2, 4),
    }  # fmt: skip
    assert got["ids"].tolist() == IDS[2:4, :3].tolist()
    assert got["lengths"].tolist() == [3, 3]
    assert got["number"] == 3


def test_on_the_left_positions_without_rows_begin_at_zero_again():
    given = {"ids": IDS.flip(1), "places": torch.arange(7)}
    known = padded(given, left=True)
    got = cut(given, known, slices(known)[0].trimmed(keep=1))
    assert got["ids"].tolist() == IDS.flip(1)[2:4, 3:].tolist()
    assert got["places"].tolist() == [0, 1, 2, 3]


def test_lengths_shrink_where_real_positions_are_cut_off():
    given = batch()
    got = cut(given, padded(given), BatchSlice((1,), 2, 5, 2, 4))
    assert got["ids"].tolist() == IDS[1:2, 2:5].tolist()
    assert got["lengths"].tolist() == [2]


def test_as_many_rows_as_ever():
    known = padded(IDS)
    assert cut(IDS, known, slices(known)[0], count=5).tolist() == IDS[[2, 3, 2, 3, 2]].tolist()


def test_the_batch_stays_as_it_is():
    given = batch()
    known = padded(given)
    cut(given, known, slices(known)[0].trimmed())
    assert torch.equal(given["ids"], torch.arange(1, 36).view(5, 7) * MASK)


@pytest.mark.parametrize(
    ("span", "size", "expected"),
    [
        (Span(8, 0, 5), 8, (0, 5)),
        (Span(8, 0, 5), 7, (0, 5)),  # without the last
        (Span(8, 3, 8), 7, (3, 7)),
        (Span(8, 0, 5), 9, (0, 6)),  # behind a first of its own
        (Span(8, 0, 5), 6, None),
        (Span(8, 0, 8), 8, None),
        (Span(2, 0, 1), 1, None),
    ],
)
def test_the_real_positions_of_a_tensor(span, size, expected):
    assert span.of(size) == expected
