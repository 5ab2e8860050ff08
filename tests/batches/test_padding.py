"""Which positions are padding: what proves it, how far, and that every user of the reader gets the same answer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from pytest_trainloop.checks.batch.edge_batches.runs import lengths_of
from pytest_trainloop.checks.loss.loss_contract.call import Embedded, Step
from pytest_trainloop.checks.loss.loss_contract.padding import padded_positions
from pytest_trainloop.instruments.batches.padding import Proof, padding_ids, read_padding, read_paddings
from pytest_trainloop.instruments.batches.roles import read
from pytest_trainloop.instruments.batches.valid_targets import valid_targets
from pytest_trainloop.recording.record import Record
from tests.helpers.padded_batches import FEATURES, IDS, KINDS, LABELS, LENGTHS, PADDED, text, text_without_padding

MASK = (~PADDED).long()
DECLARED = Padding(pad_id=0)
COUNTED = torch.arange(15).view(3, 5)
FIRST = torch.tensor([[0, 1, 1]] * 2)
STARTED = torch.tensor([[1, 5, 6], [1, 7, 8]])
"""Rows that all begin with the same token."""


def empty(batch, declared=None, pads=(), rows=0):
    """The padding that is proven by all tensors; None where there is none."""
    found = read_paddings(batch, at_least=Proof.EMPTY, batch_dim=rows, declared=declared, pad_ids=pads)
    assert len(found) < 2
    return found[0] if found else None


# proven by all tensors


@pytest.mark.parametrize(
    ("batch", "declared", "pads", "source", "reason"),
    [
        ({"ids": IDS, "mask": MASK}, None, (), "mask", "mask is 0 there"),
        ({"ids": IDS, "mask": MASK.bool()}, None, (), "mask", "mask is False there"),
        ({"ids": IDS, "mask": 1 - MASK}, None, (), "mask", "mask is 1 there"),
        ({"ids": IDS, "added": (1.0 - MASK) * -1e4}, None, (), "mask", "added is -10000.0 there"),
        ((IDS, LENGTHS), None, (), "lengths", "they lie beyond batch[1]"),
        (IDS, DECLARED, (), "id", "the declared pad_id 0 is there"),
        (IDS, None, (0,), "id", "the padding id 0 is there"),
        ({"ids": IDS, "tags": LABELS}, DECLARED, (), "id", "the declared pad_id 0 is there"),
        ({"x": torch.randn(3, 5, 4) * MASK[..., None], "mask": MASK.double()}, None, (), "mask", "mask is 0.0 there"),
        ({"x": torch.randn(3, 4, 5) * MASK[:, None], "n": LENGTHS}, None, (), "lengths", "they lie beyond n"),
        ({"x": torch.randn(3, 5, 5) * MASK[..., None], "n": LENGTHS}, None, (), "lengths", "they lie beyond n"),
        ({"ids": IDS, "mask": MASK, "places": torch.arange(5).expand(3, 5)}, None, (), "mask", "mask is 0 there"),
        ({"ids": IDS, "mask": MASK, "places": MASK.cumsum(1) - 1}, None, (), "mask", "mask is 0 there"),
        ({"ids": IDS, "mask": MASK, "pairs": MASK[:, None] * MASK[:, :, None]}, None, (), "mask", "mask is 0 there"),
        ({"ids": IDS, "mask": MASK, "far": torch.rand(3, 5, 1) - torch.rand(3, 1, 5)}, None, (), "", ""),
        ({"ids": IDS, "mask": MASK, "far": (FEATURES @ FEATURES.mT)}, None, (), "mask", "mask is 0 there"),
    ],
)
def test_padding_is_proven_by_what_all_tensors_hold(batch, declared, pads, source, reason):
    found = empty(batch, declared, pads)
    if not source:
        assert found is None
        return
    assert found is not None
    assert (found.source, found.reason, found.proof) == (source, reason, Proof.EMPTY)
    assert torch.equal(found.mask, PADDED)
    assert (found.lengths, found.side, found.any) == ((3, 5, 2), "right", True)


@pytest.mark.parametrize(
    ("batch", "declared"),
    [
        (IDS, None),
        ((IDS, torch.tensor([1, 2, 0])), None),
        ({"ids": IDS + 1, "mask": torch.tensor([[1, 0, 1, 1, 1]] * 3)}, DECLARED),
        # something stands where the mask is off: prompts, segments, what is to be guessed
        ({"ids": COUNTED, "mask": MASK}, None),
        ({"ids": IDS, "mask": MASK, "tags": COUNTED}, None),
        # as much in every row: the first or the last token, always the same
        ({"ids": STARTED, "mask": FIRST}, None),
        ({"ids": torch.tensor([[5, 6], [7, 0]]), "mask": torch.tensor([[1, 1], [1, 0]])}, None),
        # a row of nothing but zeros
        (torch.tensor([[1, 2], [0, 0]]) * 0, DECLARED),
        ({"mask": MASK}, None),
        (text_without_padding(), DECLARED),
        ("text", None),
    ],
)
def test_nothing_is_proven(batch, declared):
    assert empty(batch, declared) is None


def test_the_padding_idx_of_embeddings():
    tables = nn.ModuleList([nn.Embedding(9, 2, padding_idx=3), nn.EmbeddingBag(9, 2, padding_idx=5)])
    assert padding_ids([tables, nn.Embedding(9, 2), nn.Embedding(9, 2, padding_idx=3)]) == [3, 5]


# proven less far


def strongest(batch, declared=None):
    """How far it is proven that something, or nothing, in a batch is padding."""
    found = [read_padding(batch, at_least=proof, declared=declared) for proof in reversed(Proof)]
    return next((one.proof for one in found if one is not None), None)


@pytest.mark.parametrize(
    ("batch", "declared", "proof"),
    [
        (text(), None, Proof.EMPTY),
        ({"ids": IDS, "mask": MASK, "labels": COUNTED - 1}, None, Proof.INPUTS),
        ((IDS[:1], MASK[:1]), None, Proof.INPUTS),
        ({"ids": COUNTED, "attention_mask": MASK}, None, Proof.SAID),
        ({"ids": STARTED, "attention_mask": FIRST}, None, Proof.INPUTS),
        ({"ids": IDS, "more": COUNTED}, DECLARED, Proof.SAID),
        (IDS, None, Proof.REPEATED),
        ({"ids": COUNTED, "mask": MASK}, None, Proof.REPEATED),
        ({"ids": STARTED, "mask": FIRST}, None, None),
        (COUNTED, None, None),
    ],
)
def test_how_far_it_is_proven(batch, declared, proof):
    assert strongest(batch, declared) is proof


@pytest.mark.parametrize(
    ("batch", "declared", "reason"),
    [
        (text_without_padding(), None, "attention_mask is 1 everywhere"),
        ((IDS, torch.zeros(3, 5, dtype=torch.bool)), None, "batch[1] is 0 everywhere"),
        ((FEATURES, torch.full((3,), 5)), None, "all batch[1] are 5"),
        (IDS, Padding(pad_id=77), "the declared pad_id 77 does not occur"),
    ],
)
def test_that_nothing_is_padding(batch, declared, reason):
    found = read_padding(batch, at_least=Proof.SAID, declared=declared)
    assert found is not None
    assert (found.any, found.proof, found.reason) == (False, Proof.SAID, reason)
    assert read_padding(batch, at_least=Proof.INPUTS, declared=declared) is None


# every user


@pytest.mark.parametrize("kind", KINDS)
def test_every_user_of_the_reader_agrees(kind):
    batch, left = KINDS[kind], kind == "left"
    expected = PADDED.flip(1) if left else PADDED
    time_first = "time" in kind
    inputs = [Embedded(IDS.flip(1) if left else IDS, None, IDS, "0")]
    loop = TrainLoop(model=nn.Linear(1, 1), batch=batch, fit=lambda batches: None)

    strategies = read(batch)
    assert torch.equal(strategies.padded, expected)
    assert (strategies.undecided, strategies.rows, strategies.length, strategies.lengths) == ("", 3, 5, (3, 5, 2))
    assert strategies.side == ("left" if left else "right")

    loss_contract = padded_positions(Step(batch=batch, embedded=inputs), (3, 5))
    assert loss_contract is not None
    assert torch.equal(loss_contract.mask, expected)

    found = empty(batch, rows=int(time_first))
    if kind == "mask beside time-first features":
        assert found is None  # it cuts all tensors along one axis of rows
    else:
        assert torch.equal(found.mask, expected)

    lengths = ((), 0) if left or time_first else ((3, 5, 2), 5)
    assert lengths_of(batch, loop) == lengths

    if kind != "mask beside time-first features":
        counted = valid_targets(batch, 3, 0, None, Record(parameters=[], optimizers=[])).counts
        assert (3, 5, 2) in counted
