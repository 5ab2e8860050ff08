"""An observed step never waits for its device: values are read once, after the run.

Tensors of the device "meta" have no values: whatever reads one raises. So a loop on it shows on any machine what
torch's sync debug mode shows on a GPU (tests/cuda).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.recording import samples
from pytest_trainloop.recording.watch import FULL_ROUNDS, Watch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, ids):
        x = self.convolution(self.embedding(ids).transpose(1, 2))
        x = self.dropout(torch.relu(self.batch_norm(x))).transpose(1, 2)
        return self.head(self.norm(x).mean(1))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_no_observed_step_reads_a_value(monkeypatch, kind):
    monkeypatch.setattr(samples, "has_values", lambda tensor: True)  # sampled as on a device that has some
    with torch.device("meta"):
        model, ids, labels = Net(), torch.zeros(4, 7, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    made = []

    def train():
        for step in range(FULL_ROUNDS + 3):  # both densities
            optimizer.zero_grad()
            F.cross_entropy(model(ids), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            made.append(step)

    with Watch({"model": model}, [optimizer]) as watch:
        train()
        assert watch.record.mistakes == []
    assert len(made) == FULL_ROUNDS + 3
    (mistake,) = watch.record.mistakes  # the values are read at its end
    assert "no data" in str(mistake)
