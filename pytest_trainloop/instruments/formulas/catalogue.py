"""All forms, those of one field in one module."""

from __future__ import annotations

from pytest_trainloop.instruments.formulas import (
    boxes,
    classification,
    contrastive,
    focal,
    likelihoods,
    mixtures,
    policies,
    quantiles,
    segmentation,
    separation,
    survival,
)

FORMS = (
    *boxes.FORMS,
    *segmentation.FORMS,
    *classification.FORMS,
    *focal.FORMS,
    *likelihoods.FORMS,
    *mixtures.FORMS,
    *quantiles.FORMS,
    *policies.FORMS,
    *survival.FORMS,
    *contrastive.FORMS,
    *separation.FORMS,
)
