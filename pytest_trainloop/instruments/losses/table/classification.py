"""Losses of classes in timm and transformers."""

from __future__ import annotations

from pytest_trainloop.declare.callcontract import CallContract
from pytest_trainloop.instruments.losses.table.entry import Entry

_TIMM = "https://github.com/huggingface/pytorch-image-models/tree/main/timm/loss"
_TRANSFORMERS = "https://github.com/huggingface/transformers/blob/main/src/transformers/loss/loss_utils.py"

ENTRIES = (
    Entry(
        names=("timm.loss.LabelSmoothingCrossEntropy", "timm.loss.PolyCrossEntropy"),
        contracts=(CallContract(arguments={"x": "logits", "target": "index"}, class_dim=-1),),
        page=_TIMM,
        chance="zeros",
    ),
    Entry(
        names=("timm.loss.SoftTargetCrossEntropy",),
        contracts=(CallContract(arguments={"x": "logits", "target": "distribution"}, class_dim=-1),),
        page=_TIMM,
        chance="zeros",
    ),
    Entry(
        names=("timm.loss.AsymmetricLossSingleLabel",),
        contracts=(CallContract(arguments={"inputs": "logits", "target": "index"}, class_dim=-1),),
        page=_TIMM,
    ),
    Entry(
        names=("timm.loss.AsymmetricLossMultiLabel",),
        contracts=(CallContract(arguments={"x": "logits", "y": "binary"}),),
        page=_TIMM,
    ),
    Entry(
        names=("timm.loss.BinaryCrossEntropy",),  # takes class indices too
        contracts=(CallContract(arguments={"x": "logits"}),),
        page=_TIMM,
        chance="zeros",
    ),
    Entry(
        names=("timm.loss.PolyBinaryCrossEntropy", "timm.loss.ZlprLoss", "timm.loss.TwoWayLoss"),
        contracts=(CallContract(arguments={"x": "logits", "target": "binary"}),),
        page=_TIMM,
    ),
    Entry(
        names=("transformers.loss.loss_utils.ForSequenceClassificationLoss",),
        contracts=(CallContract(arguments={"pooled_logits": "logits"}),),
        page=_TRANSFORMERS,
    ),
)
