"""Similarities of images that are used as losses: SSIM, by its usual names."""

from __future__ import annotations

from pytest_trainloop.declare.callcontract import CallContract
from pytest_trainloop.instruments.losses.table.entry import Entry

_PYTORCH_MSSSIM = "https://github.com/VainF/pytorch-msssim"
_TORCHMETRICS = "https://lightning.ai/docs/torchmetrics/stable/image/structural_similarity.html"
_KORNIA = "https://kornia.readthedocs.io/en/latest/losses.html"

ENTRIES = (
    Entry(
        names=("pytorch_msssim.ssim", "pytorch_msssim.ms_ssim", "pytorch_msssim.SSIM", "pytorch_msssim.MS_SSIM"),
        contracts=(
            CallContract(arguments={"X": "images", "Y": "images"}, gives="similarity", value_range="data_range"),
        ),
        page=_PYTORCH_MSSSIM,
    ),
    Entry(
        names=(
            "torchmetrics.functional.image.structural_similarity_index_measure",
            "torchmetrics.functional.image.multiscale_structural_similarity_index_measure",
            "torchmetrics.functional.image.peak_signal_noise_ratio",
        ),
        contracts=(
            CallContract(
                arguments={"preds": "images", "target": "images"}, gives="similarity", value_range="data_range"
            ),
        ),
        page=_TORCHMETRICS,
    ),
    Entry(
        names=("kornia.metrics.ssim", "kornia.metrics.SSIM"),
        contracts=(
            CallContract(arguments={"img1": "images", "img2": "images"}, gives="similarity", value_range="max_val"),
        ),
        page=_KORNIA,
    ),
    Entry(
        names=("kornia.metrics.psnr",),
        contracts=(
            CallContract(arguments={"image": "images", "target": "images"}, gives="similarity", value_range="max_val"),
        ),
        page=_KORNIA,
    ),
    Entry(
        names=("kornia.losses.ssim_loss", "kornia.losses.SSIMLoss"),
        contracts=(CallContract(arguments={"img1": "images", "img2": "images"}, value_range="max_val"),),
        page=_KORNIA,
    ),
    Entry(
        names=("kornia.losses.psnr_loss", "kornia.losses.PSNRLoss"),
        contracts=(CallContract(arguments={"image": "images", "target": "images"}, value_range="max_val"),),
        page=_KORNIA,
    ),
    Entry(
        names=("monai.losses.SSIMLoss",),
        contracts=(CallContract(arguments={"input": "images", "target": "images"}, value_range="_data_range"),),
        page="https://docs.monai.io/en/stable/losses.html",
    ),
)
