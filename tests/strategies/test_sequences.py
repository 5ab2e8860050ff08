"""Batches made for language and sequence models."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop import Padding, UsageError
from pytest_trainloop.instruments.batches.roles import read
from pytest_trainloop.instruments.strategies import packed_sequences, sequences, token_batches
from tests.helpers.hypothesis_draws import drawn, smallest


def test_tokens_shrink_to_one_row_of_one_token():
    batch = smallest(token_batches(20))
    assert {key: tuple(value.shape) for key, value in batch.items()} == {
        "input_ids": (1, 1),
        "attention_mask": (1, 1),
        "labels": (1, 1),
    }


@pytest.mark.parametrize(
    ("condition", "shape"),
    [
        (lambda b: 19 in b["input_ids"], (1, 1)),
        (lambda b: b["input_ids"].shape[1] == 8, (1, 8)),
        (lambda b: len(b["input_ids"]) == 4, (4, 1)),
        (lambda b: bool((b["attention_mask"] == 0).any()), (2, 2)),
        (lambda b: 1 in b["attention_mask"].sum(1) and b["input_ids"].shape[1] > 3, (2, 4)),
        (lambda b: (b["input_ids"][:, 0] == 0).any(), (2, 2)),
    ],
)
def test_each_special_batch_is_found_and_small(condition, shape):
    assert smallest(token_batches(20, pad_side="both"), condition)["input_ids"].shape == shape


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_where_the_mask_says(side):
    for batch in drawn(token_batches(9, pad_id=8, pad_side=side, ignore_index=-1, max_length=5)):
        hidden = batch["attention_mask"] == 0
        assert bool((batch["input_ids"][hidden] == 8).all())
        assert bool((batch["input_ids"][~hidden] != 8).all())
        assert bool((batch["labels"][hidden] == -1).all())
        assert torch.equal(batch["labels"][~hidden], batch["input_ids"][~hidden])
        assert not bool(hidden[:, -1 if side == "left" else 0].any())
        roles = read(batch, Padding(pad_id=8, ignore_index=-1))
        assert roles.undecided == ""
        assert torch.equal(roles.padded, hidden)


def test_rows_without_padding():
    for batch in drawn(token_batches(5, pad_id=None, min_length=2, max_length=3), 40):
        assert bool(batch["attention_mask"].all())
        assert batch["input_ids"].shape[1] in (2, 3)


def test_labels_of_a_masked_model_stand_only_where_ids_are_hidden():
    for batch in drawn(token_batches(9, mask_id=4)):
        hidden = batch["input_ids"] == 4
        assert bool(hidden.any(1).all())
        assert bool((batch["labels"][~hidden] == -100).all())
        assert bool(((batch["labels"][hidden] >= 0) & (batch["labels"][hidden] != 4)).all())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"vocab_size": 1}, "no token besides padding"),
        ({"vocab_size": 5, "pad_id": 5}, "pad_id=5 is no id of a vocabulary of 5"),
        ({"vocab_size": 5, "min_length": 9}, "no row has 9 to 8 positions"),
        ({"vocab_size": 5, "max_rows": 0}, "max_rows=0"),
    ],
)
def test_vocabularies_and_lengths_that_are_none(options, reason):
    with pytest.raises(UsageError, match=reason):
        token_batches(**options)


@pytest.mark.parametrize("batch_first", [True, False])
def test_sequences_are_zero_beyond_their_lengths(batch_first):
    lengths = set()
    for values, each in drawn(sequences(3, max_length=6, batch_first=batch_first, dtype=torch.float64)):
        rows = values if batch_first else values.transpose(0, 1)
        lengths |= set(each.tolist())
        assert rows.shape == (len(each), int(each.max()), 3)
        assert rows.dtype is torch.float64
        for row, length in zip(rows, each.tolist(), strict=True):
            assert bool((row[:length] != 0).all())
            assert bool((row[length:] == 0).all())
    assert lengths == {1, 2, 3, 4, 5, 6}


def test_sequences_shrink_to_few_short_rows():
    assert smallest(sequences(2)).values.shape == (1, 1, 2)
    assert smallest(sequences(2), lambda s: len(set(s.lengths.tolist())) > 1).lengths.tolist() == [2, 1]
    assert smallest(sequences(2), lambda s: int(s.lengths.max()) == 8).values.shape == (1, 8, 2)
    assert smallest(packed_sequences(2), lambda p: len(p.batch_sizes) > 1).data.shape == (2, 2)


def test_packed_sequences_are_the_same_rows():
    plain, packed = drawn(sequences(2), 20), drawn(packed_sequences(2), 20)
    for one, other in zip(plain, packed, strict=True):
        back, lengths = torch.nn.utils.rnn.pad_packed_sequence(other, batch_first=True)
        assert torch.equal(back, one.values)
        assert torch.equal(lengths, one.lengths)


def test_the_ambient_random_state_stays():
    before = torch.get_rng_state()
    drawn(token_batches(9), 5)
    drawn(sequences(2), 5)
    assert torch.equal(before, torch.get_rng_state())


def test_sequences_without_features():
    with pytest.raises(UsageError, match="at least 1 is needed"):
        sequences(0)
    with pytest.raises(UsageError, match="no row has 3 to 2 positions"):
        sequences(1, min_length=3, max_length=2)
