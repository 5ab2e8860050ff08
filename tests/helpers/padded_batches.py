"""Padded batches of many kinds, for the tests of roles and strategies."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import torch

LENGTHS = torch.tensor([3, 5, 2])
PADDED = torch.arange(5) >= LENGTHS[:, None]
IDS = torch.tensor([[7, 3, 9, 0, 0], [4, 8, 2, 5, 6], [1, 9, 0, 0, 0]])
LABELS = IDS.masked_fill(PADDED, -100)
FEATURES = torch.arange(1.0, 61.0).view(3, 5, 4).masked_fill(PADDED[..., None], 0.0)
CLASSES = torch.tensor([0, 2, 1])


@dataclass(frozen=True)
class Sample:
    frames: torch.Tensor
    lengths: torch.Tensor
    note: str = "here"


class Pair(NamedTuple):
    ids: torch.Tensor
    padding_mask: torch.Tensor


class Encoding(UserDict):
    """A mapping that keeps its entries in ``data``, as a tokenizer's ``BatchEncoding``."""


def text(**more):
    return {"input_ids": IDS.clone(), "attention_mask": (~PADDED).long(), "labels": LABELS.clone(), **more}


def text_on_the_left():
    return {key: value.flip(1) for key, value in text().items()}


def additive():
    return {"x": FEATURES.half(), "mask": torch.zeros(3, 5).half().masked_fill(PADDED, float("-inf"))}


def text_without_padding():
    return {"input_ids": IDS[:, :2], "attention_mask": torch.ones(3, 2, dtype=torch.long), "labels": IDS[:, :2]}


KINDS = {
    "dict": text(),
    "mapping": Encoding(text()),
    "tuple": (FEATURES, LENGTHS, CLASSES),
    "list": [FEATURES.double(), LENGTHS.int(), CLASSES],
    "dataclass": Sample(FEATURES, LENGTHS),
    "named tuple": Pair(IDS, PADDED),
    "nested": {"inputs": {"ids": IDS, "mask": ~PADDED}, "targets": [LABELS]},
    "time first": (FEATURES.transpose(0, 1), LENGTHS, CLASSES),
    "mask beside time-first features": (FEATURES.transpose(0, 1), PADDED),
    "left": text_on_the_left(),
    "additive": additive(),
}
