"""How many entries of each row count, and the order that makes micro-batches uneven."""

from __future__ import annotations

import torch

from pytest_trainloop import Padding
from pytest_trainloop.instruments.batches.valid_targets import valid_targets
from pytest_trainloop.recording.events import LossCall, Place
from pytest_trainloop.recording.record import Record

NOTHING = Record(parameters=[], optimizers=[])


def saw_ignoring(value):
    call = LossCall(
        at=1,
        place=Place("train.py", 1),
        site=(("train.py", 1),),
        name="cross_entropy",
        input_shape=(4, 3),
        input_dtype="float32",
        target_shape=(4,),
        target_dtype="int64",
        reduction="mean",
        ignore_index=value,
    )
    return Record(parameters=[], optimizers=[], events=[call])


def labels(*lengths, width=6, ignored=-100):
    rows = torch.arange(width).expand(len(lengths), width) + 1
    return rows.masked_fill(torch.arange(width) >= torch.tensor(lengths)[:, None], ignored)


def test_what_the_loss_ignores_is_read_off_its_call():
    assert valid_targets({"y": labels(5, 2, ignored=7)}, 2, 0, None, saw_ignoring(7)).order == (1, 0)
    assert valid_targets({"y": labels(5, 2, ignored=7)}, 2, 0, None, NOTHING).counts == ()


def test_rows_stay_in_place_where_all_are_alike_or_one_is_empty():
    assert valid_targets({"y": labels(4, 4)}, 2, 0, None, saw_ignoring(-100)).order == (0, 1)
    assert valid_targets({"y": labels(4, 0)}, 2, 0, None, saw_ignoring(-100)).order == (0, 1)


def test_what_was_declared_as_padding_counts():
    padded = {"ids": labels(5, 2, ignored=0)}
    assert valid_targets(padded, 2, 0, Padding(pad_id=0), NOTHING).order == (1, 0)


def test_a_mask_counts():
    mask = (labels(4, 6, 2) > 0).long()
    assert valid_targets({"x": torch.randn(3, 6, 2), "mask": mask}, 3, 0, None, NOTHING).order == (2, 0, 1)
