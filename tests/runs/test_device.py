"""A loop that is to run on a CUDA device and was built elsewhere is refused: it would pass unchecked."""

import pytest
import torch

from pytest_trainloop import TrainLoop, UsageError
from pytest_trainloop.runs.evidence import Evidence


def loop(device):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainLoop(model=model, optimizer=optimizer, batch=torch.ones(4, 2), step=lambda batch: None)


def without_a_knob():
    return loop("cpu")


def whose_knob_does_nothing(device="cpu"):
    return loop(device)


def test_no_knob():
    with pytest.raises(UsageError, match="this model is on cpu; it has no knob 'device'"):
        _ = Evidence(without_a_knob, device="cuda").offers


def test_a_knob_that_does_nothing():
    with pytest.raises(UsageError, match="its parameter 'device' was given 'cuda': move the model there"):
        _ = Evidence(whose_knob_does_nothing, knobs={"device": "device"}, device="cuda").offers


def test_on_cpu_nothing_is_asked():
    assert "run" in Evidence(without_a_knob, device="cpu").offers
