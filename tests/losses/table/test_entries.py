"""The rows of the table: that they can be read, and that the libraries have what they name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.instruments.losses.table import lookup
from pytest_trainloop.instruments.losses.table.lookup import IN_FRAMES, OF_TORCH
from pytest_trainloop.recording.torch_names import LOSSES
from tests.helpers.stand_ins import monai, pytorch_metric_learning, torchvision

NAMES = sorted(((name, entry) for entry in IN_FRAMES for name in entry.names), key=lambda pair: pair[0])


def test_every_loss_of_torch_has_a_row():
    assert set(OF_TORCH) == LOSSES
    for name, entry in OF_TORCH.items():
        named = inspect.signature(getattr(F, name)).parameters
        assert set(entry.contracts[0].arguments) <= set(named), name
        assert lookup(getattr(F, name)) is entry


def test_every_row_has_its_page_and_no_name_stands_twice():
    assert all(entry.page.startswith("https://") for entry in (*IN_FRAMES, *OF_TORCH.values()))
    assert len({name for name, _ in NAMES}) == len(NAMES)


@pytest.mark.integration
@pytest.mark.parametrize(("name", "entry"), NAMES, ids=[name for name, _ in NAMES])
def test_the_library_has_what_the_row_names(name, entry):
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, RuntimeError):
        found = None
    if found is None:
        pytest.importorskip(name.partition(".")[0], exc_type=Exception)
        pytest.fail(f"{name} is not there")
    if inspect.ismodule(found):
        found = getattr(found, name.rpartition(".")[2])
    called = found.forward if inspect.isclass(found) else found
    parameters = inspect.signature(called).parameters
    own = inspect.signature(found.__init__).parameters if inspect.isclass(found) else {}
    for contract in entry.contracts:
        if name.startswith("torch."):
            continue  # a base class: its methods' parameters are those of each distribution
        assert set(contract.arguments) <= set(parameters)
        assert {flag.strip("_") for flag in contract.when} <= set(parameters) | set(own) | {"ref_labels"}


def test_known_by_class_module_and_function():
    assert lookup(monai.DiceLoss) is lookup(monai.DiceLoss(sigmoid=True)) is not None
    assert lookup(torchvision.generalized_box_iou_loss).name == "generalized_box_iou_loss"
    assert lookup(pytorch_metric_learning.TripletMarginLoss).name == "ContrastiveLoss", "the first of its row"


def test_others_are_not_known():
    class DiceLoss(nn.Module):
        def forward(self, scores, mask):
            return scores.mean() - mask.mean()

    assert lookup(DiceLoss) is None
    assert lookup(torch.relu) is None
    assert lookup(lambda scores, mask: scores) is None
    assert importlib.import_module("pytest_trainloop.instruments.losses.table").lookup is lookup
