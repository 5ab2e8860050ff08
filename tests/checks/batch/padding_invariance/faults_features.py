"""Padding of features, as frames of speech, that is declared or beside a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.loops.pairs import pair
from tests.loops.several_texts import trained

FRAMES, LENGTHS = 12, (12, 9, 7, 5)


def frames():
    """(rows, frames, features), 0 beyond each row's length."""
    generator = torch.Generator().manual_seed(5)
    inside = (torch.arange(FRAMES)[None] < torch.tensor(LENGTHS)[:, None]).unsqueeze(-1)
    return torch.rand(len(LENGTHS), FRAMES, 6, generator=generator) * inside


class Standardised(nn.Module):
    """Padded frames are 0 before their mean is subtracted, and not after."""

    def __init__(self, masked):
        super().__init__()
        self.conv, self.head, self.masked = nn.Conv1d(6, 8, 5, padding=2), nn.Linear(8, 5), masked

    def forward(self, feats, lengths):
        x = (feats - 0.5) * 2
        if self.masked:
            x = x * (torch.arange(x.shape[1])[None] < lengths[:, None]).unsqueeze(-1)
        return self.head(self.conv(x.transpose(1, 2)).relu().transpose(1, 2))


def declared(masked):
    def loss_of(model, batch):
        scores = model(batch["feats"], batch["lengths"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, batch["targets"], batch["lengths"], torch.full((len(LENGTHS),), 2))

    def make() -> TrainLoop:
        batch = {
            "feats": frames(),
            "lengths": torch.tensor(LENGTHS),
            "targets": torch.tensor([[1, 2], [3, 1], [2, 4], [4, 3]]),
        }
        return trained(Standardised(masked), batch, loss_of, padding=Padding(pad_id=0, of=("feats",)))

    return make


pair(
    "declared_frames_are_standardised_after_padding",
    "padding_invariance",
    "padding_counts",
    where="self.conv(x",
    faulty=declared(masked=False),
    fixed=declared(masked=True),
)
