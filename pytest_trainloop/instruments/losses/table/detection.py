"""Boxes and dense detection: torchvision's functions, and those that other libraries copied from it."""

from __future__ import annotations

from pytest_trainloop.declare.callcontract import CallContract
from pytest_trainloop.instruments.losses.table.entry import Entry

_PAGE = "https://docs.pytorch.org/vision/stable/generated/torchvision.ops.{}.html"
_TRANSFORMERS = (
    "https://github.com/huggingface/transformers/blob/main/src/transformers/loss/loss_for_object_detection.py"
)
_PAIR = {"boxes1": "boxes", "boxes2": "boxes"}

ENTRIES = (
    *(
        Entry(
            names=(f"torchvision.ops.{name}",),
            contracts=(CallContract(arguments=_PAIR),),
            page=_PAGE.format(name),
        )
        for name in ("generalized_box_iou_loss", "distance_box_iou_loss", "complete_box_iou_loss")
    ),
    *(
        Entry(
            names=(f"torchvision.ops.{name}",),
            contracts=(
                CallContract(arguments=_PAIR, when={"fmt": "xyxy"}, gives="similarity", pairwise=True),
                CallContract(arguments={"boxes1": "values", "boxes2": "values"}, gives="similarity", pairwise=True),
            )
            if name == "box_iou"
            else (CallContract(arguments=_PAIR, gives="similarity", pairwise=True),),
            page=_PAGE.format(name),
        )
        for name in ("box_iou", "generalized_box_iou", "distance_box_iou", "complete_box_iou")
    ),
    Entry(
        names=("torchvision.ops.sigmoid_focal_loss",),
        contracts=(CallContract(arguments={"inputs": "logits", "targets": "binary"}),),
        page=_PAGE.format("sigmoid_focal_loss"),
        chance="zeros",
    ),
    Entry(
        names=("transformers.loss.loss_for_object_detection.generalized_box_iou",),
        contracts=(CallContract(arguments=_PAIR, gives="similarity", pairwise=True),),
        page=_TRANSFORMERS,
    ),
    Entry(
        names=(
            "transformers.loss.loss_for_object_detection.sigmoid_focal_loss",
            "transformers.loss.loss_for_object_detection.dice_loss",
        ),
        contracts=(CallContract(arguments={"inputs": "logits", "targets": "binary"}),),
        page=_TRANSFORMERS,
    ),
    Entry(
        names=("monai.losses.BoxGIoULoss", "monai.losses.giou"),
        contracts=(CallContract(arguments={"input": "boxes", "target": "boxes"}),),
        page="https://docs.monai.io/en/stable/losses.html",
    ),
)
