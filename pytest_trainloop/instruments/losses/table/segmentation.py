"""Overlap and focal losses of segmentation libraries: their flags say whether they take logits or probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.declare.callcontract import CallContract
from pytest_trainloop.instruments.losses.table.entry import Entry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.instruments.losses.table.entry import Chance

_MONAI = "https://docs.monai.io/en/stable/losses.html"
_SMP = "https://smp.readthedocs.io/en/latest/losses.html"
_KORNIA = "https://kornia.readthedocs.io/en/latest/losses.html"


def _activated(target: str, onehot: Mapping[str, object]) -> tuple[CallContract, ...]:
    """By the flags ``sigmoid`` and ``softmax``; with neither, and no other activation, probabilities."""
    return (
        CallContract(arguments={"input": "logits", "target": "binary"}, when={"sigmoid": True} | dict(onehot)),
        CallContract(arguments={"input": "logits", "target": target}, when={"softmax": True} | dict(onehot)),
        CallContract(
            arguments={"input": "probabilities", "target": "binary" if target == "one_hot" else target},
            when={"sigmoid": False, "softmax": False, "other_act": None} | dict(onehot),
        ),
    )


_OF_MONAI = (
    *_activated("one_hot", {"to_onehot_y": False}),
    CallContract(
        arguments={"input": "logits", "target": "index"},
        when={"sigmoid": True, "to_onehot_y": True},
        ignore_index="ignore_index",
    ),
    CallContract(
        arguments={"input": "logits", "target": "index"},
        when={"softmax": True, "to_onehot_y": True},
        ignore_index="ignore_index",
    ),
    CallContract(
        arguments={"input": "probabilities", "target": "index"},
        when={"sigmoid": False, "softmax": False, "other_act": None, "to_onehot_y": True},
        ignore_index="ignore_index",
    ),
)


def _by_mode(word: str, **flags: object) -> tuple[CallContract, ...]:
    return tuple(
        CallContract(
            arguments={"y_pred": word, "y_true": "index" if mode == "multiclass" else "binary"},
            when=flags | {"mode": mode},
            ignore_index="ignore_index",
        )
        for mode in ("binary", "multilabel", "multiclass")
    )


def _always(names: tuple[str, ...], arguments: dict[str, str], page: str, chance: Chance = "") -> Entry:
    contract = CallContract(arguments=arguments, ignore_index="ignore_index")
    return Entry(names=names, contracts=(contract,), page=page, chance=chance)


ENTRIES = (
    Entry(
        names=tuple(
            f"monai.losses.{name}"
            for name in ("DiceLoss", "GeneralizedDiceLoss", "TverskyLoss", "HausdorffDTLoss", "MCCLoss")
        ),
        contracts=_OF_MONAI,
        page=_MONAI,
    ),
    Entry(
        names=("monai.losses.FocalLoss",),
        contracts=tuple(
            CallContract(
                arguments={"input": "logits", "target": "index" if onehot else "one_hot" if softmax else "binary"},
                when={"use_softmax": softmax, "to_onehot_y": onehot},
                ignore_index="ignore_index",
            )
            for softmax in (False, True)
            for onehot in (False, True)
        ),
        page=_MONAI,
        chance="zeros",
    ),
    _always(("monai.losses.GeneralizedWassersteinDiceLoss",), {"input": "logits", "target": "index"}, _MONAI),
    _always(("monai.losses.AsymmetricUnifiedFocalLoss",), {"y_pred": "probabilities", "y_true": "binary"}, _MONAI),
    Entry(
        names=tuple(f"segmentation_models_pytorch.losses.{n}" for n in ("DiceLoss", "JaccardLoss", "TverskyLoss")),
        contracts=(*_by_mode("logits", from_logits=True), *_by_mode("probabilities", from_logits=False)),
        page=_SMP,
    ),
    Entry(
        names=("segmentation_models_pytorch.losses.FocalLoss",),
        contracts=_by_mode("logits"),
        page=_SMP,
        chance="zeros",
    ),
    Entry(
        names=("segmentation_models_pytorch.losses.LovaszLoss",),
        contracts=_by_mode("logits"),
        page=_SMP,
    ),
    _always(
        ("segmentation_models_pytorch.losses.SoftBCEWithLogitsLoss",),
        {"y_pred": "logits", "y_true": "binary"},
        _SMP,
        "zeros",
    ),
    Entry(
        names=("segmentation_models_pytorch.losses.SoftCrossEntropyLoss",),
        contracts=(
            CallContract(
                arguments={"y_pred": "logits", "y_true": "index"}, when={"dim": 1}, ignore_index="ignore_index"
            ),
        ),
        page=_SMP,
        chance="zeros",
    ),
    _always(("segmentation_models_pytorch.losses.MCCLoss",), {"y_pred": "probabilities", "y_true": "binary"}, _SMP),
    _always(
        tuple(f"kornia.losses.{n}" for n in ("DiceLoss", "dice_loss", "TverskyLoss", "tversky_loss")),
        {"pred": "logits", "target": "index"},
        _KORNIA,
    ),
    _always(
        tuple(f"kornia.losses.{n}" for n in ("FocalLoss", "focal_loss")),
        {"pred": "logits", "target": "index"},
        _KORNIA,
        "zeros",
    ),
    _always(
        tuple(f"kornia.losses.{n}" for n in ("BinaryFocalLossWithLogits", "binary_focal_loss_with_logits")),
        {"pred": "logits", "target": "binary"},
        _KORNIA,
        "zeros",
    ),
    _always(
        tuple(f"kornia.losses.{n}" for n in ("LovaszHingeLoss", "lovasz_hinge_loss")),
        {"pred": "logits", "target": "binary"},
        _KORNIA,
    ),
    _always(
        tuple(f"kornia.losses.{n}" for n in ("LovaszSoftmaxLoss", "lovasz_softmax_loss")),
        {"pred": "logits", "target": "index"},
        _KORNIA,
    ),
    _always(
        tuple(f"kornia.losses.{n}" for n in ("js_div_loss_2d", "kl_div_loss_2d")),
        {"pred": "probabilities", "target": "distribution"},
        _KORNIA,
    ),
)
