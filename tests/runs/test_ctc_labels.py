"""Labels of a CTC loss that a check has made are looked at before torch looks them up."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop.runs.ctc_labels import ctc_labels_checked

SCORES = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
LENGTHS = torch.tensor([6, 6])


@pytest.mark.parametrize("targets", [torch.tensor([[1, 2], [3, -1]]), torch.tensor([1, 2, 3])], ids=["rows", "joined"])
def test_a_label_that_is_no_class_is_refused_where_it_counts(targets):
    bare, original = F.ctc_loss(SCORES, targets, LENGTHS, torch.tensor([2, 1])), torch.ctc_loss
    with ctc_labels_checked():
        assert torch.equal(F.ctc_loss(SCORES, targets, LENGTHS, torch.tensor([2, 1])), bare)
        with pytest.raises(IndexError, match="Target -1 is out of bounds"):
            F.ctc_loss(SCORES, -targets.abs(), LENGTHS, (2, 1))
    assert torch.ctc_loss is original
