"""Losses of embeddings: pytorch_metric_learning's and monai's."""

from __future__ import annotations

from pytest_trainloop.declare.callcontract import CallContract
from pytest_trainloop.instruments.losses.table.entry import Entry

_PAGE = "https://kevinmusgrave.github.io/pytorch-metric-learning/losses/"

_OF_PAIRS = """ContrastiveLoss TripletMarginLoss NTXentLoss SupConLoss MultiSimilarityLoss CircleLoss FastAPLoss
NPairsLoss LiftedStructureLoss GeneralizedLiftedStructureLoss MarginLoss TupletMarginLoss AngularLoss NCALoss
IntraPairVarianceLoss SignalToNoiseRatioContrastiveLoss SmoothAPLoss RankedListLoss PNPLoss"""

_OF_CLASSES = """ArcFaceLoss CosFaceLoss SubCenterArcFaceLoss SphereFaceLoss LargeMarginSoftmaxLoss ProxyNCALoss
ProxyAnchorLoss SoftTripleLoss NormalizedSoftmaxLoss"""
"""They have weights for each class, and need no pair of rows."""

ENTRIES = (
    Entry(
        names=tuple(f"pytorch_metric_learning.losses.{name}" for name in _OF_PAIRS.split()),
        contracts=(
            CallContract(
                arguments={"embeddings": "embeddings", "labels": "labels"},
                when={"indices_tuple": None, "ref_emb": None, "ref_labels": None},
            ),
        ),
        page=_PAGE,
    ),
    Entry(
        names=tuple(f"pytorch_metric_learning.losses.{name}" for name in _OF_CLASSES.split()),
        contracts=(CallContract(arguments={"embeddings": "embeddings"}),),
        page=_PAGE,
        weights=True,
    ),
)
