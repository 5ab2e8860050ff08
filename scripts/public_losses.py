"""What the battery says of losses as libraries release them, each in a plain loop that trains a small model with it.

python scripts/public_losses.py FOLDER [-k TEXT] [--all]

FOLDER holds the packages (pip install --target FOLDER --no-deps monai segmentation-models-pytorch kornia timm
pytorch-metric-learning pycox torchsurv ...); those that are missing are said. Without --all only the checks of the loss
family run, and those that read what a loss does with rows. Every accusation printed here is a false alarm.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.core.registry import of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Batch = tuple[torch.Tensor, ...]

FAMILIES = ("loss", "batch", "learning")
CLASSES, SIDE, ROWS, FEATURES = 3, 16, 8, 12


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _mask() -> torch.Tensor:
    """Discs of two sizes in noise: class per pixel, shape (ROWS, SIDE, SIDE)."""
    ys, xs = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    centres = 4 + 8 * torch.rand(ROWS, 2, generator=_generator())
    distance = ((ys - centres[:, 0, None, None]) ** 2 + (xs - centres[:, 1, None, None]) ** 2).sqrt()
    return (distance < 5).long() + (distance < 2.5).long()


def dense(classes: int, target: str) -> tuple[nn.Module, Batch]:
    """A small convolutional net, images, and masks as ``target`` says: "indices", "channel", "one-hot" or "float"."""
    mask = _mask()
    image = (mask.float() + 0.3 * torch.randn(mask.shape, generator=_generator()))[:, None]
    binary = (mask > 0).float()[:, None]
    made = {
        "indices": mask if classes > 1 else binary[:, 0].long(),
        "channel": mask[:, None],
        "one-hot": nn.functional.one_hot(mask, CLASSES).permute(0, 3, 1, 2).float(),
        "float": binary,
    }[target]
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, classes, 3, padding=1))
    return net, (image, made)


def rows(outputs: int, target: str) -> tuple[nn.Module, Batch]:
    """A small MLP, features, and a target per row: "labels", "many" (several labels a row) or "values"."""
    g = _generator()
    labels = torch.arange(4 * ROWS) % CLASSES
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=g)
    x = centres[labels] + 0.7 * torch.randn(4 * ROWS, FEATURES, generator=g)
    many = (x[:, :outputs] > 0.5).float()
    values = (x @ torch.randn(FEATURES, 1, generator=g)) / FEATURES**0.5
    net = nn.Sequential(nn.Linear(FEATURES, 24), nn.Tanh(), nn.Linear(24, outputs))
    return net, (x, {"labels": labels, "many": many, "values": values}[target])


def survival(outputs: int) -> tuple[nn.Module, Batch]:
    """Features, times until an event, and whether it was seen."""
    g = _generator()
    x = torch.randn(4 * ROWS, FEATURES, generator=g)
    times = torch.distributions.Exponential((0.5 * x[:, 0]).exp()).sample() + 0.1
    seen = torch.rand(4 * ROWS, generator=g) < 0.7
    return nn.Sequential(nn.Linear(FEATURES, 24), nn.Tanh(), nn.Linear(24, outputs)), (x, times, seen)


def images() -> tuple[nn.Module, Batch]:
    """Noisy images and clean ones, between 0 and 1."""
    clean = _mask().float()[:, None] / 2
    noisy = clean + 0.2 * torch.randn(clean.shape, generator=_generator())
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 3, padding=1), nn.Sigmoid())
    return net, (noisy, clean)


def loop(data: Callable[[], tuple[nn.Module, Batch]], loss: Callable[[], Any], call: Any = None) -> TrainLoop:
    """Adam on one batch; ``call(loss, output, *targets)`` where the loss is not called with just these."""
    torch.manual_seed(0)
    (model, batch), criterion = data(), loss()
    parameters = [*model.parameters(), *(criterion.parameters() if isinstance(criterion, nn.Module) else ())]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    owned: Any = {"model": model, "criterion": criterion} if len(parameters) > len([*model.parameters()]) else model

    def fit(batches: Any) -> None:
        for x, *targets in batches:
            optimizer.zero_grad()
            output = model(x)
            value = criterion(output, *targets) if call is None else call(criterion, output, *targets)
            value.backward()
            optimizer.step()

    return TrainLoop(model=owned, optimizer=optimizer, batch=batch, fit=fit)


def monai() -> Iterator[tuple[str, Any]]:
    m = importlib.import_module("monai.losses")
    binary, several = partial(dense, 1, "float"), partial(dense, CLASSES, "channel")
    for name in ("DiceLoss", "GeneralizedDiceLoss", "TverskyLoss", "DiceFocalLoss", "DiceCELoss"):
        made = getattr(m, name)
        yield f"{name}-binary", (binary, partial(made, sigmoid=True))
        yield f"{name}-several", (several, partial(made, softmax=True, to_onehot_y=True))
    for options in ({"jaccard": True}, {"squared_pred": True}, {"batch": True}, {"include_background": False}):
        yield (
            f"DiceLoss-{next(iter(options))}",
            (several, partial(m.DiceLoss, softmax=True, to_onehot_y=True, **options)),
        )
    yield "FocalLoss-binary", (binary, partial(m.FocalLoss, gamma=2.0, alpha=0.25))
    yield "FocalLoss-several", (several, partial(m.FocalLoss, to_onehot_y=True, use_softmax=True))
    yield "SSIMLoss", (images, partial(m.SSIMLoss, spatial_dims=2, win_size=7))
    yield "NACLLoss", (partial(dense, CLASSES, "indices"), partial(m.NACLLoss, classes=CLASSES, dim=2))
    yield (
        "LocalNormalizedCrossCorrelationLoss",
        (images, partial(m.LocalNormalizedCrossCorrelationLoss, spatial_dims=2)),
    )
    yield "GlobalMutualInformationLoss", (images, m.GlobalMutualInformationLoss)


def smp() -> Iterator[tuple[str, Any]]:
    m = importlib.import_module("segmentation_models_pytorch.losses")
    binary, several = partial(dense, 1, "float"), partial(dense, CLASSES, "indices")
    for name in ("DiceLoss", "JaccardLoss", "TverskyLoss", "LovaszLoss", "FocalLoss", "MCCLoss"):
        made = getattr(m, name)
        yield f"{name}-binary", (binary, made if name == "MCCLoss" else partial(made, "binary"))
        if name != "MCCLoss":
            yield f"{name}-several", (several, partial(made, "multiclass"))
    yield "DiceLoss-log", (several, partial(m.DiceLoss, "multiclass", log_loss=True))
    yield "TverskyLoss-focal", (several, partial(m.TverskyLoss, "multiclass", alpha=0.3, beta=0.7, gamma=1.33))
    yield "SoftBCEWithLogitsLoss", (binary, partial(m.SoftBCEWithLogitsLoss, smooth_factor=0.1))
    yield "SoftCrossEntropyLoss", (several, partial(m.SoftCrossEntropyLoss, smooth_factor=0.1, dim=1))


def kornia() -> Iterator[tuple[str, Any]]:
    m = importlib.import_module("kornia.losses")
    several = partial(dense, CLASSES, "indices")
    yield "DiceLoss", (several, m.DiceLoss)
    yield "TverskyLoss", (several, partial(m.TverskyLoss, alpha=0.3, beta=0.7))
    yield "FocalLoss", (several, partial(m.FocalLoss, alpha=0.5, gamma=2.0, reduction="mean"))
    yield "LovaszSoftmaxLoss", (several, m.LovaszSoftmaxLoss)
    yield "LovaszHingeLoss", (partial(dense, 1, "indices"), m.LovaszHingeLoss)
    for name in (
        "SSIMLoss",
        "MS_SSIMLoss",
        "PSNRLoss",
        "CharbonnierLoss",
        "CauchyLoss",
        "WelschLoss",
        "GemanMcclureLoss",
    ):
        options = {"window_size": 5} if name == "SSIMLoss" else {"max_val": 1.0} if name == "PSNRLoss" else {}
        if name != "MS_SSIMLoss":
            made = getattr(m, name)
            mean = {"reduction": "mean"} if name not in ("SSIMLoss", "PSNRLoss") else {}
            yield name, (images, partial(made, **options, **mean))
    yield "HausdorffERLoss", (partial(dense, CLASSES, "channel"), partial(m.HausdorffERLoss, k=3))


def timm() -> Iterator[tuple[str, Any]]:
    m = importlib.import_module("timm.loss")
    labels, many = partial(rows, CLASSES, "labels"), partial(rows, CLASSES, "many")
    yield "LabelSmoothingCrossEntropy", (labels, partial(m.LabelSmoothingCrossEntropy, 0.1))
    yield (
        "SoftTargetCrossEntropy",
        (
            labels,
            m.SoftTargetCrossEntropy,
            lambda loss, out, y: loss(out, 0.9 * nn.functional.one_hot(y, CLASSES).float() + 0.1 / CLASSES),
        ),
    )
    yield "BinaryCrossEntropy", (labels, partial(m.BinaryCrossEntropy, 0.1))
    yield "AsymmetricLossMultiLabel", (many, m.AsymmetricLossMultiLabel)
    yield "AsymmetricLossSingleLabel", (labels, m.AsymmetricLossSingleLabel)
    yield (
        "JsdCrossEntropy",
        (labels, partial(m.JsdCrossEntropy, num_splits=2), lambda loss, out, y: loss(out, y[: len(y) // 2])),
    )


def metric_learning() -> Iterator[tuple[str, Any]]:
    m = importlib.import_module("pytorch_metric_learning.losses")
    labels = partial(rows, 8, "labels")
    plain = (
        "AngularLoss CircleLoss ContrastiveLoss FastAPLoss GeneralizedLiftedStructureLoss IntraPairVarianceLoss "
        "LiftedStructureLoss MarginLoss MultiSimilarityLoss NPairsLoss NTXentLoss SignalToNoiseRatioContrastiveLoss "
        "SupConLoss TripletMarginLoss TupletMarginLoss ThresholdConsistentMarginLoss RankedListLoss"
    )
    for name in plain.split():
        made = getattr(m, name, None)
        if made is not None:
            options = {"margin": 0.4, "Tn": 0.5} if name == "RankedListLoss" else {}
            yield name, (labels, partial(made, **options))
    classes = {"num_classes": CLASSES, "embedding_size": 8}
    for name in (
        "ArcFaceLoss",
        "CosFaceLoss",
        "NormalizedSoftmaxLoss",
        "ProxyAnchorLoss",
        "ProxyNCALoss",
        "SoftTripleLoss",
    ):
        yield name, (labels, partial(getattr(m, name), **classes))


def pycox() -> Iterator[tuple[str, Any]]:
    loss = importlib.import_module("pycox.models.loss")
    yield "cox_ph_loss", (partial(survival, 1), lambda: loss.CoxPHLoss(), lambda c, out, t, e: c(out, t, e.float()))
    cut = lambda t: (t / t.max() * 4.99).long()  # noqa: E731
    for name in ("NLLLogistiHazardLoss", "NLLPMFLoss", "NLLMTLRLoss", "NLLPCHazardLoss"):
        made = getattr(loss, name)
        if name == "NLLPCHazardLoss":
            call: Any = lambda c, out, t, e: c(out, cut(t), e.float(), t / t.max() * 4.99 % 1)  # noqa: E731
        else:
            call = lambda c, out, t, e: c(out, cut(t), e.float())  # noqa: E731
        yield name, (partial(survival, 5), made, call)


def torchsurv() -> Iterator[tuple[str, Any]]:
    cox = importlib.import_module("torchsurv.loss.cox")
    weibull = importlib.import_module("torchsurv.loss.weibull")
    yield "cox", (partial(survival, 1), lambda: cox.neg_partial_log_likelihood, lambda c, out, t, e: c(out, e, t))
    yield "weibull", (partial(survival, 2), lambda: weibull.neg_log_likelihood, lambda c, out, t, e: c(out, e, t))


LIBRARIES = {
    "monai": monai,
    "segmentation_models_pytorch": smp,
    "kornia": kornia,
    "timm": timm,
    "pytorch_metric_learning": metric_learning,
    "pycox": pycox,
    "torchsurv": torchsurv,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", default="")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path.append(str(options.folder))
    only = None if options.all else [name for name, check in of("loop").items() if check.family in FAMILIES]
    judged = accused = 0
    for library, losses in LIBRARIES.items():
        try:
            made = list(losses())
        except Exception as error:
            print(f"{library}: not run: {type(error).__name__}: {error}", flush=True)
            continue
        for name, spec in made:
            if options.k not in f"{library}.{name}":
                continue
            began = time.process_time()
            try:
                results = check_loop(partial(loop, *spec), only=only, raises=False).results
            except Exception as error:
                print(f"{library}.{name}: not run: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            judged += 1
            accused += any(r.outcome == "failed" for r in results)
            print(f"{library}.{name}: {time.process_time() - began:.0f} s", flush=True)
            for result in results:
                if result.outcome == "error":
                    print(f"  error {result.check}: {result.reason[:200]}", flush=True)
                for finding in result.findings:
                    print(
                        f"  {finding.level} {result.check}:{finding.cause}: {finding.summary} [{finding.where}]",
                        flush=True,
                    )
    print(f"{judged} losses judged, {accused} accused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
